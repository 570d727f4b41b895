// What the server says of itself, in words: the line at the top, and the table behind it.

import { getJson } from "./api.js";
import { byId, fillFigures, visible } from "./elements.js";

const DRAFTERS = { draft_model: "a draft model", ngram: "n-grams of the text", prediction: "predictions", grammar: "grammars" };

const deviceName = (device) => (device.startsWith("cuda") ? `GPU (${device})` : device.toUpperCase());

/** Says who drafts for requests that do not choose. */
function drafter(speculation, draft) {
  if (!speculation?.proposer) return null;
  const { proposer, proposers, num_speculative_tokens: length } = speculation;
  if (proposer === "none" || length === 0) return "nobody, unless a request asks for it";
  const names = proposer === "auto" ? ["draft_model", "ngram"].filter((name) => proposers.includes(name)) : [proposer];
  const model = draft?.startsWith("self:") ? `the model's own weights in ${draft.slice(5)}` : DRAFTERS.draft_model;
  return names.map((name) => (name === "draft_model" ? model : DRAFTERS[name])).join(" or ");
}

/** Returns the line at the top. */
function summary(version, speculation) {
  const drafts = drafter(speculation, version.draft);
  return [
    version.model,
    version.device && deviceName(version.device),
    version.weights?.length && `weights ${version.weights[0]}`,
    drafts && (drafts.startsWith("nobody") ? "no drafts" : `drafts by ${drafts}`),
  ].filter(Boolean).join(" · ");
}

function facts(version, speculation, card) {
  return [
    ["Name in requests", version.model],
    ["Target model", version.target],
    ["Draft model", version.draft ?? "none"],
    ["Who drafts", drafter(speculation, version.draft)],
    ["Draft length", speculation && (speculation.num_speculative_tokens === "auto" ? "automatic, by expected speed" : String(speculation.num_speculative_tokens))],
    ["Device", version.device && deviceName(version.device)],
    ["Weights of the target", version.weights?.join(", ")],
    ["Multiplied in", version.dtype],
    ["Computed by", version.forward],
    ["Context", card?.max_model_len && `${card.max_model_len.toLocaleString("en")} tokens of prompt and answer`],
    ["Chat template", card && (card.tool_form ? `yes; tool calls in the form “${card.tool_form}”` : "none: completions only")],
    ["Server", `${version.name} ${version.version}`],
    ["Fingerprint", version.system_fingerprint],
  ].filter(([, value]) => value).map(([term, value]) => [term, visible(value)]);
}

/** Shows a ready server. `card`: of the served model; without a key it is unknown, as is who drafts. */
export async function showServer(card) {
  const version = await getJson("version").catch(() => null);
  if (!version) return;
  const speculation = card && (await getJson("speculation").catch(() => null));
  byId("server-text").textContent = visible(summary(version, speculation));
  fillFigures(byId("about-facts"), facts(version, speculation, card));
}

export function startAbout() {
  byId("server").addEventListener("click", () => byId("about-dialog").showModal());
}
