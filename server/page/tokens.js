// Tokens in the colour of their origin, with what is known of each on hover or focus.

import { byId, element, visible } from "./elements.js";

/** Kinds in the order of the legend. An accepted token's kind is who drafted it. */
export const KINDS = {
  draft_model: "accepted, draft model",
  ngram: "accepted, n-gram",
  prediction: "accepted, prediction",
  grammar: "accepted, grammar",
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

/** Counts of the tokens shown, by kind, as a list and as a bar. */
export class OriginCount {
  constructor(legend, bar) {
    this.counts = {};
    this.legend = legend;
    this.bar = bar;
    this.show();
  }

  add(tokens) {
    for (const token of tokens) this.counts[kindOf(token)] = (this.counts[kindOf(token)] ?? 0) + 1;
    this.show();
  }

  clear() {
    this.counts = {};
    this.show();
  }

  get total() {
    return Object.values(this.counts).reduce((sum, count) => sum + count, 0);
  }

  show() {
    const kinds = Object.entries(KINDS);
    this.legend.replaceChildren(
      ...kinds.map(([kind, name]) =>
        element(
          "li",
          { className: this.counts[kind] ? "" : "none" },
          element("span", { className: `swatch ${kind}` }),
          `${name} `,
          element("b", {}, String(this.counts[kind] ?? 0)),
        ),
      ),
    );
    this.bar?.replaceChildren(
      ...kinds
        .filter(([kind]) => this.counts[kind])
        .map(([kind]) => {
          const part = element("span", { className: kind });
          part.style.flexGrow = this.counts[kind];
          return part;
        }),
    );
  }
}

/** Appends tokens to `container`. */
export class TokenText {
  constructor(container) {
    this.container = container;
    container.addEventListener("keydown", (event) => this.move(event));
  }

  add(tokens) {
    const added = document.createDocumentFragment();
    for (const token of tokens) {
      // A token without text: a special one, or part of a character that a later one completes.
      const text = token.text === "" ? "\u25aa" : visible(token.text);
      const span = element("span", { className: `token ${kindOf(token)}`, tabIndex: -1 }, text);
      if (token.text === "") span.classList.add("silent");
      facts.set(span, token);
      added.append(span);
    }
    this.container.append(added);
  }

  clear() {
    this.container.replaceChildren();
  }

  move(event) {
    const step = { ArrowRight: "nextElementSibling", ArrowLeft: "previousElementSibling" }[event.key];
    if (!step) return;
    const current = document.activeElement;
    const next = facts.has(current) ? current[step] : this.container.querySelector(".token");
    if (!facts.has(next)) return;
    event.preventDefault();
    next.focus();
  }
}

const facts = new WeakMap(); // element -> its token

function probability(name, value) {
  const bar = element("meter", { min: 0, max: 1, value: value ?? 0 });
  const known = value === null ? "–" : value.toPrecision(3);
  return element("p", { className: "probability" }, element("span", {}, name), bar, element("b", {}, known));
}

function showCard(span) {
  const token = facts.get(span);
  const card = byId("token-card");
  const kind = kindOf(token);
  card.replaceChildren(
    element("p", { className: "token-text" }, visible(JSON.stringify(token.text)), element("small", {}, ` id ${token.token_id}`)),
    element("p", {}, element("span", { className: `swatch ${kind}` }), KINDS[kind] ?? kind),
    element("p", { className: "meaning" }, MEANINGS[token.origin] ?? ""),
    probability("target model", token.target_prob),
    probability("draft", token.draft_prob),
  );
  card.hidden = false;
  const at = span.getClientRects()[0];
  const width = card.offsetWidth;
  const below = at.bottom + 8 + card.offsetHeight < innerHeight;
  card.style.left = `${Math.max(8, Math.min(at.left, innerWidth - width - 8))}px`;
  card.style.top = `${below ? at.bottom + 8 : Math.max(8, at.top - card.offsetHeight - 8)}px`;
}

function hideCard() {
  byId("token-card").hidden = true;
}

export function watchTokens() {
  for (const [show, hide] of [["mouseover", "mouseout"], ["focusin", "focusout"]]) {
    document.addEventListener(show, (event) => facts.has(event.target) && showCard(event.target));
    document.addEventListener(hide, (event) => facts.has(event.target) && hideCard());
  }
  // To focus a token may scroll to it.
  const follow = () => (facts.has(document.activeElement) ? showCard(document.activeElement) : hideCard());
  document.addEventListener("scroll", follow, { capture: true, passive: true });
}

