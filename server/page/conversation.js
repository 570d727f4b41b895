// What has been said, and the request that goes on with it. Knows nothing of how it is shown or kept.
//
// A turn is { role: "user", content, files }, { role: "tool", content, callId, name } or an answer: what `newAnswer`
// returns. A turn in whose place others stood has `versions`: for each, the turns from there to the end of the
// conversation, and null in its own place, `version`.

// Ends that came from outside.
export const LEFT = "as the page was left";
export const LOST = "as the connection was lost";
export const FAILED = "with an error";

/** `asked`: the request's fields and the system prompt that the answer came from. */
export function newAnswer(asked) {
  return {
    role: "assistant",
    asked,
    content: "",
    thoughts: "", // its reasoning, as the server reads it
    calls: [], // { id, name, arguments }
    thoughtTokens: [],
    tokens: [],
    numTokens: 0,
    ignored: [], // fields of the request that the server left out
    report: null, // the server's account of the speculation
    first: null, // seconds until the first token
    seconds: 0,
    end: null, // why it ended
  };
}

export const tokensOf = (turn) => [...turn.thoughtTokens, ...turn.tokens];

/** Returns an answer with the types that this page relies on, of what a file has. */
export function answerOf(given) {
  const made = newAnswer(Object(given.asked));
  for (const name of ["content", "thoughts"]) made[name] = String(given[name] ?? "");
  made.first = given.first == null ? null : Number(given.first);
  made.seconds = Number(given.seconds ?? 0);
  made.calls = (given.calls ?? []).map((call) => ({ id: String(call.id), name: String(call.name), arguments: String(call.arguments) }));
  for (const name of ["thoughtTokens", "tokens"]) made[name] = (given[name] ?? []).filter((token) => typeof token?.text === "string");
  made.numTokens = Number(given.numTokens ?? tokensOf(made).length);
  made.ignored = (given.ignored ?? []).map(String);
  const counted = ["rounds", "drafted_tokens", "accepted_tokens", "acceptance_rate", "acceptance_length"];
  if (counted.every((name) => Number.isFinite(given.report?.[name]))) made.report = { ...given.report, verification: String(given.report.verification) };
  made.end = String(given.end ?? LEFT);
  if (given.stopReason !== undefined) made.stopReason = typeof given.stopReason === "string" ? given.stopReason : null;
  return made;
}

/** Puts `turn` in the place of all turns from `place` on, which it keeps as a version. Returns that version's number. */
export function replaceFrom(turns, place, turn) {
  const tail = turns.splice(place);
  turns.push(turn);
  if (!tail.length) return null;
  const { versions = [null], version = 0 } = tail[0];
  delete tail[0].versions;
  turn.versions = [...versions, null];
  turn.versions[version] = tail;
  turn.version = versions.length;
  return version;
}

/** Shows another version of the turn at `place`, and what followed it. */
export function showVersion(turns, place, number) {
  const tail = turns.splice(place);
  const { versions, version } = tail[0];
  delete tail[0].versions;
  turns.push(...versions[number]);
  versions[version] = tail;
  versions[number] = null;
  Object.assign(turns[place], { versions, version: number });
}

/** Takes back a turn that came to nothing: what it replaced returns, by its number. */
export function takeBack(turns, turn, replaced) {
  const place = turns.indexOf(turn);
  const { versions, version } = turn;
  if (replaced === null) {
    turns.splice(place);
    return;
  }
  showVersion(turns, place, replaced);
  versions.splice(version, 1);
  if (versions.length === 1) delete turns[place].versions;
}

/** An answer that was cut can go on from its text; JSON and calls of functions would begin anew. */
export function canContinue({ role, content, calls, asked, end }) {
  if (role !== "assistant" || !content || calls.length || asked.tools || asked.response_format) return false;
  if (end === "length") return Boolean(asked.max_completion_tokens || asked.max_tokens); // else the context is full
  return !["stop", "tool_calls", "content_filter"].includes(end);
}

/** Returns path and body of the request that answers the turns before `end`, or goes on with the last of them. */
export function requestFor(mode, turns, end, { system, ...fields }) {
  const before = turns.slice(0, end);
  if (mode === "completion") return ["v1/completions", { ...fields, prompt: before.map(({ content }) => content).join("") }];
  const { model, ...others } = fields;
  if (before.at(-1).role === "assistant") others.continue_final_message = true;
  const messages = [...(system ? [{ role: "system", content: system }] : []), ...before.map(asMessage)];
  return ["v1/chat/completions", { model, messages, ...others }];
}

/** Returns a message's text with the files before it, each in a fence that is longer than any in it. */
function withFiles({ content, files = [] }) {
  const blocks = files.map(({ name, text }) => {
    const longest = Math.max(2, ...(text.match(/`+/g) ?? []).map((run) => run.length));
    const fence = "`".repeat(longest + 1);
    return `${name}:\n${fence}\n${text}${text.endsWith("\n") ? "" : "\n"}${fence}`;
  });
  return [...blocks, content].filter(Boolean).join("\n\n");
}

function asMessage(turn) {
  const message = { role: turn.role, content: withFiles(turn) };
  if (turn.thoughts) message.reasoning_content = turn.thoughts;
  if (turn.role === "tool") message.tool_call_id = turn.callId;
  if (turn.calls?.length) {
    message.tool_calls = turn.calls.map(({ id, name, arguments: given }) => ({ id, type: "function", function: { name, arguments: given } }));
  }
  return message;
}

/** Adds what a choice of the answer, or of a chunk of it, brings. */
export function addChoice(turn, choice, waiting) {
  const part = choice.delta ?? choice.message ?? { content: choice.text };
  const wasAnswering = turn.content !== "" || turn.calls.length > 0;
  turn.thoughts += part.reasoning_content ?? "";
  for (const [place, call] of (part.tool_calls ?? []).entries()) addCall(turn.calls, call, call.index ?? place);
  append(waiting, choice.origins ?? []);
  turn.numTokens += choice.origins?.length ?? 0;
  placeTokens(turn, part.content ?? "", waiting, wasAnswering || Boolean(part.tool_calls?.length), choice.finish_reason !== null);
  turn.content += part.content ?? "";
  if (choice.finish_reason) turn.end = choice.finish_reason;
  if (choice.stop_reason !== undefined) turn.stopReason = choice.stop_reason;
}

function addCall(calls, part, place) {
  const call = (calls[place] ??= { id: "", name: "", arguments: "" });
  call.id += part.id ?? "";
  call.name += part.function.name ?? "";
  call.arguments += part.function.arguments ?? "";
}

/**
 * Moves tokens to the reasoning or to the answer. `waiting` are those of which it is not known yet what they are:
 * where reasoning ends within a piece, the last tokens that have the content's length are the answer's.
 */
function placeTokens(turn, content, waiting, isAnswering, isLast) {
  if (!turn.thoughts && !isAnswering && !content && !isLast) return;
  let numThoughts = turn.thoughts ? waiting.length : 0;
  if (isAnswering) numThoughts = 0;
  else if (turn.thoughts) {
    for (let length = 0; numThoughts && length < content.length; ) length += waiting[--numThoughts].text.length;
  }
  append(turn.thoughtTokens, waiting.splice(0, numThoughts));
  append(turn.tokens, waiting.splice(0));
}

/** Appends to a list; an answer in one piece may have more tokens than a function takes arguments. */
export function append(list, items) {
  for (const item of items) list.push(item);
}

/** Returns the server's account of an answer that went on; null if its beginning has none. */
export function wholeReport(earlier, hasBeginning, report) {
  if (!hasBeginning) return report;
  if (!earlier) return null;
  const sum = (name) => earlier[name] + report[name];
  const [rounds, drafted_tokens, accepted_tokens] = ["rounds", "drafted_tokens", "accepted_tokens"].map(sum);
  const counts = { rounds, drafted_tokens, accepted_tokens };
  return { ...report, ...counts, acceptance_rate: accepted_tokens / drafted_tokens, acceptance_length: 1 + accepted_tokens / rounds };
}

/** Returns the sums over all answers, from the same figures that stand below each. */
export function totals(turns) {
  const sum = { answers: 0, tokens: 0, drafted: 0, accepted: 0 };
  for (const turn of turns.filter(({ role }) => role === "assistant")) {
    sum.answers += 1;
    sum.tokens += turn.numTokens;
    sum.drafted += turn.report?.drafted_tokens ?? 0;
    sum.accepted += turn.report?.accepted_tokens ?? 0;
  }
  return sum;
}
