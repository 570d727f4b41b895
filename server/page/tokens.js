// Tokens in the colour of their origin, with what is known of each on hover, focus or click.

import { byId, element, percent, visible } from "./elements.js";

/** What drafts, by its name in requests: its name in a legend, and in a sentence. */
export const SOURCES = {
  draft_model: ["draft model", "a draft model"],
  eagle: ["EAGLE head", "an EAGLE head"],
  mtp: ["MTP head", "the checkpoint's MTP head"],
  assistant: ["assistant model", "an assistant model"],
  ngram: ["n-gram", "n-grams of the text"],
  prediction: ["prediction", "predictions"],
  grammar: ["grammar", "grammars"],
};

/** Kinds in the order of the legend. An accepted token's kind is who drafted it. */
export const KINDS = {
  ...Object.fromEntries(Object.entries(SOURCES).map(([name, [label]]) => [name, `accepted, ${label}`])),
  recovered: "recovered",
  bonus: "bonus",
  plain: "plain",
};

const MEANINGS = {
  accepted: "Drafted and accepted by the target model.",
  recovered: "Drawn by the target model in place of a drafted token that it rejected.",
  bonus: "Drawn by the target model after all drafted tokens were accepted.",
  plain: "Drawn by the target model alone: nothing was drafted.",
};

export const kindOf = (token) => (token.origin === "accepted" ? token.source : token.origin);

/** Returns a bar and a legend of these tokens by kind. */
export function originSummary(tokens) {
  const counts = new Map(Object.keys(KINDS).map((kind) => [kind, 0]));
  for (const token of tokens) counts.set(kindOf(token), (counts.get(kindOf(token)) ?? 0) + 1);
  const present = [...counts].filter(([, count]) => count);
  const bar = element("div", { className: "origin-bar", ariaHidden: "true" }, ...present.map(([kind, count]) => {
    const part = element("span", { className: kind });
    part.style.flexGrow = count;
    return part;
  }));
  const legend = element("ul", { className: "legend" }, ...present.map(([kind, count]) => element(
    "li",
    { title: percent(count / tokens.length) },
    element("span", { className: `swatch ${kind}` }),
    `${KINDS[kind] ?? kind} `,
    element("b", {}, String(count)),
  )));
  legend.setAttribute("aria-label", "Tokens of this answer by origin");
  return [bar, legend];
}

/** Appends tokens to `container`. `score(token)` resolves to what the target model gives there: see `scoring.js`. */
export class TokenText {
  constructor(container, score = null) {
    Object.assign(this, { container, score, number: 0 });
    container.addEventListener("keydown", (event) => this.move(event));
  }

  add(tokens) {
    const added = document.createDocumentFragment();
    for (const token of tokens) {
      // A token without text: a special one, or part of a character that a later one completes.
      const text = token.text === "" ? "\u25aa" : visible(token.text);
      const span = element("span", { className: `token ${kindOf(token)}`, tabIndex: -1 }, text);
      if (token.text === "") span.classList.add("silent");
      facts.set(span, { token, number: (this.number += 1), score: this.score });
      added.append(span);
    }
    this.container.append(added);
  }

  clear() {
    this.container.replaceChildren();
    this.number = 0;
  }

  move(event) {
    const step = { ArrowRight: "nextElementSibling", ArrowLeft: "previousElementSibling" }[event.key];
    if (!step) return;
    const current = document.activeElement;
    const next = facts.has(current) ? current[step] : this.container.querySelector(".token");
    if (!facts.has(next)) return;
    event.preventDefault();
    isPinned = false;
    next.focus();
  }
}

const facts = new WeakMap(); // element -> its token, where it is, and how to ask for more
let shown = null; // the element that the card is about
let isPinned = false; // it was clicked: the card stays

function probability(name, value) {
  const bar = element("meter", { min: 0, max: 1, value });
  return element("p", { className: "probability" }, element("span", {}, visible(name)), bar, element("b", {}, value.toPrecision(3)));
}

function showCard(span, more = []) {
  shown?.classList.remove("shown");
  span.classList.add("shown");
  shown = span;
  const { token, number, score } = facts.get(span);
  const card = byId("token-card");
  const kind = kindOf(token);
  const known = [["target model", token.target_prob], ["draft", token.draft_prob]].filter(([, value]) => value != null);
  if (!more.length && !known.length && score) more = [element("p", { className: "meaning" }, "Click for the target model's probabilities here.")];
  card.replaceChildren(
    element("p", { className: "token-text" }, visible(JSON.stringify(token.text)), element("small", {}, ` token ${number} · id ${token.token_id}`)),
    element("p", {}, element("span", { className: `swatch ${kind}` }), KINDS[kind] ?? kind),
    element("p", { className: "meaning" }, MEANINGS[token.origin] ?? ""),
    ...known.map(([name, value]) => probability(name, value)),
    ...more,
  );
  card.hidden = false;
  const at = span.getClientRects()[0];
  const below = at.bottom + 8 + card.offsetHeight < innerHeight;
  card.style.left = `${Math.max(8, Math.min(at.left, innerWidth - card.offsetWidth - 8))}px`;
  card.style.top = `${below ? at.bottom + 8 : Math.max(8, at.top - card.offsetHeight - 8)}px`;
}

function hideCard() {
  byId("token-card").hidden = true;
  shown?.classList.remove("shown");
  shown = null;
  isPinned = false;
}

/** Asks the target model about a token, and keeps the card open until something else is clicked. */
async function pin(span) {
  const { token, score } = facts.get(span);
  isPinned = true;
  if (!score) return showCard(span);
  const note = (text) => [element("p", { className: "meaning" }, visible(text))];
  showCard(span, note("Asking the target model …"));
  const answer = await score(token).then(asRows, (error) => note(error.message));
  if (shown === span && isPinned) showCard(span, answer);
}

const asRows = (ranked) => [
  element("p", { className: "meaning" }, "Most likely here to the target model, before temperature and the like:"),
  ...ranked.map(({ text, probability: value, isChosen }) => {
    const row = probability(JSON.stringify(text), value);
    if (isChosen) row.classList.add("chosen");
    return row;
  }),
];

export function watchTokens() {
  const tokenAt = (event) => (facts.has(event.target) ? event.target : null);
  for (const [show, hide] of [["mouseover", "mouseout"], ["focusin", "focusout"]]) {
    document.addEventListener(show, (event) => tokenAt(event) && !isPinned && showCard(event.target));
    document.addEventListener(hide, (event) => tokenAt(event) && !isPinned && hideCard());
  }
  document.addEventListener("click", (event) => (tokenAt(event) ? pin(event.target) : hideCard()));
  document.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && tokenAt(event)) pin(event.target);
    if (event.key !== "Escape") return;
    if (isPinned) event.preventDefault(); // the card that stays takes the key
    hideCard();
  });
  // To focus a token may scroll to it.
  const follow = () => (facts.has(document.activeElement) && !isPinned ? showCard(document.activeElement) : hideCard());
  document.addEventListener("scroll", follow, { capture: true, passive: true });
}
