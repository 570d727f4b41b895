// The playground: one request at a time, its tokens in the colour of their origin.

import { chunks } from "./api.js";
import { byId, element, fillFigures, numbers, percent, seconds, visible } from "./elements.js";
import { OriginCount, TokenText } from "./tokens.js";

const form = byId("prompt-form");
const transcript = byId("transcript");
const PROMPTS = { chat: "Tell me a story about a fox and a bird.", completion: "Once upon a time there was a little fox who" };

let conversation = []; // messages of the chat so far
let running = null; // AbortController of the request under way
let origins;

const isNarrow = () => matchMedia("(max-width: 760px)").matches;
const mode = () => form.elements.mode.value;

export function startPlayground(modelName) {
  origins = new OriginCount(byId("legend"), byId("origin-bar"));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (!running) generate(modelName);
  });
  form.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
  });
  document.addEventListener("keydown", (event) => event.key === "Escape" && running?.abort());
  byId("stop-generating").addEventListener("click", () => running?.abort());
  byId("clear").addEventListener("click", clear);
  for (const choice of form.elements.mode) choice.addEventListener("change", changeMode);
  byId("parameters").open = !isNarrow();
  clear();
}

function changeMode() {
  const other = mode() === "chat" ? "completion" : "chat";
  byId("prompt-label").textContent = mode() === "chat" ? "Message" : "Text to continue";
  if (form.elements.prompt.value === PROMPTS[other]) form.elements.prompt.value = PROMPTS[mode()];
  clear();
}

function clear() {
  running?.abort();
  conversation = [];
  origins.clear();
  byId("error").hidden = true;
  fillFigures(byId("figures"), []);
  transcript.replaceChildren(
    element("p", { className: "empty" }, "Every token will show where it came from: drafted and accepted, or drawn by the target model."),
  );
}

function request(model) {
  const fields = form.elements;
  const stop = fields.stop.value.split("\n").filter(Boolean);
  const { num_speculative_tokens = "auto", ...sampling } = numbers(form, [
    "max_tokens", "temperature", "top_p", "seed", "num_speculative_tokens",
  ]);
  const body = {
    model,
    ...sampling,
    ...(stop.length && { stop }),
    stream: fields.stream.checked,
    ...(fields.stream.checked && { stream_options: { include_usage: true } }),
    speculation: {
      method: fields.method.value,
      num_speculative_tokens,
      ...(fields.verification.value && { verification: fields.verification.value }),
      origins: fields.probabilities.checked ? true : "sources",
    },
  };
  if (mode() === "completion") return ["v1/completions", { ...body, prompt: fields.prompt.value }];
  return ["v1/chat/completions", { ...body, messages: conversation }];
}

/** The prompt as it is shown, and the element that the tokens go into. */
function openTurn(prompt) {
  if (mode() === "completion" || conversation.length === 1) transcript.replaceChildren();
  const text = element("div", { className: "text", tabIndex: 0 });
  text.setAttribute("aria-label", "Generated text; arrow keys go from token to token");
  if (mode() === "chat") {
    transcript.append(element("p", { className: "turn user" }, visible(prompt)), element("div", { className: "turn assistant" }, text));
  } else {
    transcript.append(element("div", { className: "turn continued" }, element("span", { className: "given" }, visible(prompt)), text));
  }
  return text;
}

/** An answer as it comes. The tokens of its reasoning are in a block above the others, folded once those come. */
class Answer {
  constructor(text) {
    this.text = new TokenText(text);
    this.content = "";
    this.thoughts = ""; // as the server reads them
    this.waiting = []; // tokens of which it is not known yet what they are
  }

  /** `part`: the message, or what a chunk adds to it. */
  add(tokens, part, isLast) {
    this.waiting.push(...tokens);
    if (part.reasoning_content) this.reasoning ??= this.openReasoning();
    this.thoughts += part.reasoning_content ?? "";
    const content = part.content ?? "";
    let first = this.waiting.length; // of the content's tokens
    if (this.content || (!this.reasoning && (content || isLast))) first = 0;
    else if (content) {
      for (let length = 0; first && length < content.length; ) length += this.waiting[--first].text.length;
      if (this.block) this.block.open = false;
    } else if (!this.reasoning) return;
    this.content += content;
    this.reasoning?.add(this.waiting.slice(0, first));
    this.text.add(this.waiting.slice(first));
    this.waiting = [];
  }

  openReasoning() {
    const thoughts = element("div", { className: "thoughts", tabIndex: 0 });
    thoughts.setAttribute("aria-label", "Reasoning; arrow keys go from token to token");
    this.block = element("details", { className: "reasoning", open: true }, element("summary", {}, "Reasoning"), thoughts);
    this.text.container.before(this.block);
    return new TokenText(thoughts);
  }
}

async function generate(modelName) {
  const prompt = form.elements.prompt.value;
  running = new AbortController();
  setBusy(true);
  const model = await modelName();
  if (mode() === "chat") conversation.push({ role: "user", content: prompt });
  const [path, body] = request(model);
  const answer = new Answer(openTurn(prompt));
  if (isNarrow()) byId("origin-bar").scrollIntoView({ behavior: "smooth" });
  const run = { started: performance.now(), first: null, tokens: 0, report: null, usage: null, end: null };
  try {
    for await (const chunk of chunks(path, body, running.signal)) {
      for (const choice of chunk.choices) {
        const added = choice.origins ?? [];
        if (added.length) run.first ??= performance.now();
        run.tokens += added.length;
        const atEnd = transcript.scrollHeight - transcript.scrollTop - transcript.clientHeight < 60;
        answer.add(added, choice.delta ?? choice.message ?? { content: choice.text }, choice.finish_reason);
        origins.add(added);
        if (atEnd) transcript.scrollTop = transcript.scrollHeight;
        run.end = choice.finish_reason ?? run.end;
      }
      run.report = chunk.truedraft ?? run.report;
      run.usage = chunk.usage ?? run.usage;
      showFigures(run);
    }
  } catch (error) {
    if (error.name === "AbortError") run.end = "stopped here";
    else showError(error);
  } finally {
    running = null;
    setBusy(false);
    showFigures(run);
    if (mode() === "chat") {
      const { content, thoughts } = answer;
      if (run.tokens) conversation.push({ role: "assistant", content, ...(thoughts && { reasoning_content: thoughts }) });
      else conversation.pop();
    }
  }
}

function showFigures(run) {
  const elapsed = (performance.now() - run.started) / 1000;
  const figures = [["tokens", String(run.usage?.completion_tokens ?? run.tokens)]];
  if (run.tokens) figures.push(["tokens/s", (run.tokens / elapsed).toFixed(1)]);
  if (run.first && form.elements.stream.checked) figures.push(["first token", seconds((run.first - run.started) / 1000)]);
  figures.push(["time", seconds(elapsed)]);
  const report = run.report;
  if (report?.acceptance_rate != null) {
    figures.push(
      ["accepted", `${report.accepted_tokens} of ${report.drafted_tokens} (${percent(report.acceptance_rate)})`],
      ["acceptance length", report.acceptance_length.toFixed(2)],
      ["verification", report.verification],
    );
  }
  if (run.end) figures.push(["end", run.end]);
  fillFigures(byId("figures"), figures);
}

function showError(error) {
  byId("error").textContent = visible(error.message);
  byId("error").hidden = false;
}

function setBusy(isBusy) {
  byId("generate").disabled = isBusy;
  byId("stop-generating").disabled = !isBusy;
  transcript.setAttribute("aria-busy", String(isBusy));
  if (isBusy) {
    byId("error").hidden = true;
    if (mode() === "completion") origins.clear();
  }
}
