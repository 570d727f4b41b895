// The chat: conversations that are kept, each with one request at a time. A completion is a chat of one turn without roles.

import { AnswerView, resultCard, totalsText } from "./answer.js";
import { chunks } from "./api.js";
import { chosenFiles, fileCards, startFiles, takeFiles } from "./attachments.js";
import { addChoice, append, canContinue, FAILED, LEFT, LOST, newAnswer, replaceFrom, requestFor, showVersion, takeBack, tokensOf, totals, wholeReport } from "./conversation.js";
import { button, byId, copyButton, element, keep, kept, onEscape, visible } from "./elements.js";
import { scorer } from "./scoring.js";
import { askedFields, showMode } from "./settings.js";
import { showTalks, startSidebar } from "./sidebar.js";
import { openSnippets } from "./snippets.js";
import { onOtherTabs } from "./store.js";
import { forget, keepUnfinished, loadTalks, newTalk, rememberShown, save, takeOver } from "./talks.js";

const PROMPTS = {
  chat: ["Tell me a story about a fox and a bird.", "Write a story in which a child finds a key.", "What can you do?"],
  completion: ["Once upon a time there was a little fox who", "One day a girl named Mia found"],
};

const form = byId("composer");
const transcript = byId("transcript");
const modes = byId("modes").elements.mode;
const views = byId("modes").elements.view;

const SAVE_EVERY = 1000; // milliseconds, while an answer comes

let shown = null; // the talk of each mode
const runs = new Map(); // a talk -> its request under way: { stop, turn, view, replaced }
const discarded = new WeakSet(); // talks that are not to be saved, though their answer may still come
let modelName = null;
let trouble = null; // the error that is shown
let isServerReady = true; // until the page learns otherwise

const WHY = {
  [LEFT]: "The page was left before this answer was complete.",
  [LOST]: "The connection to the server was lost before this answer was complete.",
  [FAILED]: "An error ended this answer before it was complete.",
};

const mode = () => modes.value;
const talk = () => shown[mode()];
const running = () => runs.get(talk());
/** Other views keep their place while an answer goes on. */
const toBottom = () => byId("chat").hidden || scrollTo(0, document.documentElement.scrollHeight);
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
    if (talk().turns.length && grown > 0 && isAtBottom(80 + grown)) toBottom();
  }).observe(dock);
}

export async function startChat(model) {
  modelName = model;
  shown = await loadTalks();
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  form.elements.prompt.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });
  const stop = () => running()?.stop.abort();
  onEscape("chat", stop);
  byId("stop").addEventListener("click", stop);
  byId("retry").addEventListener("click", retry);
  byId("new-chat").addEventListener("click", () => open(newTalk(mode())));
  byId("code").addEventListener("click", showCode);
  modes.value = kept("mode") ?? "chat";
  views.value = kept("view") ?? "text";
  for (const choice of [...modes, ...views]) choice.addEventListener("change", show);
  startFiles(showError);
  startSidebar({ open, discard, showError });
  onOtherTabs(otherTab);
  addEventListener("pagehide", () => keepUnfinished([...runs.keys()], talk()));
  // Some browsers break the answer off before they hide the page.
  addEventListener("beforeunload", () => {
    for (const { turn } of runs.values()) if (turn) turn.end = LEFT;
  });
  if (!CSS.supports("field-sizing: content")) form.elements.prompt.rows = 3;
  show();
  if (talk().turns.length) toBottom();
  followDock();
}

/** Shows a talk. Answers under way in others go on. */
function open(chosen) {
  shown[mode()] = chosen;
  discarded.delete(chosen);
  if (mode() === "completion") form.elements.prompt.value = chosen.turns[0]?.content ?? "";
  show();
  toBottom();
  if (matchMedia("(pointer: fine)").matches) form.elements.prompt.focus(); // elsewhere it brings a keyboard
}

async function discard(unwanted) {
  discarded.add(unwanted);
  runs.get(unwanted)?.stop.abort();
  if (unwanted === talk()) open(newTalk(mode()));
  await forget(unwanted);
  showTalks(talk());
}

/** Another tab wrote a talk, or removed it: null. One that is being answered here stays as it is here. */
function otherTab(id, written) {
  if ([...runs.keys()].some((busy) => busy.id === id)) return;
  takeOver(id, written);
  for (const [name, { id: mine }] of Object.entries(shown)) if (mine === id) shown[name] = written ?? newTalk(name);
  if (talk().id === id || written === null) show();
  else showTalks(talk());
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

/** Saves a talk, and how it is shown here. */
async function store(changed) {
  showTalks(talk());
  byId("not-kept").hidden = await save(changed);
  showTalks(talk());
}

/** Shows the mode and its talk anew. */
function show() {
  const { turns } = talk();
  keep("mode", mode());
  keep("view", views.value);
  rememberShown(shown);
  showMode(mode());
  setBusy(Boolean(running()));
  showPending();
  byId("new-chat").textContent = mode() === "chat" ? "New chat" : "New text";
  const { prompt } = form.elements;
  prompt.placeholder = prompt.ariaLabel = mode() === "chat" ? "Message" : "Text to continue";
  if (mode() === "completion") prompt.value ||= turns[0]?.content ?? "";
  transcript.replaceChildren(...(turns.length ? turns.map(cardOf).filter(Boolean) : [emptyState()]));
  showTotals();
  showTalks(talk());
}

function cardOf(turn) {
  if (turn.role === "tool") return resultCard(turn);
  if (turn.role === "assistant") return viewOf(turn).card;
  return mode() === "completion" && talk().turns.length > 1 ? null : userCard(turn);
}

function viewOf(turn) {
  const { turns } = talk();
  const given = mode() === "completion" ? turns[0].content : null;
  // A long conversation is kept without its tokens.
  const shownAs = turn.end && !tokensOf(turn).length ? "text" : views.value;
  const view = new AnswerView(turn, { view: shownAs, given, score: scorer(mode(), turns, turn) });
  if (turn === running()?.turn) running().view = view;
  else finishView(view, turn);
  return view;
}

/** Adds what can be done with an answer once it is there. */
function finishView(view, turn) {
  const { turns } = talk();
  view.actions.replaceChildren(
    ...versionButtons(turn),
    copyButton(() => turn.content),
    ...(turn === turns.at(-1) && canContinue(turn) ? [button("Continue", () => answer({ cut: turn }), "quiet changes")] : []),
    button("Regenerate", () => regenerate(turns.indexOf(turn)), "quiet changes"),
    button("Code", () => openSnippets(...requestFor(mode(), turns, turns.indexOf(turn), turn.asked)), "quiet"),
  );
  if (turn.calls.length && turn === turns.at(-1)) view.askForResults((results) => sendResults(turn, results));
}

/** Buttons to the versions before and after, where a turn has others. */
function versionButtons(turn) {
  if (!turn.versions) return [];
  const { versions, version } = turn;
  const to = (number, sign, name) => {
    const act = () => {
      if (running()) return;
      showVersion(talk().turns, talk().turns.indexOf(turn), number);
      show();
      store(talk());
    };
    return Object.assign(button(sign, act, "quiet changes"), { ariaLabel: name, disabled: !versions[number] });
  };
  const count = element("span", { className: "versions" }, `${version + 1} of ${versions.length}`);
  return [to(version - 1, "‹", "Version before"), count, to(version + 1, "›", "Version after")];
}

function userCard(turn) {
  const card = element("article", { className: "turn user", ariaLabel: "Your message" });
  const read = () => card.replaceChildren(
    ...fileCards(turn.files),
    ...(turn.content ? [element("p", { className: "bubble" }, visible(turn.content))] : []),
    element("div", { className: "turn-actions" }, ...versionButtons(turn), copyButton(() => turn.content), button("Edit", edit, "quiet changes")),
  );
  const edit = () => {
    const box = element("textarea", { value: turn.content, rows: 3, ariaLabel: "Edited message" });
    const save = () => {
      if (running() || !box.value.trim()) return;
      const { turns } = talk();
      replaceFrom(turns, turns.indexOf(turn), { role: "user", content: box.value, files: turn.files });
      answer();
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
  if (running() || !(prompt.value.trim() || chosenFiles(mode()).length)) return;
  if (mode() === "completion" && talk().turns.length) shown.completion = newTalk("completion"); // each is a text of its own
  const { turns } = talk();
  turns.push({ role: "user", content: prompt.value, files: takeFiles(mode()) });
  if (mode() === "chat") prompt.value = "";
  answer();
}

/** Answers anew what stands before `place`. What came after is kept as a version. */
function regenerate(place) {
  if (!running()) answer({ place });
}

function sendResults(turn, results) {
  if (running()) return;
  const { turns } = talk();
  for (const [place, { id, name }] of turn.calls.entries()) turns.push({ role: "tool", content: results[place], callId: id, name });
  answer();
}

/** Answers what has no answer, or goes on with one that was cut, or else answers anew. */
function retry() {
  const { turns } = talk();
  const last = turns.at(-1);
  if (isOpen(last)) answer();
  else if (canContinue(last)) answer({ cut: last });
  else regenerate(turns.length - 1);
}

/** `cut`: the last answer, which goes on with the settings that it began with. `place`: where a new one stands. */
async function answer({ cut = null, place = talk().turns.length } = {}) {
  const mine = talk();
  if (runs.has(mine)) return;
  const run = { stop: new AbortController(), turn: cut, view: null, replaced: null };
  if (cut) cut.end = null;
  runs.set(mine, run);
  show();
  let problem = null;
  try {
    run.turn ??= newAnswer(askedFields(mine.mode, await modelName()));
    const [path, body] = requestFor(mine.mode, mine.turns, cut ? mine.turns.length : place, run.turn.asked);
    if (!cut) run.replaced = replaceFrom(mine.turns, place, run.turn);
    if (mine === talk()) {
      show();
      toBottom();
    }
    store(mine);
    await receive(mine, run, path, body);
  } catch (error) {
    problem = error;
  }
  finish(mine, run, problem);
}

/** Reads the answer as it comes; text is drawn once a frame, not once a chunk. */
async function receive(mine, run, path, body) {
  const { turn, stop } = run;
  const started = performance.now() - turn.seconds * 1000; // of an answer that goes on, its beginning counts as well
  const { report: earlier, numTokens: numBefore } = turn;
  const waiting = [];
  let frame = 0;
  let nextSave = performance.now() + SAVE_EVERY;
  const draw = () => {
    frame = 0;
    if (mine === talk()) following(() => run.view.update(true));
    if (performance.now() < nextSave || discarded.has(mine)) return;
    nextSave = performance.now() + SAVE_EVERY;
    save(mine);
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
function finish(mine, run, problem) {
  const { turn, view } = run;
  const isShown = mine === talk();
  const isStopped = problem?.name === "AbortError";
  runs.delete(mine);
  if (isShown) setBusy(false);
  if (turn && problem) turn.end ??= isStopped ? "stopped by you" : problem.status === 0 ? LOST : FAILED;
  const isPart = turn && mine.turns.includes(turn);
  if (isPart && !turn.numTokens) takeBack(mine.turns, turn, run.replaced);
  if (isShown && isPart && turn.numTokens) {
    following(() => {
      view.update(false);
      finishView(view, turn);
    });
  } else if (isShown) show();
  if (isShown && problem && !isStopped) {
    showError(problem);
    toBottom();
  }
  showTotals();
  if (!discarded.has(mine)) store(mine);
}

async function showCode() {
  try {
    const { turns } = talk();
    const content = form.elements.prompt.value;
    const files = chosenFiles(mode());
    // Without a message it is the request of the last answer, as it would be sent with the settings of now.
    const before = turns.slice(0, content || files.length ? turns.length : 1 + turns.findLastIndex(isOpen));
    const asked = content || files.length ? [...(mode() === "chat" ? before : []), { role: "user", content, files }] : before;
    if (!asked.length) throw new Error("Write a message first: the code is that of the request with it.");
    openSnippets(...requestFor(mode(), asked, asked.length, askedFields(mode(), await modelName())));
  } catch (error) {
    showError(error);
  }
}

function showTotals() {
  byId("totals").textContent = totalsText(totals(talk().turns));
}

/** Offers to complete what has no answer, or a part of one for a reason from outside. */
function showPending() {
  const last = running() ? null : talk().turns.at(-1);
  const why = isOpen(last) ? "The last message has no answer yet." : WHY[last?.end];
  showError(why ? new Error(why) : null);
}

function showError(error) {
  trouble = error;
  byId("error").hidden = error === null;
  const state = !isServerReady ? " This page waits for the server." : error?.status === 0 ? " The server is there again." : "";
  byId("error-text").textContent = error === null ? "" : visible(error.message + state);
  const last = talk().turns.at(-1);
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
