// Building the page's elements. Text goes in as text nodes only: nothing here parses HTML.

export const byId = (id) => document.getElementById(id);

/** `properties` are set on the element, `children` are elements, text, or lists of these, however long. */
export function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  for (const child of children.flat()) made.append(child);
  return made;
}

export function button(text, act, className = "") {
  const made = element("button", { type: "button", className }, text);
  made.addEventListener("click", act);
  return made;
}

/** Calls `act` on Escape while `view` is shown, unless the key belongs to a dialog, a text that is composed, or another listener. */
export function onEscape(view, act) {
  document.addEventListener("keydown", (event) => {
    const isTaken = event.defaultPrevented || event.isComposing || document.querySelector("dialog[open]");
    if (event.key === "Escape" && !isTaken && !byId(view).hidden) act();
  });
}

/** A button that copies what `read` returns and says so. */
export function copyButton(read, className = "quiet") {
  const made = button("Copy", async () => {
    made.textContent = (await copy(read())) ? "Copied" : "Not allowed";
    setTimeout(() => (made.textContent = "Copy"), 1500);
  }, className);
  return made;
}

async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text).then(() => true, () => false);
  // Over plain HTTP from another machine browsers offer the old way only.
  const carrier = element("textarea", { value: text, className: "hidden" });
  (document.querySelector("dialog[open]") ?? document.body).append(carrier);
  carrier.select();
  const isCopied = document.execCommand("copy");
  carrier.remove();
  return isCopied;
}

/** Fills a definition list with [term, value] pairs. */
export function fillFigures(list, pairs) {
  list.replaceChildren(
    ...pairs.map(([term, value]) => element("div", {}, element("dt", {}, term), element("dd", {}, value))),
  );
}

export function seconds(value) {
  return value < 1 ? `${Math.round(value * 1000)} ms` : `${value.toFixed(2)} s`;
}

export const percent = (share) => `${Math.round(share * 100)}%`;

export const plural = (number, noun) => `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;

/** Shows control characters, and those that turn the direction of text, as signs that can be seen. */
export function visible(text) {
  return text.replace(
    /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]/g,
    (character) => {
      const code = character.charCodeAt(0);
      if (code < 0x20) return String.fromCharCode(0x2400 + code);
      if (code === 0x7f) return "\u2421";
      return `[U+${code.toString(16).toUpperCase().padStart(4, "0")}]`;
    },
  );
}

/** Returns the numbers of a form; what is left empty is left out. Throws what to mend. */
export function numbers(form, names) {
  const found = {};
  for (const name of names) {
    checkNumber(form.elements[name]);
    const value = form.elements[name].value.trim();
    if (value !== "") found[name] = Number(value);
  }
  return found;
}

/** A step of 1 means whole numbers; any other one only says how far the arrows of the field go. */
function checkNumber({ labels, min, max, step, validity }) {
  const isWhole = step === "1";
  if (!(validity.badInput || validity.rangeUnderflow || validity.rangeOverflow || (isWhole && validity.stepMismatch))) return;
  const range = min && max ? ` from ${min} to ${max}` : min && ` of at least ${min}`;
  throw new Error(`“${labels[0].textContent.trim()}” must be a ${isWhole ? "whole " : ""}number${range}.`);
}

/** Reads what `keep` kept in this tab; a reload finds it, another tab does not. */
export function kept(name) {
  try {
    return JSON.parse(sessionStorage.getItem(name));
  } catch {
    return null;
  }
}

/** Returns whether there was room for it. */
export function keep(name, value) {
  try {
    sessionStorage.setItem(name, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}
