// The race: the same prompt and seed, decoded plainly and speculatively, with a stopwatch each.

import { chunks } from "./api.js";
import { byId, fillFigures, numbers, percent, visible } from "./elements.js";
import { TokenText } from "./tokens.js";

const form = byId("race-form");
let running = null;

class Lane {
  constructor(id, speculation) {
    const [watch, progress, figures, text] = [".watch", "progress", ".figures", ".text"].map((part) =>
      byId(id).querySelector(part),
    );
    Object.assign(this, { card: byId(id), speculation, watch, progress, figures, shown: new TokenText(text) });
  }

  reset() {
    Object.assign(this, { text: "", tokens: 0, seconds: 0, report: null, isDone: false });
    this.card.classList.remove("running", "winner");
    this.shown.clear();
    this.show();
  }

  async run(body, signal) {
    this.card.classList.add("running");
    const started = performance.now();
    const tick = () => {
      if (!this.card.classList.contains("running")) return;
      this.seconds = (performance.now() - started) / 1000;
      this.show();
      requestAnimationFrame(tick);
    };
    tick();
    try {
      for await (const chunk of chunks("v1/completions", { ...body, speculation: this.speculation }, signal)) {
        for (const choice of chunk.choices) {
          const added = choice.origins ?? [];
          this.shown.add(added);
          this.tokens += added.length;
          this.text += added.map((token) => token.text).join("");
        }
        this.report = chunk.truedraft ?? this.report;
      }
      this.isDone = true;
    } finally {
      this.seconds = (performance.now() - started) / 1000;
      this.card.classList.remove("running");
      this.show();
    }
  }

  show() {
    this.watch.textContent = `${this.seconds.toFixed(2)} s`;
    this.progress.value = this.isDone ? 1 : this.tokens / Number(form.elements.max_tokens.value);
    const rate = this.report?.acceptance_rate;
    fillFigures(this.figures, [
      ["tokens", String(this.tokens)],
      ["tokens/s", this.seconds ? (this.tokens / this.seconds).toFixed(1) : "–"],
      ["drafts accepted", rate == null ? "–" : percent(rate)],
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
  byId("stop-race").addEventListener("click", () => running?.abort());
  document.addEventListener("keydown", (event) => event.key === "Escape" && running?.abort());
}

async function race(modelName, plain, speculative) {
  running = new AbortController();
  byId("start-race").disabled = true;
  byId("stop-race").disabled = false;
  say("Running …");
  for (const lane of [plain, speculative]) lane.reset();
  const body = {
    model: await modelName(),
    prompt: form.elements.prompt.value,
    ...numbers(form, ["max_tokens", "temperature", "seed"]),
    cache_prompt: false, // else the second lane would find its prompt computed
    stream: true,
  };
  try {
    const lanes = [plain, speculative];
    if (form.elements.order.value === "together") {
      await Promise.all(lanes.map((lane) => lane.run(body, running.signal)));
    } else {
      for (const lane of lanes) await lane.run(body, running.signal);
    }
    finish(plain, speculative);
  } catch (error) {
    running.abort(); // the other lane's request, too
    say(error.name === "AbortError" ? "Stopped." : error.message);
  } finally {
    running = null;
    byId("start-race").disabled = false;
    byId("stop-race").disabled = true;
  }
}

function finish(plain, speculative) {
  const ratio = plain.seconds / speculative.seconds;
  const winner = ratio > 1 ? speculative : plain;
  winner.card.classList.add("winner");
  const isSame = plain.text === speculative.text;
  const [faster, factor] = ratio > 1 ? ["Speculative", ratio] : ["Plain", 1 / ratio];
  const text = isSame ? `Same text, all ${plain.tokens} tokens.` : "The texts differ.";
  say(`${faster} decoding was ${factor.toFixed(2)} times as fast in this run. ${text}`);
  byId("verdict").classList.add("done");
  byId("verdict").classList.toggle("bad", !isSame);
}

function say(text) {
  byId("verdict").classList.remove("bad", "done");
  byId("verdict").textContent = visible(text);
}
