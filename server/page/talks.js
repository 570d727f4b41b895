// The conversations: their names, which one each mode shows, how they are kept, exported and imported.
//
// A talk is { id, mode: "chat" | "completion", name: null | string, changed: milliseconds, turns }; see conversation.js.

import { answerOf, LEFT, takeBack } from "./conversation.js";
import { keep, kept } from "./elements.js";
import { readAll, remove, write } from "./store.js";

const FORMAT = "truedraft conversations";
const NAME_LENGTH = 60;
const UNFINISHED = "left"; // talks that were under way when the page was left
const SHOWN = "shown"; // in this tab: the talk of each mode

const talks = new Map(); // by id: those that have begun
let isKept = true;

/** Returns a talk that is in no list until it is saved. */
export const newTalk = (mode) => ({ id: crypto.getRandomValues(new Uint32Array(4)).join("-"), mode, name: null, changed: 0, turns: [] });

/** Reads what this browser keeps, and what this tab left under way. Returns the talk that each mode shows. */
export async function loadTalks() {
  const stored = await readAll();
  isKept = stored !== null;
  for (const talk of stored ?? []) talks.set(talk.id, talk);
  for (const talk of kept(UNFINISHED) ?? []) {
    if (!talks.has(talk.id) || talks.get(talk.id).changed <= talk.changed) talks.set(talk.id, talk);
  }
  for (const talk of talks.values()) endOpenAnswers(talk);
  const shown = kept(SHOWN) ?? {};
  return Object.fromEntries(["chat", "completion"].map((mode) => [mode, talks.get(shown[mode]) ?? newTalk(mode)]));
}

function endOpenAnswers(talk) {
  for (const turn of talk.turns) if (turn.role === "assistant") turn.end ??= LEFT;
  const last = talk.turns.at(-1);
  // The page was left before the last answer began.
  if (last?.role === "assistant" && !last.numTokens) takeBack(talk.turns, last, last.versions ? last.version - 1 : null);
}

/** Remembers for a reload of this tab which talks are shown. */
export const rememberShown = (shown) => keep(SHOWN, Object.fromEntries(Object.entries(shown).map(([mode, { id }]) => [mode, id])));

/**
 * Keeps talks over a reload that comes before the database has them, and the one that is shown where there is no
 * database: without what is known of each token, if that is too much.
 */
export function keepUnfinished(running, shown) {
  const unfinished = running.includes(shown) || isKept || !shown.turns.length ? running : [...running, shown];
  if (keep(UNFINISHED, unfinished)) return;
  const withoutTokens = (name, value) => (name === "tokens" || name === "thoughtTokens" ? [] : value);
  keep(UNFINISHED, JSON.parse(JSON.stringify(unfinished, withoutTokens)));
}

/** Returns the talks of a mode, the one that changed last first. */
export const talksOf = (mode) => [...talks.values()].filter((talk) => talk.mode === mode).sort((one, other) => other.changed - one.changed);

/** A talk is named after its first message, until a person names it. */
export function nameOf({ name, turns }) {
  const [first] = turns;
  const words = name ?? (first?.content || first?.files?.[0]?.name || "").trim().split(/\s+/).join(" ");
  return words.length > NAME_LENGTH ? `${words.slice(0, NAME_LENGTH - 1)}…` : words || "New conversation";
}

/** Returns false if this browser keeps nothing. */
export async function save(talk) {
  if (!talk.turns.length) return isKept;
  talk.changed = Date.now();
  talks.set(talk.id, talk);
  isKept = await write(talk);
  return isKept;
}

export async function forget(talk) {
  talks.delete(talk.id);
  await remove(talk.id);
}

/** Takes over what another tab wrote or removed. */
export function takeOver(id, talk) {
  if (talk) talks.set(id, talk);
  else talks.delete(id);
}

/** Returns the text of a file that `imported` reads. */
export const exported = (chosen) => JSON.stringify({ format: FORMAT, version: 1, conversations: chosen }, null, 1);

/** Saves the conversations of a file; returns them. Those that are here as they are there are left out. */
export async function imported(text, fileName) {
  const found = readExport(text, fileName);
  const turnsOf = (talk) => JSON.stringify(talkOf(JSON.parse(JSON.stringify(talk))).turns);
  const added = found.filter((talk) => !talks.has(talk.id) || turnsOf(talks.get(talk.id)) !== turnsOf(talk));
  for (const talk of added) {
    if (talks.has(talk.id)) talk.id = newTalk(talk.mode).id; // both stay
    await save(talk);
  }
  return added;
}

function readExport(text, fileName) {
  try {
    const { format, conversations } = JSON.parse(text);
    if (format === FORMAT) return conversations.map(talkOf);
  } catch {
    // It is refused below.
  }
  throw new Error(`${fileName} is not a file that “Export” of this page wrote.`);
}

const isText = (value) => typeof value === "string";

/** Returns a talk of what a file has, with the types that this page relies on; throws on what is no talk. */
function talkOf({ id, mode, name, turns }) {
  if (!isText(id) || !["chat", "completion"].includes(mode) || !turns.length) throw new TypeError();
  return { id, mode, name: isText(name) ? name : null, changed: 0, turns: turns.map(turnOf) };
}

function turnOf(turn) {
  if (!isText(turn.content)) throw new TypeError();
  const made = { assistant: answerOf, tool: resultOf, user: messageOf }[turn.role](turn);
  if (Array.isArray(turn.versions) && turn.versions[turn.version] === null) {
    made.version = turn.version;
    made.versions = turn.versions.map((tail) => tail && tail.map(turnOf));
  }
  return made;
}

const resultOf = ({ content, callId, name }) => ({ role: "tool", content, callId: String(callId), name: String(name) });

function messageOf({ content, files = [] }) {
  return { role: "user", content, files: files.map(({ name, text }) => ({ name: String(name), text: String(text) })) };
}
