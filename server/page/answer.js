// One answer of the model as it is shown: its reasoning, what it says, the functions it calls, its figures.

import { tokensOf } from "./conversation.js";
import { button, element, fillFigures, percent, plural, seconds, visible } from "./elements.js";
import { codeBlock, MarkdownView } from "./markdown.js";
import { originSummary, TokenText } from "./tokens.js";

const ENDS = {
  stop: "by itself",
  tool_calls: "with a function call",
  content_filter: "filtered",
};

/** Says why the answer ended. */
function endOf({ end, stopReason, asked }) {
  if (end === "length") return asked.max_completion_tokens || asked.max_tokens ? "at max tokens" : "context is full";
  if (end === "stop" && typeof stopReason === "string") return `at ${JSON.stringify(stopReason)}`;
  return ENDS[end] ?? end;
}

/** Returns [term, value] pairs, all about this answer and about nothing else. */
export function figuresOf(turn) {
  const { report, numTokens, seconds: time } = turn;
  const figures = [["tokens", numTokens.toLocaleString("en")], ["time", seconds(time)]];
  if (numTokens && time) figures.push(["tokens/s", (numTokens / time).toFixed(1)]);
  if (turn.first !== null && turn.asked.stream) figures.push(["first token", seconds(turn.first)]);
  if (report?.drafted_tokens) {
    figures.push(["drafts accepted", `${report.accepted_tokens} of ${report.drafted_tokens} (${percent(report.acceptance_rate)})`]);
    figures.push(["tokens per drafting round", report.acceptance_length.toFixed(2)], ["verification", report.verification.replaceAll("_", " ")]);
  } else if (report) figures.push(["drafts accepted", "nothing was drafted"]);
  if (turn.end) figures.push(["ended", endOf(turn)]);
  return figures;
}

export class AnswerView {
  /** `given`: the text that a completion continues. `score`: see `TokenText`. */
  constructor(turn, { view, given = null, score = null }) {
    Object.assign(this, { turn, score, given, isText: view === "text" });
    this.said = element("div", { className: this.isText ? "prose" : "text", tabIndex: this.isText ? -1 : 0 });
    if (!this.isText) Object.assign(this.said, { role: "group", ariaLabel: "Tokens of the answer; arrow keys go from one to the next" });
    this.calls = element("div");
    this.footer = element("footer");
    this.summary = element("div", { className: "summary" });
    this.figures = element("dl", { className: "figures" });
    this.actions = element("div", { className: "turn-actions" });
    this.footer.append(this.summary, this.figures, this.actions);
    const text = given === null ? [this.said] : [element("span", { className: "given" }, visible(given)), this.said];
    this.card = element("article", { className: given === null ? "turn assistant" : "turn continued", ariaLabel: "Answer" }, ...text, this.calls, this.footer);
    if (this.isText) this.markdown = new MarkdownView(this.said);
    else this.tokens = new TokenText(this.said, score);
    this.update(false);
  }

  /** Shows what has come since the last time. */
  update(isRunning) {
    const { turn } = this;
    this.showThoughts(isRunning);
    if (!this.isText) this.tokens.add(turn.tokens.slice(this.tokens.number));
    else if (this.given !== null) this.said.textContent = visible(turn.content);
    else if (turn.asked.response_format) this.showJson(isRunning);
    else this.markdown.show(turn.content);
    this.card.classList.toggle("waiting", isRunning && !turn.content && !turn.thoughts && !turn.calls.length);
    this.calls.replaceChildren(...turn.calls.map(callCard));
    fillFigures(this.figures, figuresOf(turn));
    if (!this.isText && !isRunning) this.summary.replaceChildren(...originSummary(tokensOf(turn)));
    if (turn.ignored.length) this.showIgnored();
  }

  /** Reasoning is open while nothing else has been said, then folded. */
  showThoughts(isRunning) {
    const { turn } = this;
    if (!turn.thoughts) return;
    if (!this.reasoning) {
      this.thoughts = element("div", { className: "thoughts", tabIndex: 0 });
      this.thoughtTokens = new TokenText(this.thoughts, this.score);
      this.reasoning = element("details", { className: "reasoning", open: isRunning }, element("summary", {}, "Reasoning"), this.thoughts);
      this.card.prepend(this.reasoning);
      this.isThinking = true;
    }
    if (this.isThinking && (turn.content || turn.calls.length || !isRunning)) {
      this.isThinking = false;
      this.reasoning.open = false;
    }
    if (this.isText) this.thoughts.textContent = visible(turn.thoughts);
    else this.thoughtTokens.add(turn.thoughtTokens.slice(this.thoughtTokens.number));
  }

  showJson(isRunning) {
    if (isRunning) {
      this.said.replaceChildren(element("pre", {}, visible(this.turn.content)));
      return;
    }
    let text = this.turn.content;
    try {
      text = JSON.stringify(JSON.parse(text), null, 2);
    } catch {
      // It was cut: shown as it is.
    }
    this.said.replaceChildren(...(text ? [codeBlock("JSON", text)] : []));
  }

  showIgnored() {
    this.notice ??= this.card.insertBefore(element("p", { className: "notice" }), this.footer);
    this.notice.textContent = visible(`The server left out: ${this.turn.ignored.join(", ")}. This model or server has no such thing.`);
  }

  /** Asks for the results of the calls; `send` gets them in order. */
  askForResults(send) {
    const fields = this.turn.calls.map(({ name }) => element("textarea", { rows: 1, placeholder: `What ${visible(name)} returns`, ariaLabel: `Result of ${visible(name)}` }));
    this.card.insertBefore(
      element("div", { className: "results" }, ...fields, button(`Send ${fields.length > 1 ? "results" : "result"}`, () => send(fields.map(({ value }) => value)), "primary")),
      this.footer,
    );
  }
}

/** A function call, readably: its name, and its arguments one a line. */
function callCard({ name, arguments: given }) {
  const values = asObject(given);
  const list = element("dl", { className: "arguments" });
  fillFigures(list, Object.entries(values ?? {}).map(([key, value]) => [visible(key), visible(typeof value === "string" ? value : JSON.stringify(value))]));
  return element(
    "section",
    { className: "call" },
    element("p", {}, "Calls ", element("code", {}, visible(name)), values && !Object.keys(values).length ? " without arguments" : ""),
    values ? list : element("pre", {}, visible(given)),
  );
}

/** Returns null for arguments that are not, or not yet, an object. */
function asObject(text) {
  try {
    const value = JSON.parse(text || "{}");
    return value !== null && typeof value === "object" && !Array.isArray(value) ? value : null;
  } catch {
    return null;
  }
}

export function resultCard(turn) {
  return element("section", { className: "call result" }, element("p", {}, "Result of ", element("code", {}, visible(turn.name))), element("pre", {}, visible(turn.content)));
}

/** Says what the sums of all answers are. */
export function totalsText({ answers, tokens, drafted, accepted }) {
  if (!answers) return "";
  const drafts = drafted ? `, ${accepted} of ${drafted} drafts accepted (${percent(accepted / drafted)})` : "";
  return `In all: ${plural(answers, "answer")}, ${plural(tokens, "token")}${drafts}`;
}
