// Colours of code. The library is loaded with the first block of code, and gives its parts as data: no HTML is parsed.

import { element, visible } from "./elements.js";

const MAX_LENGTH = 20_000; // characters: what is longer stays as it is, since an answer is coloured as it grows

let grammars = null; // of the library, once it is there
let loading = null;

function load() {
  window.Prism = { manual: true }; // it is not to look through the page by itself
  loading ??= import("./vendor/prism.js").then(({ default: Prism }) => (grammars = Prism), () => null);
  return loading;
}

/** Fills `code` with a text in the colours of its language. A language that is not known has none. */
export function fillCode(code, language, text) {
  code.textContent = visible(text);
  if (!/^[\w#+-]{1,20}$/.test(language) || text.length > MAX_LENGTH) return;
  if (grammars) colour(code, language, text);
  else load().then(() => grammars && code.isConnected && colour(code, language, text));
}

const ALIASES = { "c++": "cpp", "c#": "csharp", golang: "go", rs: "rust", zsh: "bash", console: "bash", jsonc: "json", jsx: "javascript", tsx: "typescript" };

function colour(code, language, text) {
  const name = language.toLowerCase();
  const grammar = Object.hasOwn(grammars.languages, ALIASES[name] ?? name) ? grammars.languages[ALIASES[name] ?? name] : null;
  if (typeof grammar !== "object" || grammar === null) return;
  code.replaceChildren(...nodesOf(grammars.tokenize(text, grammar)));
}

const nodesOf = (parts) => [parts].flat().map((part) => (
  typeof part === "string" ? visible(part) : element("span", { className: `syntax-${part.type}` }, nodesOf(part.content))
));
