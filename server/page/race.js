// The race: the same prompt and seed, decoded plainly and speculatively, several times by turns.

import { chunks } from "./api.js";
import { byId, element, fillFigures, numbers, onEscape, percent, seconds, visible } from "./elements.js";
import { TokenText } from "./tokens.js";

const form = byId("race-form");
const TEXT = "Tim has a red ball. He takes the ball to the park. A dog sees Tim and runs after the ball. Tim laughs and throws the ball again. The dog brings it back to Tim.";
// A model that drafts can draft anything; n-grams need a text that says again what stands before.
const PROMPTS = {
  story: { chat: "Tell me a story about a fox and a bird.", completion: "Once upon a time there was a little fox who" },
  edit: { chat: `Write this text again, with Tom in place of Tim: ${TEXT}`, completion: `${TEXT} The same text again: Tim has a red ball.` },
};
let running = null;
let task = "story";

const median = (values) => {
  const sorted = [...values].sort((one, other) => one - other);
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
};

class Lane {
  constructor(id, speculation) {
    const [watch, progress, figures, text] = [".watch", "progress", ".figures", ".text"].map((part) =>
      byId(id).querySelector(part),
    );
    Object.assign(this, { card: byId(id), speculation, watch, progress, figures, shown: new TokenText(text) });
  }

  reset() {
    this.runs = [];
    this.card.classList.remove("running", "winner");
    this.begin();
    this.show();
  }

  begin() {
    this.now = { text: "", tokens: 0, seconds: 0, report: null, isDone: false };
    this.shown.clear();
  }

  async run([path, body], signal) {
    this.begin();
    this.card.classList.add("running");
    const run = this.now;
    const started = performance.now();
    const tick = () => {
      if (!this.card.classList.contains("running")) return;
      run.seconds = (performance.now() - started) / 1000;
      this.show();
      requestAnimationFrame(tick);
    };
    tick();
    try {
      for await (const chunk of chunks(path, { ...body, speculation: this.speculation }, signal)) {
        for (const choice of chunk.choices) {
          const added = choice.origins ?? [];
          this.shown.add(added);
          run.tokens += added.length;
          run.text += added.map((token) => token.text).join("");
        }
        run.report = chunk.truedraft ?? run.report;
      }
      run.isDone = true;
      this.runs.push(run);
    } finally {
      run.seconds = (performance.now() - started) / 1000;
      this.card.classList.remove("running");
      this.show();
    }
  }

  get median() {
    return median(this.runs.map((run) => run.seconds));
  }

  sum(count) {
    return this.runs.reduce((sum, { report }) => sum + (report?.[count] ?? 0), 0);
  }

  get drafted() {
    return this.sum("drafted_tokens");
  }

  /** The watch runs during a run; between runs it has the median of those that are done. */
  show() {
    const isRunning = this.card.classList.contains("running");
    const { tokens, isDone } = this.now;
    const time = this.runs.length && !isRunning ? this.median : this.now.seconds;
    this.watch.textContent = `${time.toFixed(2)} s`;
    this.progress.value = isDone ? 1 : tokens / Number(form.elements.max_tokens.value);
    const times = this.runs.map((run) => run.seconds);
    fillFigures(this.figures, [
      ["tokens", String(tokens)],
      [this.runs.length > 1 && !isRunning ? "tokens/s, median" : "tokens/s", time ? (tokens / time).toFixed(1) : "–"],
      ["drafts accepted, all runs", this.drafted ? percent(this.sum("accepted_tokens") / this.drafted) : "–"],
      ["runs", times.length > 1 ? `${times.length}: ${seconds(Math.min(...times))} to ${seconds(Math.max(...times))}` : String(times.length)],
    ]);
  }
}

export function startRace(modelName) {
  const plain = new Lane("lane-plain", { method: "none", origins: "sources" });
  const speculative = new Lane("lane-speculative", { origins: "sources" });
  for (const lane of [plain, speculative]) lane.reset();
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (!running) race(modelName, plain, speculative);
  });
  form.elements.kind.addEventListener("change", offerPrompt);
  byId("stop-race").addEventListener("click", () => running?.abort());
  onEscape("race", () => running?.abort());
}

/** A model with a chat template races on a message, as it is meant to be used. */
export function raceInChats(hasTemplate) {
  form.elements.kind.value = hasTemplate ? "chat" : "completion";
  form.elements.kind.options[0].disabled = !hasTemplate;
  offerPrompt();
}

/** The first prompt is one that suits what drafts on this server. */
export function raceOn(proposers) {
  task = ["draft_model", "eagle", "mtp", "assistant"].some((name) => proposers.includes(name)) ? "story" : "edit";
  offerPrompt();
}

function offerPrompt() {
  const { kind, prompt } = form.elements;
  const offered = Object.values(PROMPTS).flatMap((prompts) => Object.values(prompts));
  if (offered.includes(prompt.value)) prompt.value = PROMPTS[task][kind.value];
}

/** Returns path and body of what both lanes ask, but for the speculation. */
function request(model) {
  const { kind, prompt } = form.elements;
  const common = {
    model,
    ...numbers(form, ["max_tokens", "temperature", "seed"]),
    cache_prompt: false, // else the second lane would find its prompt computed
    stream: true,
  };
  return kind.value === "chat"
    ? ["v1/chat/completions", { ...common, messages: [{ role: "user", content: prompt.value }] }]
    : ["v1/completions", { ...common, prompt: prompt.value }];
}

async function race(modelName, plain, speculative) {
  running = new AbortController();
  byId("start-race").disabled = true;
  byId("stop-race").disabled = false;
  for (const lane of [plain, speculative]) lane.reset();
  byId("pairs").replaceChildren();
  const numPairs = Number(form.elements.pairs.value);
  try {
    const asked = request(await modelName());
    for (let pair = 0; pair < numPairs; pair += 1) {
      say(`Running pair ${pair + 1} of ${numPairs} …`);
      const lanes = pair % 2 ? [speculative, plain] : [plain, speculative]; // neither is always first
      if (form.elements.order.value === "together") {
        await Promise.all(lanes.map((lane) => lane.run(asked, running.signal)));
      } else {
        for (const lane of lanes) await lane.run(asked, running.signal);
      }
      showPairs(plain, speculative);
    }
    finish(plain, speculative);
  } catch (error) {
    running.abort(); // the other lane's request, too
    if (error.name !== "AbortError") say(error.message);
    else if (plain.runs.length && speculative.runs.length) finish(plain, speculative);
    else say("Stopped before both lanes had run.");
  } finally {
    running = null;
    byId("start-race").disabled = false;
    byId("stop-race").disabled = true;
  }
}

/** Returns how many times as fast the speculative lane was, pair by pair. */
function ratiosOf(plain, speculative) {
  const numPairs = Math.min(plain.runs.length, speculative.runs.length);
  return Array.from({ length: numPairs }, (_, pair) => plain.runs[pair].seconds / speculative.runs[pair].seconds);
}

/** Draws each pair's ratio as a dot on a line, with a mark where both are as fast. */
function showPairs(plain, speculative) {
  const ratios = ratiosOf(plain, speculative);
  const [low, high] = [Math.min(0.9, ...ratios), Math.max(1.1, ...ratios)];
  const place = (node, ratio) => {
    node.style.left = `${((ratio - low) / (high - low)) * 100}%`;
    return node;
  };
  byId("pairs").replaceChildren(
    place(element("span", { className: "even" }, "equal"), 1),
    ...ratios.map((ratio, pair) => place(element("span", { className: "dot-pair", title: `pair ${pair + 1}: ${ratio.toFixed(2)} times as fast` }), ratio)),
  );
}

/** The verdict compares the medians that the lanes show; the spread is that of the pairs. */
function finish(plain, speculative) {
  const ratios = ratiosOf(plain, speculative);
  const texts = new Set([...plain.runs, ...speculative.runs].map((run) => run.text));
  const text = texts.size === 1 ? `Same text in all runs, ${plain.runs[0].tokens} tokens.` : "The texts differ.";
  const isFaster = speculative.median <= plain.median;
  const ofWinner = isFaster ? ratios : ratios.map((ratio) => 1 / ratio);
  const factor = isFaster ? plain.median / speculative.median : speculative.median / plain.median;
  const [low, high] = [Math.min(...ofWinner), Math.max(...ofWinner)];
  const spread = ratios.length > 1 ? `, by the medians of ${ratios.length} runs each; pairs range from ${low.toFixed(2)} to ${high.toFixed(2)}` : ", in one pair";
  const doubt = low < 1 ? " The pairs disagree: more of them, or more tokens, would tell." : "";
  if (speculative.drafted) {
    if (!doubt) (isFaster ? speculative : plain).card.classList.add("winner");
    say(`${isFaster ? "Speculative" : "Plain"} decoding was ${factor.toFixed(2)} times as fast${spread}.${doubt} ${text}`);
  } else say(`The speculative lane drafted nothing, as the server expects no gain from it here: any difference is noise. ${text}`);
  byId("verdict").classList.add("done");
  byId("verdict").classList.toggle("bad", texts.size > 1);
}

function say(text) {
  byId("verdict").classList.remove("bad", "done");
  byId("verdict").textContent = visible(text);
}
