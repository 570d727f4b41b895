// The chat: turns that are kept over a reload, one request at a time. A completion is a chat of one turn without roles.

import { AnswerView, resultCard, totalsText } from "./answer.js";
import { chunks } from "./api.js";
import { addChoice, append, canContinue, FAILED, LEFT, LOST, newAnswer, requestFor, storedTurns, storeTurns, tokensOf, totals, wholeReport } from "./conversation.js";
import { button, byId, copyButton, element, keep, kept, onEscape, visible } from "./elements.js";
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
let trouble = null; // the error that is shown
let isServerReady = true; // until the page learns otherwise

const WHY = {
  [LEFT]: "The page was left before this answer was complete.",
  [LOST]: "The connection to the server was lost before this answer was complete.",
  [FAILED]: "An error ended this answer before it was complete.",
};

const mode = () => modes.value;
const toBottom = () => scrollTo(0, document.documentElement.scrollHeight);
const isAtBottom = (slack = 80) => innerHeight + scrollY > document.documentElement.scrollHeight - slack;
const isOpen = (turn) => ["user", "tool"].includes(turn?.role); // it has no answer yet

/** Whoever sees the end of the conversation still does so after `change`. */
function following(change) {
  const follows = isAtBottom();
  change();
  if (follows) toBottom();
}

/** The dock grows with what is typed and with errors, over the end of the conversation. */
function followDock() {
  const dock = document.querySelector(".dock");
  let height = dock.offsetHeight;
  new ResizeObserver(() => {
    const grown = dock.offsetHeight - height;
    height = dock.offsetHeight;
    if (turns.length && grown > 0 && isAtBottom(80 + grown)) toBottom();
  }).observe(dock);
}

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
  onEscape("chat", () => running?.stop.abort());
  byId("stop").addEventListener("click", () => running?.stop.abort());
  byId("retry").addEventListener("click", retry);
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
  // Some browsers break the answer off before they hide the page.
  addEventListener("beforeunload", () => running?.turn && (running.turn.end = LEFT));
  if (!CSS.supports("field-sizing: content")) form.elements.prompt.rows = 3;
  show();
  if (turns.length) toBottom();
  followDock();
}

/** Says whether requests make sense now. */
export function serverChanged(isReady) {
  isServerReady = isReady;
  showError(trouble);
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
    ...(turn === turns.at(-1) && canContinue(turn) ? [button("Continue", () => answer(turn), "quiet changes")] : []),
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
      if (event.key === "Escape" && !event.isComposing) {
        event.preventDefault(); // it is not for the answer that may be running
        read();
      }
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

/** Answers what has no answer, or goes on with one that was cut, or else answers anew. */
function retry() {
  const last = turns.at(-1);
  if (isOpen(last)) answer();
  else if (canContinue(last)) answer(last);
  else regenerate(turns.length - 1);
}

/** `cut`: the last answer, which goes on with the settings that it began with. */
async function answer(cut = null) {
  if (running) return;
  const mine = turns; // another mode may be shown before the answer is complete
  running = { stop: new AbortController(), turn: cut, view: null };
  if (cut) cut.end = null;
  show();
  setBusy(true);
  let problem = null;
  try {
    running.turn ??= newAnswer(askedFields(mode(), await modelName()));
    const [path, body] = requestFor(mode(), mine, mine.length, running.turn.asked);
    if (!cut) {
      mine.push(running.turn);
      if (mode() === "completion") transcript.replaceChildren();
      transcript.append(viewOf(running.turn).card);
    }
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
  const started = performance.now() - turn.seconds * 1000; // of an answer that goes on, its beginning counts as well
  const { report: earlier, numTokens: numBefore } = turn;
  const waiting = [];
  let frame = 0;
  const draw = () => {
    frame = 0;
    following(() => running.view.update(true));
  };
  try {
    for await (const chunk of chunks(path, body, stop.signal)) {
      turn.seconds = (performance.now() - started) / 1000;
      turn.ignored = chunk.ignored ?? turn.ignored;
      for (const choice of chunk.choices) addChoice(turn, choice, waiting);
      if (turn.numTokens) turn.first ??= turn.seconds;
      if (chunk.truedraft) turn.report = wholeReport(earlier, numBefore > 0, chunk.truedraft);
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
  if (turn && problem) turn.end ??= isStopped ? "stopped by you" : problem.status === 0 ? LOST : FAILED;
  if (turn?.numTokens) {
    following(() => {
      view.update(false);
      finishView(view, turn);
    });
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
    const content = form.elements.prompt.value;
    // Without a message it is the request of the last answer, as it would be sent with the settings of now.
    const before = turns.slice(0, content ? turns.length : 1 + turns.findLastIndex(isOpen));
    const shown = content ? [...(mode() === "chat" ? before : []), { role: "user", content }] : before;
    if (!shown.length) throw new Error("Write a message first: the code is that of the request with it.");
    openSnippets(...requestFor(mode(), shown, shown.length, askedFields(mode(), await modelName())));
  } catch (error) {
    showError(error);
  }
}

function showTotals() {
  byId("totals").textContent = totalsText(totals(turns));
}

/** Offers to complete what has no answer, or a part of one for a reason from outside. */
function showPending() {
  const last = running ? null : turns.at(-1);
  const why = isOpen(last) ? "The last message has no answer yet." : WHY[last?.end];
  showError(why ? new Error(why) : null);
}

function showError(error) {
  trouble = error;
  byId("error").hidden = error === null;
  const state = !isServerReady ? " This page waits for the server." : error?.status === 0 ? " The server is there again." : "";
  byId("error-text").textContent = error === null ? "" : visible(error.message + state);
  const last = turns.at(-1);
  const isCut = last?.end in WHY;
  byId("retry").hidden = !isOpen(last) && !isCut;
  byId("retry").textContent = isCut && canContinue(last) ? "Continue" : "Try again";
  byId("retry").disabled = !isServerReady;
}

function setBusy(isBusy) {
  byId("send").hidden = isBusy;
  byId("stop").hidden = !isBusy;
  transcript.setAttribute("aria-busy", String(isBusy));
}
