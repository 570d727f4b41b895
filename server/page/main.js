// The page's frame: tabs, theme, the server's state, the API key.

import { allowAsking, getJson, onKeyNeeded, onLoss } from "./api.js";
import { allowChat, serverChanged, startChat } from "./chat.js";
import { byId, element, keep, kept, visible } from "./elements.js";
import { follow, redrawLive, startLive } from "./live.js";
import { raceInChats, raceOn, startRace } from "./race.js";
import { showServer, startAbout } from "./server.js";
import { offerSources, startSettings } from "./settings.js";
import { startSnippets } from "./snippets.js";
import { watchTokens } from "./tokens.js";

const VIEWS = ["chat", "race", "live"];
const THEMES = ["system", "light", "dark"];
const SLOWLY = 10_000;
const QUICKLY = 1000;

function open(view) {
  const isNew = byId(view).hidden;
  for (const name of VIEWS) {
    const tab = byId(`tab-${name}`);
    tab.setAttribute("aria-selected", String(name === view));
    tab.tabIndex = name === view ? 0 : -1;
    byId(name).hidden = name !== view;
  }
  history.replaceState(null, "", `#/${view}`); // with a slash it names no element, to which browsers would scroll
  follow();
  // A conversation is read from its end, the other views from their top.
  if (isNew) scrollTo(0, view === "chat" ? document.documentElement.scrollHeight : 0);
}

function startTabs() {
  for (const [place, name] of VIEWS.entries()) {
    const tab = byId(`tab-${name}`);
    tab.addEventListener("click", () => open(name));
    tab.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      const next = VIEWS[(place + step + VIEWS.length) % VIEWS.length];
      open(next);
      byId(`tab-${next}`).focus();
    });
  }
  const asked = location.hash.slice(2);
  open(VIEWS.includes(asked) ? asked : "chat");
}

function startTheme() {
  const button = byId("theme");
  const show = (theme) => {
    document.documentElement.dataset.theme = theme;
    button.textContent = `Theme: ${theme}`;
    redrawLive();
  };
  button.addEventListener("click", () => {
    const theme = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length];
    localStorage.setItem("theme", theme);
    show(theme);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawLive);
  const kept = localStorage.getItem("theme");
  show(THEMES.includes(kept) ? kept : "system");
}

/** Asks for the key in a dialog; resolves to "" if it is closed without one. */
function askForKey(wasRefused) {
  const dialog = byId("key-dialog");
  byId("key-error").hidden = !wasRefused;
  byId("key").value = "";
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener(
      "close",
      () => {
        const key = dialog.returnValue === "ok" ? byId("key").value : "";
        byId("key").value = "";
        byId("key-button").hidden = key !== "";
        resolve(key);
      },
      { once: true },
    );
  });
}

async function meetServer() {
  await listModels();
  const proposers = await showServer(card());
  if (!proposers) return;
  offerSources(proposers);
  raceOn(proposers);
}

let wasReady = null;
let nextLook = 0;

async function watchServer() {
  let state = { status: "unreachable", reason: "The server does not answer." };
  try {
    state = await (await fetch("ready", { cache: "no-store", signal: AbortSignal.timeout(SLOWLY) })).json();
  } catch {
    // It may come back.
  }
  byId("dot").className = `dot ${state.status}`;
  const isReady = state.status === "ready";
  if (isReady !== wasReady) {
    byId("server-text").textContent = isReady ? "Ready" : visible(state.reason);
    if (isReady) meetServer();
    serverChanged(isReady);
  }
  wasReady = isReady;
  clearTimeout(nextLook); // of another look, at the same time
  nextLook = setTimeout(watchServer, isReady ? SLOWLY : QUICKLY);
}

let listing = null;
let cards = []; // what the server says of each model

const card = () => cards.find(({ id }) => id === byId("model").value) ?? cards[0];

/** Fills in the names that requests may use, until the model is loaded, which tells all about it. */
function listModels(isAnew = false) {
  if (!isAnew && card()?.max_model_len != null) return null;
  listing ??= fillModels().finally(() => (listing = null));
  return listing;
}

async function fillModels() {
  try {
    cards = (await getJson("v1/models")).data;
  } catch {
    return; // Without a key there is nothing to choose from; the request itself will say so.
  }
  const select = byId("model");
  const chosen = select.value || kept("model");
  // A server of several models says which of them are loaded.
  const words = cards.map(({ id, status }) => visible(status && status.value !== "loaded" ? `${id} (${status.value})` : id));
  if (words.join("\n") !== [...select.options].map(({ text }) => text).join("\n")) {
    select.replaceChildren(...cards.map(({ id }, place) => element("option", { value: id, selected: id === chosen }, words[place])));
  }
  byId("model-field").hidden = cards.length < 2;
  modelChosen();
}

/** Adapts the page to the model that requests name. */
function modelChosen() {
  keep("model", byId("model").value);
  const hasTemplate = card().max_model_len == null || card().tool_form !== null; // null until it is loaded
  allowChat(hasTemplate);
  raceInChats(hasTemplate);
}

async function modelName() {
  await listModels();
  return byId("model").value;
}

onKeyNeeded(askForKey);
byId("key-button").addEventListener("click", () => {
  allowAsking();
  meetServer();
});
document.addEventListener("submit", allowAsking, { capture: true });
byId("model").addEventListener("change", modelChosen);
byId("model").addEventListener("focus", () => listModels(true)); // their states may have changed
watchTokens();
startSettings();
startSnippets();
startAbout();
startRace(modelName);
startLive(modelName);
startTheme();
startTabs();
await startChat(modelName);
if (!byId("chat").hidden) byId("prompt").focus({ preventScroll: true });
onLoss(watchServer);
watchServer();
