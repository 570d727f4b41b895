// Live charts of /metrics and /speculation, read once a second while they are looked at.

import { chunks, getJson, getText } from "./api.js";
import { byId, element, fillFigures, percent, visible } from "./elements.js";
import { parseMetrics } from "./metrics.js";

const INTERVAL = 1000;
const NUM_SAMPLES = 180;
const PHASES = ["draft", "score", "verify", "host"];
const RECENT = 30; // samples that "recent" acceptance looks back

const history = []; // { time, metrics, speculation }
let charts = [];
let following = null; // the loop that reads; null while the view is closed

const share = (value) => (value == null ? "–" : percent(value));
const plainNumber = (value) => (value == null ? "–" : value >= 100 ? value.toFixed(0) : value.toFixed(1));
const rounded = (value) => String(+value.toFixed(2));
const milliseconds = (value) => (value == null ? "–" : `${value.toFixed(value < 10 ? 2 : 0)} ms`);
const factor = (value) => (value == null ? "–" : `${value.toFixed(2)} ×`);

/** Returns the growth per second of what `read` takes from a sample, between it and the one before. */
const rate = (read) => (now, before) =>
  before ? Math.max(0, read(now.metrics) - read(before.metrics)) / (now.time - before.time) : null;

/** Returns the mean of what a histogram has observed between two samples, in milliseconds. */
const mean = (histogram) => (now, before) => {
  const grown = (part) => now.metrics.total(`${histogram}_${part}`) - before.metrics.total(`${histogram}_${part}`);
  return before && grown("count") > 0 ? (1000 * grown("sum")) / grown("count") : null;
};

const phaseRate = (phase) => rate((m) => m.perWorker(m.by("phase_seconds_total", "phase")[phase] ?? 0));

// `unit`: what stands after the numbers of the axis; `idle`: what is said while all values are zero or unknown.
const CHARTS = [
  {
    title: "Tokens per second", unit: "/s", format: (value) => (value == null ? "–" : `${plainNumber(value)}/s`),
    series: [["generated, all requests", "green", rate((m) => m.total("generation_tokens_total"))]],
    idle: "No tokens now. Write something in Chat, or send a test request with the button above.",
  },
  {
    title: "Speed-up over plain decoding", unit: " ×", format: factor, low: 1,
    series: [
      ["predicted", "blue", (now) => now.speculation?.speedup.predicted],
      ["achieved", "green", (now) => now.speculation?.speedup.achieved],
    ],
    idle: "Not measured yet. With an automatic draft length it is, as soon as requests have run.",
  },
  {
    title: "Draft length", unit: "", format: plainNumber,
    series: [["tokens per sequence and round", "green", ({ metrics }) => metrics.perWorker(metrics.total("num_speculative_tokens"))]],
    idle: "Nothing drafts now: speculation is off, or no request is running.",
  },
  {
    title: "Requests", unit: "", whole: true, format: (value) => (value == null ? "–" : String(value)),
    series: [
      ["running", "green", (now) => now.metrics.total("num_requests_running")],
      ["waiting", "orange", (now) => now.metrics.total("num_requests_waiting")],
    ],
    idle: "No request is running or waiting.",
  },
  {
    title: "Share of time by phase", unit: "%", scale: 100, format: share, stacked: true, top: 1,
    series: PHASES.map((phase, place) => [phase, ["green", "blue", "violet", "grey"][place], phaseRate(phase)]),
    idle: "The engine is idle. While it works: drafting, scoring by the target, verifying, and the host's own work.",
  },
  {
    title: "Time to first token", unit: " ms", sparse: true, format: milliseconds,
    series: [["mean of the last second", "blue", mean("time_to_first_token_seconds")]],
    idle: "No request has begun to answer while this view was open.",
  },
  {
    title: "Time per token", unit: " ms", sparse: true, format: milliseconds,
    series: [["mean of the last second, after the first token", "blue", mean("inter_token_latency_seconds")]],
    idle: "No token has come while this view was open.",
  },
  {
    title: "Cache in use", unit: "%", scale: 100, format: share, top: 1,
    series: [
      ["target", "blue", ({ metrics }) => metrics.perWorker(metrics.by("worker_kv_cache_usage_perc", "model").target)],
      ["draft", "green", ({ metrics }) => metrics.perWorker(metrics.by("worker_kv_cache_usage_perc", "model").draft)],
    ],
    idle: "No running sequence holds blocks of the cache.",
  },
];

/** Returns a custom property's colour as a canvas understands it, in the theme that is shown. */
function colour(name) {
  const probe = element("span");
  probe.style.color = `var(--${name})`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

/** A card with a chart, its legend and the newest values. */
class Chart {
  constructor({ title, unit, format, series, idle, scale = 1, whole = false, sparse = false, stacked = false, low = 0, top = null }) {
    Object.assign(this, { unit, format, series, scale, whole, sparse, stacked, low, top });
    this.values = series.map(([name, hue]) => [element("span", { className: `swatch chart-${hue}` }), name, element("b", {}, "–")]);
    this.plot = element("div", { className: "plot" });
    this.idle = element("p", { className: "idle" }, idle);
    this.card = element(
      "article",
      { className: "card chart" },
      element("h2", {}, title),
      element("ul", { className: "legend" }, ...this.values.map((parts) => element("li", {}, parts[0], `${parts[1]} `, parts[2]))),
      element("div", { className: "plot-area" }, this.plot, this.idle),
    );
  }

  draw() {
    this.uplot?.destroy();
    const axis = { stroke: colour("muted"), grid: { stroke: colour("line"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
    const clock = (_, values) => values.map((value) => (value === 0 ? "now" : `${value} s`));
    const options = {
      width: this.plot.clientWidth,
      height: 150,
      legend: { show: false },
      cursor: { show: false },
      padding: [8, 16, 0, 0],
      scales: { x: { time: false, range: (_, min) => [Math.min(-30, min ?? 0), 0] }, y: { range: (_, min, max) => [0, Math.max(this.top ?? 0, this.low * 1.2, (max ?? 0) * 1.1, this.whole ? 1 : 0.1)] } },
      axes: [
        { ...axis, size: 24, values: clock },
        { ...axis, size: 52, incrs: this.whole ? [1, 2, 5, 10, 20, 50, 100, 200, 500] : undefined, values: (_, values) => values.map((value) => rounded(value * this.scale) + this.unit) },
      ],
      series: [
        {},
        ...this.series.map(([, hue]) => ({ stroke: colour(hue), width: 2, fill: this.stacked ? colour(hue) : undefined, spanGaps: true, points: { show: this.sparse, size: 6 } })),
      ],
    };
    this.uplot = new uPlot(options, this.data(), this.plot);
  }

  data() {
    const last = history.at(-1)?.time ?? 0;
    const times = history.map((sample) => Math.round((sample.time - last) * 100) / 100);
    const columns = this.series.map(([, , read]) => history.map((sample, place) => read(sample, history[place - 1]) ?? null));
    this.newest = columns.map((column) => column.at(-1) ?? null);
    this.card.classList.toggle("is-idle", columns.every((column) => column.every((value) => !value)));
    if (this.stacked) {
      // The first series is drawn first and must reach highest: each has those after it below itself.
      for (let place = columns.length - 2; place >= 0; place -= 1) {
        columns[place] = columns[place].map((value, time) => (value === null ? null : value + (columns[place + 1][time] ?? 0)));
      }
    }
    return [times, ...columns];
  }

  update() {
    this.uplot.setData(this.data());
    this.values.forEach((parts, place) => (parts[2].textContent = this.format(this.newest[place])));
  }

  resize() {
    this.uplot?.setSize({ width: this.plot.clientWidth, height: 150 });
  }
}

/** Bars show which share of the tokens drafted at each position was accepted. Positions count from 1. */
class Positions {
  constructor() {
    this.bars = element("div", { className: "bars" });
    this.card = element(
      "article",
      { className: "card chart" },
      element("h2", {}, "Drafts accepted, by position in the draft, %"),
      element(
        "ul",
        { className: "legend" },
        element("li", {}, element("span", { className: "swatch chart-green" }), `last ${RECENT * INTERVAL / 1000} s`),
        element("li", {}, element("span", { className: "swatch line" }), "since the start"),
      ),
      this.bars,
    );
  }

  update() {
    const [first, last] = [history.at(-1 - RECENT) ?? history[0], history.at(-1)];
    const counts = (sample, kind) => sample.metrics.by(`spec_decode_num_${kind}_tokens_per_pos_total`, "position");
    const [drafted, accepted] = [counts(last, "draft"), counts(last, "accepted")];
    const [draftedBefore, acceptedBefore] = [counts(first, "draft"), counts(first, "accepted")];
    const positions = Object.keys(drafted).map(Number).sort((a, b) => a - b).slice(0, 12);
    this.bars.replaceChildren(
      ...positions.map((position) => {
        const all = (accepted[position] ?? 0) / drafted[position];
        const recentlyDrafted = drafted[position] - (draftedBefore[position] ?? 0);
        const recent = recentlyDrafted ? ((accepted[position] ?? 0) - (acceptedBefore[position] ?? 0)) / recentlyDrafted : null;
        const bar = element("div", { className: "bar", title: `token ${position + 1} of a draft: ${share(recent)} recently, ${share(all)} since the start` });
        const fill = element("div", { className: "fill" });
        const mark = element("div", { className: "mark" });
        fill.style.height = `${(recent ?? 0) * 100}%`;
        mark.style.bottom = `${all * 100}%`;
        bar.append(fill, mark);
        return element("div", { className: "column" }, element("b", {}, String(Math.round((recent ?? all) * 100))), bar, element("span", {}, String(position + 1)));
      }),
    );
    if (!positions.length) this.bars.replaceChildren(element("p", { className: "empty" }, "Nothing has been drafted yet. Bars come with the first request that speculation pays for."));
  }

  draw() {}
  resize() {}
}

export function startLive(modelName) {
  charts = [new Chart(CHARTS[0]), new Positions(), ...CHARTS.slice(1).map((description) => new Chart(description))];
  byId("charts").append(...charts.map((chart) => chart.card));
  addEventListener("resize", () => charts.forEach((chart) => chart.resize()));
  document.addEventListener("visibilitychange", follow);
  byId("test-request").addEventListener("click", () => sendTestRequest(modelName));
}

/** Gives an idle server something to draw. */
async function sendTestRequest(modelName) {
  byId("test-request").disabled = true;
  try {
    const body = { model: await modelName(), prompt: "Once upon a time", max_tokens: 300, temperature: 0, ignore_eos: true, stream: true };
    for await (const _ of chunks("v1/completions", body)); // the charts show what it does
  } catch (error) {
    byId("why").textContent = visible(error.message);
  } finally {
    byId("test-request").disabled = false;
  }
}

/** Draws anew after the colours have changed. */
export function redrawLive() {
  if (!byId("live").hidden) charts.forEach((chart) => chart.draw());
}

/** Reads while the view is open and the window is seen, and at no other time. */
export function follow() {
  const isSeen = !byId("live").hidden && !document.hidden;
  if (isSeen && following === null) {
    charts.forEach((chart) => chart.draw());
    following = Symbol("loop");
    read(following);
  } else if (!isSeen) {
    following = null;
  }
}

async function read(loop) {
  if (loop !== following) return;
  try {
    const name = byId("model").value;
    const asked = getJson(name ? `speculation?model=${encodeURIComponent(name)}` : "speculation");
    const [text, speculation] = await Promise.all([getText("metrics"), asked]);
    history.push({ time: performance.now() / 1000, metrics: parseMetrics(text), speculation });
    if (history.length > NUM_SAMPLES) history.shift();
    show();
  } catch (error) {
    byId("why").textContent = visible(error.message);
  }
  setTimeout(read, INTERVAL, loop);
}

function show() {
  const { metrics, speculation } = history.at(-1);
  for (const chart of charts) chart.update();
  byId("why").textContent = speculation.on === null
    ? "Nothing has run yet. After the first request this line says whether speculation is on, and why."
    : visible(`Speculation is ${speculation.why}.`);
  const drafted = metrics.total("spec_decode_num_draft_tokens_total");
  fillFigures(byId("now"), [
    ["tokens", metrics.total("generation_tokens_total").toLocaleString("en")],
    ["requests answered", metrics.total("request_success_total").toLocaleString("en")],
    ["drafts accepted", drafted ? share(metrics.total("spec_decode_num_accepted_tokens_total") / drafted) : "–"],
    ["prefix cache hits", metrics.total("prefix_cache_queries_total") ? share(metrics.total("prefix_cache_hits_total") / metrics.total("prefix_cache_queries_total")) : "–"],
    ["errors", String(metrics.total("request_errors_total"))],
    ["worker restarts", String(metrics.total("worker_restarts_total"))],
  ]);
}
