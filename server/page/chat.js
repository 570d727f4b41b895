// The chat: turns that are kept over a reload, one request at a time. A completion is a chat of one turn without roles.

import { AnswerView, resultCard, totalsText } from "./answer.js";
import { chunks } from "./api.js";
import { addChoice, append, newAnswer, requestFor, storedTurns, storeTurns, tokensOf, totals } from "./conversation.js";
import { button, byId, copyButton, element, keep, kept, visible } from "./elements.js";
import { scorer } from "./scoring.js";
import { askedFields, showMode } from "./settings.js";
import { openSnippets } from "./snippets.js";

const PROMPTS = {
  chat: ["Tell me a story about a fox and a bird.", "Write a story in which a child finds a key.", "What can you do?"],
  completion: ["Once upon a time there was a little fox who", "One day a girl named Mia found"],
};

const form = byId("composer");
const transcript = byId("transcript");
const modes = byId("modes").elements.mode;
const views = byId("modes").elements.view;

const conversations = storedTurns();
let turns = null; // of the mode that is shown
let running = null; // the request under way: { stop, turn, view }
let modelName = null;

const mode = () => modes.value;
const toBottom = () => scrollTo(0, document.documentElement.scrollHeight);
const isAtBottom = () => innerHeight + scrollY > document.documentElement.scrollHeight - 80;

export function startChat(model) {
  modelName = model;
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  form.elements.prompt.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });
  document.addEventListener("keydown", (event) => event.key === "Escape" && running?.stop.abort());
  byId("stop").addEventListener("click", () => running?.stop.abort());
  byId("retry").addEventListener("click", () => answer());
  byId("new-chat").addEventListener("click", () => {
    running?.stop.abort();
    conversations[mode()] = [];
    show();
    form.elements.prompt.focus();
  });
  byId("code").addEventListener("click", showCode);
  modes.value = kept("mode") ?? "chat";
  views.value = kept("view") ?? "text";
  for (const choice of [...modes, ...views]) choice.addEventListener("change", show);
  addEventListener("pagehide", store);
  if (!CSS.supports("field-sizing: content")) form.elements.prompt.rows = 3;
  show();
  if (turns.length) toBottom();
}

/** Without a chat template there are no chats. */
export function allowChat(isAllowed) {
  modes[0].disabled = !isAllowed;
  byId("no-chat").hidden = isAllowed;
  if (isAllowed || mode() === "completion") return;
  modes.value = "completion";
  show();
}

function store() {
  keep("mode", mode());
  keep("view", views.value);
  byId("not-kept").hidden = storeTurns(conversations);
}

/** Shows all turns of the mode anew. */
function show() {
  if (turns !== conversations[mode()]) running?.stop.abort();
  turns = conversations[mode()];
  showMode(mode());
  showPending();
  byId("new-chat").textContent = mode() === "chat" ? "New chat" : "Clear";
  const { prompt } = form.elements;
  prompt.placeholder = prompt.ariaLabel = mode() === "chat" ? "Message" : "Text to continue";
  if (mode() === "completion") prompt.value ||= turns[0]?.content ?? "";
  transcript.replaceChildren(...(turns.length ? turns.map(cardOf).filter(Boolean) : [emptyState()]));
  showTotals();
  store();
}

function cardOf(turn) {
  if (turn.role === "tool") return resultCard(turn);
  if (turn.role === "assistant") return viewOf(turn).card;
  return mode() === "completion" && turns.length > 1 ? null : userCard(turn);
}

function viewOf(turn) {
  const given = mode() === "completion" ? turns[0].content : null;
  // A long conversation is kept without its tokens.
  const shownAs = turn.end && !tokensOf(turn).length ? "text" : views.value;
  const view = new AnswerView(turn, { view: shownAs, given, score: scorer(mode(), turns, turn) });
  if (turn !== running?.turn) finishView(view, turn);
  else running.view = view;
  return view;
}

/** Adds what can be done with an answer once it is there. */
function finishView(view, turn) {
  view.actions.replaceChildren(
    copyButton(() => turn.content),
    button("Regenerate", () => regenerate(turns.indexOf(turn)), "quiet changes"),
    button("Code", () => openSnippets(...requestFor(mode(), turns, turns.indexOf(turn), turn.asked)), "quiet"),
  );
  if (turn.calls.length && turn === turns.at(-1)) view.askForResults((results) => sendResults(turn, results));
}

function userCard(turn) {
  const card = element("article", { className: "turn user", ariaLabel: "Your message" });
  const read = () => card.replaceChildren(
    element("p", { className: "bubble" }, visible(turn.content)),
    element("div", { className: "turn-actions" }, copyButton(() => turn.content), button("Edit", edit, "quiet changes")),
  );
  const edit = () => {
    const box = element("textarea", { value: turn.content, rows: 3, ariaLabel: "Edited message" });
    const save = () => {
      if (running || !box.value.trim()) return;
      turn.content = box.value;
      regenerate(turns.indexOf(turn) + 1);
    };
    box.addEventListener("keydown", (event) => {
      if (event.key === "Escape") read();
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      save();
    });
    card.replaceChildren(box, element("div", { className: "actions" }, button("Send", save, "primary"), button("Cancel", read)));
    box.focus();
  };
  read();
  return card;
}

function emptyState() {
  const isChat = mode() === "chat";
  return element(
    "div",
    { className: "empty" },
    element("p", {}, isChat ? "Write a message below, or begin with one of these:" : "Write the beginning of a text below, or take one of these:"),
    element("div", { className: "suggestions" }, ...PROMPTS[mode()].map((prompt) => button(prompt, () => {
      form.elements.prompt.value = prompt;
      send();
    }))),
    element("p", {}, "“Tokens” shows where each token came from: drafted and accepted, or drawn by the target model."),
  );
}

function send() {
  const { prompt } = form.elements;
  if (running || !prompt.value.trim()) return;
  if (mode() === "completion") turns.length = 0; // each is a text of its own
  turns.push({ role: "user", content: prompt.value });
  if (mode() === "chat") prompt.value = "";
  answer();
}

/** Answers anew what stands before `place`; what came after is gone. */
function regenerate(place) {
  if (running) return;
  turns.length = place;
  answer();
}

function sendResults(turn, results) {
  if (running) return;
  for (const [place, { id, name }] of turn.calls.entries()) turns.push({ role: "tool", content: results[place], callId: id, name });
  answer();
}

async function answer() {
  if (running) return;
  const mine = turns; // another mode may be shown before the answer is complete
  running = { stop: new AbortController(), turn: null, view: null };
  show();
  setBusy(true);
  let problem = null;
  try {
    running.turn = newAnswer(askedFields(mode(), await modelName()));
    const [path, body] = requestFor(mode(), mine, mine.length, running.turn.asked);
    mine.push(running.turn);
    if (mode() === "completion") transcript.replaceChildren();
    transcript.append(viewOf(running.turn).card);
    running.view.update(true);
    toBottom();
    await receive(path, body);
  } catch (error) {
    problem = error;
  }
  finish(mine, problem);
}

/** Reads the answer as it comes; text is drawn once a frame, not once a chunk. */
async function receive(path, body) {
  const { turn, stop } = running;
  const started = performance.now();
  const waiting = [];
  let frame = 0;
  const draw = () => {
    frame = 0;
    const follows = isAtBottom();
    running.view.update(true);
    if (follows) toBottom();
  };
  try {
    for await (const chunk of chunks(path, body, stop.signal)) {
      turn.seconds = (performance.now() - started) / 1000;
      turn.ignored = chunk.ignored ?? turn.ignored;
      for (const choice of chunk.choices) addChoice(turn, choice, waiting);
      if (turn.numTokens) turn.first ??= turn.seconds;
      turn.report = chunk.truedraft ?? turn.report;
      frame ||= requestAnimationFrame(draw);
    }
  } finally {
    cancelAnimationFrame(frame);
    append(turn.tokens, waiting); // of an answer that was stopped
  }
}

/** The request has ended, with a problem or without. An answer without a token is none. */
function finish(mine, problem) {
  const { turn, view } = running;
  const isStopped = problem?.name === "AbortError";
  running = null;
  setBusy(false);
  if (turn && problem) turn.end = isStopped ? "stopped by you" : "with an error";
  if (turn?.numTokens) {
    view.update(false);
    finishView(view, turn);
  } else {
    if (turn) mine.splice(mine.indexOf(turn), 1);
    if (mine === turns) show();
  }
  if (problem && !isStopped && mine === turns) {
    showError(problem);
    toBottom();
  }
  showTotals();
  store();
}

async function showCode() {
  try {
    const given = form.elements.prompt.value || PROMPTS[mode()][0];
    const before = mode() === "completion" ? [] : turns;
    openSnippets(...requestFor(mode(), [...before, { role: "user", content: given }], before.length + 1, askedFields(mode(), await modelName())));
  } catch (error) {
    showError(error);
  }
}

function showTotals() {
  byId("totals").textContent = totalsText(totals(turns));
}

/** Offers to answer what has no answer. */
function showPending() {
  const isPending = !running && ["user", "tool"].includes(turns.at(-1)?.role);
  showError(isPending ? new Error("The last message has no answer yet.") : null);
}

function showError(error) {
  byId("error").hidden = error === null;
  byId("error-text").textContent = error === null ? "" : visible(error.message);
  byId("retry").hidden = !["user", "tool"].includes(turns.at(-1)?.role);
}

function setBusy(isBusy) {
  byId("send").hidden = isBusy;
  byId("stop").hidden = !isBusy;
  transcript.setAttribute("aria-busy", String(isBusy));
}
