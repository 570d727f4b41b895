// What the server says of itself, in words: the line at the top, and the table behind it.

import { getJson } from "./api.js";
import { byId, fillFigures, visible } from "./elements.js";
import { SOURCES } from "./tokens.js";

const OF_REQUESTS = ["prediction", "grammar"]; // they draft where a request brings one

const deviceName = (device) => (device.startsWith("cuda") ? `GPU (${device})` : device.toUpperCase());

/** Says who drafts for requests that do not choose. */
function drafter(speculation, draft) {
  if (!speculation?.proposer) return null;
  const { proposer, proposers, num_speculative_tokens: length } = speculation;
  if (proposer === "none" || length === 0) return "nobody, unless a request asks for it";
  const names = proposer === "auto" ? Object.keys(SOURCES).filter((name) => proposers.includes(name) && !OF_REQUESTS.includes(name)) : [proposer];
  if (!names.length) return "nobody, unless a request brings a prediction or a grammar";
  const own = draft?.startsWith("self:") && `the model's own weights in ${draft.slice(5)}`;
  return names.map((name) => (name === "draft_model" && own) || SOURCES[name][1]).join(" or ");
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

/**
 * Shows a ready server, and returns what can draft there. `card`: of the served model; without a key it is unknown,
 * as is who drafts.
 */
export async function showServer(card) {
  const named = card ? `?model=${encodeURIComponent(card.id)}` : "";
  const version = await getJson(`version${named}`).catch(() => null);
  if (!version) return null;
  const speculation = card && (await getJson(`speculation${named}`).catch(() => null));
  byId("server-text").textContent = visible(summary(version, speculation));
  fillFigures(byId("about-facts"), facts(version, speculation, card));
  return speculation?.proposers ?? null;
}

export function startAbout() {
  byId("server").addEventListener("click", () => byId("about-dialog").showModal());
}
