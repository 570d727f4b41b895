// The page's frame: tabs, theme, the server's state, the API key.

import { allowAsking, getJson, onKeyNeeded } from "./api.js";
import { byId, element, visible } from "./elements.js";
import { follow, redrawLive, startLive } from "./live.js";
import { startPlayground } from "./playground.js";
import { startRace } from "./race.js";
import { watchTokens } from "./tokens.js";

const VIEWS = ["playground", "race", "live"];
const THEMES = ["system", "light", "dark"];
const SLOWLY = 10_000;
const QUICKLY = 1000;

function open(view) {
  for (const name of VIEWS) {
    const tab = byId(`tab-${name}`);
    tab.setAttribute("aria-selected", String(name === view));
    tab.tabIndex = name === view ? 0 : -1;
    byId(name).hidden = name !== view;
  }
  history.replaceState(null, "", `#/${view}`); // with a slash it names no element, to which browsers would scroll
  follow();
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
  open(VIEWS.includes(asked) ? asked : "playground");
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

/** Ask for the key in a dialog; resolves to "" if it is closed without one. */
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

async function watchServer() {
  let state = { status: "unreachable", reason: "the server does not answer" };
  try {
    state = await (await fetch("ready", { cache: "no-store" })).json();
  } catch {
    // It may come back.
  }
  byId("dot").className = `dot ${state.status}`;
  let text = state.status === "ready" ? "Ready" : `${state.status}: ${state.reason}`;
  if (state.status === "ready") {
    const version = await getJson("version").catch(() => null);
    if (version) text = `${version.model} · ${version.draft ? `${version.draft} drafts for ${version.target}` : version.target} · ${[version.device, version.dtype, version.forward].filter(Boolean).join(", ")}`;
    if (!byId("model").length) listModels();
  }
  byId("server-text").textContent = visible(text);
  setTimeout(watchServer, state.status === "ready" ? SLOWLY : QUICKLY);
}

let listing = null;

/** Fill in the names that requests may use, once. */
function listModels() {
  listing ??= fillModels().finally(() => (listing = null));
  return listing;
}

async function fillModels() {
  if (byId("model").length) return;
  try {
    const models = (await getJson("v1/models")).data;
    byId("model").replaceChildren(...models.map(({ id }) => element("option", { value: id }, visible(id))));
    byId("model-field").hidden = models.length < 2;
  } catch {
    // Without a key there is nothing to choose from; the request itself will say so.
  }
}

async function modelName() {
  await listModels();
  return byId("model").value;
}

onKeyNeeded(askForKey);
byId("key-button").addEventListener("click", () => {
  allowAsking();
  listModels();
});
document.addEventListener("submit", allowAsking, { capture: true });
watchTokens();
startPlayground(modelName);
startRace(modelName);
startLive();
startTheme();
startTabs();
watchServer();
