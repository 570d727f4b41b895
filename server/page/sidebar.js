// The list of conversations: opens, names, deletes, exports and imports them.

import { button, byId, element, keep, kept, visible } from "./elements.js";
import { exported, imported, nameOf, save, talksOf } from "./talks.js";

let acts = null;
let current = null; // the talk that is shown
let deleted = null; // the last one, which can come back

/** `open(talk)` shows a talk, `discard(talk)` deletes it, `showError(error)` says what went wrong. */
export function startSidebar(given) {
  acts = given;
  const toggle = byId("talks-button");
  const show = (isOpen) => {
    byId("talks").hidden = !isOpen;
    toggle.setAttribute("aria-expanded", String(isOpen));
    keep("talks", isOpen);
  };
  toggle.addEventListener("click", () => show(byId("talks").hidden));
  byId("close-talks").addEventListener("click", () => {
    show(false);
    toggle.focus();
  });
  byId("export").addEventListener("click", () => download(talksOf(current.mode), "conversations"));
  byId("import").addEventListener("click", () => byId("import-file").click());
  byId("import-file").addEventListener("change", importFiles);
  byId("undo").addEventListener("click", async () => {
    const talk = deleted;
    deleted = null;
    acts.open(talk);
    await save(talk);
    showTalks(talk);
  });
  show(kept("talks") ?? false);
}

/** Shows the list anew: what has the focus there keeps it. */
export function showTalks(talk) {
  current = talk;
  const focused = byId("talks").contains(document.activeElement) ? document.activeElement.dataset.of : null;
  if (document.activeElement?.matches("#talks input[name=name]")) return; // a name is being written
  const all = talksOf(talk.mode);
  byId("talk-list").replaceChildren(...all.map(row));
  byId("export").disabled = !all.length;
  byId("undo-field").hidden = deleted?.mode !== talk.mode;
  if (focused) byId("talk-list").querySelector(`[data-of="${focused}"]`)?.focus();
}

function row(talk) {
  const isCurrent = talk === current;
  const name = button(visible(nameOf(talk)), () => acts.open(talk), "quiet name");
  if (isCurrent) name.ariaCurrent = "true";
  name.dataset.of = talk.id;
  const line = element("li", {}, name);
  if (isCurrent) {
    line.append(element(
      "div",
      { className: "turn-actions" },
      button("Rename", () => rename(talk, line), "quiet"),
      button("Export", () => download([talk], nameOf(talk)), "quiet"),
      button("Delete", () => {
        deleted = talk;
        acts.discard(talk);
      }, "quiet"),
    ));
  }
  return line;
}

function rename(talk, line) {
  const box = element("input", { name: "name", value: nameOf(talk), ariaLabel: "Name of the conversation", maxLength: 200 });
  let isOver = false; // to take the box away is to leave it once more
  const end = async (isNew) => {
    if (isOver) return;
    isOver = true;
    box.remove();
    if (isNew) {
      talk.name = box.value.trim() || null; // without a name it is named after its first message again
      await save(talk);
    }
    showTalks(current);
    byId("talk-list").querySelector("[aria-current]")?.focus();
  };
  box.addEventListener("keydown", (event) => {
    if (event.isComposing || !["Enter", "Escape"].includes(event.key)) return;
    event.preventDefault();
    end(event.key === "Enter");
  });
  box.addEventListener("blur", () => end(true));
  line.replaceChildren(box);
  box.select();
  box.focus();
}

function download(talks, name) {
  const file = new Blob([exported(talks)], { type: "application/json" });
  const link = element("a", { href: URL.createObjectURL(file), download: `${name.replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40)}.json` });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

async function importFiles() {
  const input = byId("import-file");
  acts.showError(null);
  try {
    let last = null;
    for (const file of input.files) last = (await imported(await file.text(), visible(file.name))).at(-1) ?? last;
    showTalks(current);
    if (last?.mode === current.mode) acts.open(last);
  } catch (error) {
    acts.showError(error);
  }
  input.value = "";
}
