// Text files that go with a message: chosen or dropped, shown above the box and in the conversation.

import { button, byId, element, visible } from "./elements.js";

const MAX_BYTES = 1_000_000;

let chosen = []; // { name, text }

export const chosenFiles = (mode) => (mode === "chat" ? chosen : []);

/** Returns the files of the message that is sent now. The next one begins without any. */
export function takeFiles(mode) {
  const taken = chosenFiles(mode);
  if (taken.length) {
    chosen = [];
    showChosen();
  }
  return taken;
}

/** `complain(error)` shows why a file cannot go with a message. */
export function startFiles(complain) {
  const input = byId("files");
  const add = async (files) => {
    complain(null);
    try {
      chosen.push(...(await Promise.all([...files].map(readText))));
    } catch (error) {
      complain(error);
    }
    showChosen();
  };
  byId("attach").addEventListener("click", () => input.click());
  input.addEventListener("change", async () => {
    await add(input.files);
    input.value = ""; // the same file may be chosen again
    byId("prompt").focus();
  });
  const hasFiles = (event) => event.dataTransfer.types.includes("Files") && !byId("attach").hidden;
  byId("chat").addEventListener("dragover", (event) => hasFiles(event) && event.preventDefault());
  byId("chat").addEventListener("drop", (event) => {
    if (!hasFiles(event)) return;
    event.preventDefault();
    add(event.dataTransfer.files);
  });
}

async function readText(file) {
  if (file.size > MAX_BYTES) throw new Error(`${visible(file.name)} is too large: a text file may have 1 MB.`);
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    if (!text.includes("\0")) return { name: file.name, text };
  } catch {
    // It is refused below.
  }
  throw new Error(`${visible(file.name)} is not a text in UTF-8. Other files cannot go with a message.`);
}

function showChosen() {
  byId("chosen").hidden = !chosen.length;
  byId("chosen").replaceChildren(...chosen.map((file) => {
    const remove = button("×", () => {
      chosen = chosen.filter((other) => other !== file);
      showChosen();
      byId("prompt").focus();
    }, "quiet");
    return element("li", {}, visible(file.name), Object.assign(remove, { ariaLabel: `Remove ${visible(file.name)}` }));
  }));
}

/** Returns what shows the files of a message. */
export const fileCards = (files = []) => files.map(({ name, text }) => element(
  "details",
  { className: "file" },
  element("summary", {}, visible(name)),
  element("pre", { tabIndex: 0 }, visible(text)),
));
