// Building the page's elements. Text goes in as text nodes only: nothing here parses HTML.

export const byId = (id) => document.getElementById(id);

/** `properties` are set on the element, `children` are elements or text. */
export function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

/** Fill a definition list with [term, value] pairs. */
export function fillFigures(list, pairs) {
  list.replaceChildren(
    ...pairs.map(([term, value]) => element("div", {}, element("dt", {}, term), element("dd", {}, value))),
  );
}

export function seconds(value) {
  return value < 1 ? `${Math.round(value * 1000)} ms` : `${value.toFixed(2)} s`;
}

export const percent = (share) => `${Math.round(share * 100)} %`;

/** Control characters and what turns the direction of text, as signs that can be seen. */
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

/** Numbers of a form as numbers; what is left empty is left out. */
export function numbers(form, names) {
  const found = {};
  for (const name of names) {
    const value = form.elements[name].value.trim();
    if (value !== "") found[name] = Number(value);
  }
  return found;
}
