// Markdown as elements, never as HTML: what a model writes is data. Covers what models write of GitHub's dialect.
// Every search that fails is remembered and nesting is bounded, so that the time is linear in the text.

import { fillCode } from "./colours.js";
import { copyButton, element, visible } from "./elements.js";

const MAX_DEPTH = 8; // what is nested deeper stays text
const MAX_LINK = 2000; // characters

const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]+(.*))?$/;
const RULE = /^ {0,3}(?:(?:-[ \t]*){3,}|(?:\*[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|(\d{1,9})[.)])(?: +|$)/;
const SPECIAL = /[\\`*_~[!\n]|https?:\/\//g;
const BARE_URL = /https?:\/\/[^\s<>"'`]{1,2000}/y;
const WORD = /[\p{L}\p{N}_]/u;

/** Shows a text that grows: only the blocks that differ from the last time are built anew. */
export class MarkdownView {
  constructor(container) {
    this.container = container;
    this.sources = [];
  }

  show(text) {
    const blocks = split(text.split(/\r?\n/), 0);
    let same = 0;
    while (same < blocks.length && blocks[same].source === this.sources[same]) same += 1;
    while (this.container.childNodes.length > same) this.container.lastChild.remove();
    for (const block of blocks.slice(same)) this.container.append(block.build());
    this.sources = blocks.map((block) => block.source);
  }
}

export function codeBlock(language, text) {
  const code = element("code");
  fillCode(code, language, text);
  return element(
    "div",
    { className: "code" },
    element("div", { className: "code-head" }, element("span", {}, visible(language)), copyButton(() => text)),
    element("pre", { tabIndex: 0 }, code),
  );
}

const indentOf = (line) => line.length - line.trimStart().length;
const startsBlock = (line) => FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || ITEM.test(line);

/** Returns the blocks of these lines, each with its source and how to build it. */
function split(lines, depth) {
  const blocks = [];
  let at = 0;
  const take = (end, build) => {
    const part = lines.slice(at, end);
    blocks.push({ source: part.join("\n"), build: () => build(part) });
    at = end;
  };
  const until = (from, isEnd) => {
    let end = from;
    while (end < lines.length && !isEnd(end)) end += 1;
    return end;
  };
  while (at < lines.length) {
    const line = lines[at];
    const fence = FENCE.exec(line);
    if (!line.trim()) at += 1;
    else if (fence) {
      const close = (place) => {
        const mark = lines[place].trim();
        return mark.length >= fence[1].length && mark === fence[1][0].repeat(mark.length);
      };
      const end = until(at + 1, close);
      const code = lines.slice(at + 1, end).map((each) => each.slice(Math.min(indentOf(each), indentOf(line))));
      take(Math.min(end + 1, lines.length), () => codeBlock(fence[2].trim().split(/\s/)[0], code.join("\n")));
    } else if (HEADING.test(line)) take(at + 1, ([source]) => heading(source));
    else if (RULE.test(line)) take(at + 1, () => element("hr"));
    else if (QUOTE.test(line) && depth < MAX_DEPTH) take(until(at, (place) => !QUOTE.test(lines[place])), (part) => quote(part, depth));
    else if (ITEM.test(line) && depth < MAX_DEPTH) take(endOfList(lines, at), (part) => list(part, depth));
    else if (isTable(lines, at)) take(until(at + 2, (place) => !lines[place].includes("|")), table);
    else take(until(at + 1, (place) => !lines[place].trim() || (depth < MAX_DEPTH && startsBlock(lines[place])) || isTable(lines, place)), paragraph);
  }
  return blocks;
}

const build = (lines, depth) => split(lines, depth).map((block) => block.build());

const paragraph = (lines) => element("p", {}, inline(lines.map((line) => line.trim()).join("\n")));

function heading(line) {
  const [, marks, text = ""] = HEADING.exec(line);
  // The page's own headings are above those of an answer.
  return element(`h${Math.min(6, marks.length + 2)}`, {}, inline(text.trim().replace(/[ \t]#+$/, "")));
}

const quote = (lines, depth) => element("blockquote", {}, build(lines.map((line) => line.replace(QUOTE, "")), depth + 1));

/** A list goes on with items of its kind, with what is indented, and with lines right after a paragraph. */
function endOfList(lines, start) {
  const first = ITEM.exec(lines[start]);
  const base = first[1].length;
  const belongs = (line) => {
    const item = ITEM.exec(line);
    return indentOf(line) >= base + 2 || (item && Boolean(item[3]) === Boolean(first[3]) && !RULE.test(line));
  };
  let end = start + 1;
  for (let at = start + 1; at < lines.length; at += 1) {
    if (!lines[at].trim()) continue;
    const isLazy = at === end && !startsBlock(lines[at]);
    if (!belongs(lines[at]) && !isLazy) break;
    end = at + 1;
  }
  return end;
}

function list(lines, depth) {
  const first = ITEM.exec(lines[0]);
  const items = [];
  let offset = 0;
  for (const line of lines) {
    const item = ITEM.exec(line);
    if (item && item[1].length < first[1].length + 2) {
      offset = item[0].length;
      items.push([line.slice(offset).replace(/^\[([ xX])\] /, (_, mark) => (mark === " " ? "☐ " : "☑ "))]);
    } else items.at(-1).push(line.slice(Math.min(indentOf(line), offset)));
  }
  const made = element(first[3] ? "ol" : "ul", {}, items.map((item) => element("li", {}, build(item, depth + 1))));
  if (first[3]) made.start = Number(first[3]);
  return made;
}

function cells(line) {
  const found = [""];
  let isCode = false;
  for (let at = 0; at < line.length; at += 1) {
    if (line[at] === "`") isCode = !isCode;
    if (line[at] === "\\" && line[at + 1] === "|") found[found.length - 1] += line[(at += 1)];
    else if (line[at] === "|" && !isCode) found.push("");
    else found[found.length - 1] += line[at];
  }
  if (!found[0].trim()) found.shift();
  if (!found.at(-1)?.trim()) found.pop();
  return found.map((cell) => cell.trim());
}

function isTable(lines, at) {
  const below = lines[at + 1];
  return lines[at].includes("|") && below?.includes("-") && below.includes("|") && cells(below).every((cell) => /^:?-+:?$/.test(cell));
}

function table([head, rule, ...rows]) {
  const sides = cells(rule).map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "end") : "start"));
  const row = (tag, line) => {
    const given = cells(line);
    return element("tr", {}, sides.map((side, place) => {
      const cell = element(tag, {}, inline(given[place] ?? ""));
      cell.style.textAlign = side;
      return cell;
    }));
  };
  return element(
    "div",
    { className: "table" },
    element("table", {}, element("thead", {}, row("th", head)), element("tbody", {}, rows.map((line) => row("td", line)))),
  );
}

/** Returns the nodes of a text within a block. */
function inline(text, depth = 0) {
  const nodes = [];
  const missing = new Set(); // what has been looked for in vain, and would be again further on
  let plain = "";
  let at = 0;
  const say = (end) => {
    plain += text.slice(at, end);
    at = end;
  };
  const put = (node, end) => {
    if (plain) nodes.push(visible(plain));
    nodes.push(node);
    plain = "";
    at = end;
  };
  while (at < text.length) {
    SPECIAL.lastIndex = at;
    const next = SPECIAL.exec(text);
    say(next ? next.index : text.length);
    if (!next) break;
    const mark = text[at];
    if (mark === "\n") put(element("br"), at + 1);
    else if (mark === "\\") {
      if (/[!-/:-@[-`{-~]/.test(text[at + 1] ?? "")) at += 1;
      say(at + 1);
    } else if (mark === "`") {
      const end = afterRun(text, at);
      const close = closingTicks(text, end, end - at, missing);
      if (close < 0) say(end);
      else put(element("code", {}, visible(withoutPadding(text.slice(end, close)))), close + end - at);
    } else if (mark === "[" || mark === "!") {
      const found = depth < MAX_DEPTH ? link(text, mark === "!" ? at + 1 : at, depth) : null;
      if (found) put(found.node, found.end);
      else say(at + 1);
    } else if (mark === "h") {
      BARE_URL.lastIndex = at;
      let url = BARE_URL.exec(text)?.[0].replace(/[.,;:!?*_~\]]+$/, "") ?? "";
      if (url.endsWith(")") && !url.includes("(")) url = url.slice(0, -1);
      const node = anchor(url, [visible(url)]);
      if (node) put(node, at + url.length);
      else say(at + 1);
    } else {
      const found = depth < MAX_DEPTH ? emphasis(text, at, depth, missing) : null;
      if (found) put(found.node, found.end);
      else say(afterRun(text, at));
    }
  }
  if (plain) nodes.push(visible(plain));
  return nodes;
}

const withoutPadding = (code) => (code.startsWith(" ") && code.endsWith(" ") && code.trim() ? code.slice(1, -1) : code);

function afterRun(text, at) {
  let end = at + 1;
  while (text[end] === text[at]) end += 1;
  return end;
}

function closingTicks(text, from, length, missing) {
  const ticks = "`".repeat(length);
  if (missing.has(ticks)) return -1;
  for (let at = text.indexOf(ticks, from); at >= 0; at = text.indexOf(ticks, at)) {
    const end = afterRun(text, at);
    if (end - at === length) return at;
    at = end;
  }
  missing.add(ticks);
  return -1;
}

function emphasis(text, at, depth, missing) {
  const mark = text[at];
  const end = afterRun(text, at);
  if (/^\s?$/.test(text[end] ?? "") || (mark === "_" && WORD.test(text[at - 1] ?? ""))) return null;
  const lengths = mark === "~" ? [2] : [3, 2, 1];
  for (const length of lengths.filter((each) => each <= end - at)) {
    const close = closingMark(text, end, mark.repeat(length), missing);
    if (close < 0) continue;
    const inner = inline(text.slice(at + length, close), depth + 1);
    const node =
      mark === "~" ? element("del", {}, inner)
      : length === 1 ? element("em", {}, inner)
      : length === 2 ? element("strong", {}, inner)
      : element("em", {}, element("strong", {}, inner));
    return { node, end: close + length };
  }
  return null;
}

/** Finds where `mark` closes: at the end of a run that follows text. */
function closingMark(text, from, mark, missing) {
  if (missing.has(mark)) return -1;
  for (let at = text.indexOf(mark, from); at >= 0; at = text.indexOf(mark, at)) {
    const end = afterRun(text, at);
    const fits = mark.length > 1 || (end - at) % 2 === 1;
    const isInWord = mark[0] === "_" && WORD.test(text[end] ?? "");
    if (fits && !isInWord && !/\s/.test(text[at - 1])) return end - mark.length;
    at = end;
  }
  missing.add(mark);
  return -1;
}

/** Reads [label](destination "title"); `at` is the bracket's place. */
function link(text, at, depth) {
  const near = text.slice(at, at + MAX_LINK);
  const middle = near.indexOf("](");
  if (near[0] !== "[" || middle < 0 || near.lastIndexOf("[", middle) > 0 || !near.includes(")", middle)) return null;
  let end = middle + 2;
  for (let open = 1; open; end += 1) {
    if (end === near.length) return null;
    if (near[end] === "(") open += 1;
    else if (near[end] === ")") open -= 1;
  }
  const destination = near.slice(middle + 2, end - 1).trim().split(/\s/)[0].replace(/^<(.*)>$/, "$1");
  const label = near.slice(1, middle) || destination;
  const node = anchor(destination, inline(label, depth + 1));
  return node && { node, end: at + end };
}

/** Returns a link, or null for what leads anywhere but to the web. Its title shows where it leads. */
function anchor(destination, children) {
  const url = URL.canParse(destination) ? new URL(destination) : null;
  if (!["http:", "https:", "mailto:"].includes(url?.protocol)) return null;
  return element("a", { href: url.href, title: url.href, target: "_blank", rel: "noopener noreferrer" }, children);
}
