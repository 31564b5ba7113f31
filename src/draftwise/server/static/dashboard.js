// The server's /metrics over time. It is read as long as somebody could look.

import { getJSON, getText } from "./api.js";
import { Chart } from "./chart.js";
import { $, count, duration, el, percent, short } from "./dom.js";
import { paint } from "./methods.js";
import { Change, Reading } from "./metrics.js";

const INTERVAL = 1000; // between readings, in ms
const KEPT = 900; // readings: the longest window
const SMOOTH = 3; // a rate is taken over so many readings, or single steps would make it jump

const either = (a, b) => (a === null && b === null ? null : (a ?? 0) + (b ?? 0));

/** The charts that are always there; the others unfold. */
const FIRST = ["Tokens generated per second", "Tokens per verified draft", "Drafts accepted", "Time to first token", "Planner's load", "Planned replicas"];

/** Charts: `values(change, reading)` gives one number or null for each series. */
const CHARTS = [
  {
    title: "Tokens generated per second",
    hint: "generation_tokens",
    series: [{ name: "generated", kind: "main" }],
    format: short,
    values: (change) => [change.rate("generation_tokens_total")],
  },
  {
    title: "Tokens per verified draft",
    hint: "1 + accepted / drafts: the mean acceptance length",
    series: [{ name: "acceptance length", kind: "main" }],
    format: (value) => value.toFixed(value < 10 ? 2 : 1),
    values: (change) => {
      const accepted = change.ratio("spec_decode_num_accepted_tokens_total", "spec_decode_num_drafts_total");
      return [accepted === null ? null : 1 + accepted];
    },
  },
  {
    title: "Drafts accepted",
    hint: "accepted / drafted tokens",
    series: [{ name: "accepted", kind: "main" }],
    format: percent,
    highest: 1,
    values: (change) => [
      change.ratio("spec_decode_num_accepted_tokens_total", "spec_decode_num_draft_tokens_total"),
    ],
  },
  {
    title: "Drafted per request",
    hint: "spec_decode_draft_length: what the controller drafts now, the most of all methods; 0: plain decoding",
    series: [{ name: "draft tokens", kind: "main" }],
    format: count,
    values: (_, reading) => [reading.most("spec_decode_draft_length")],
  },
  {
    title: "Planner's load",
    hint: "planner_request_rate, planner_request_rate_seen: requests per second planned for, and in the last interval",
    needs: "planner_request_rate_seen",
    series: [{ name: "planned for", kind: "main" }, { name: "came", kind: "second" }],
    format: short,
    values: (_, reading) => [reading.sum("planner_request_rate"), reading.sum("planner_request_rate_seen")],
  },
  {
    title: "Planned replicas",
    hint: "planner_replicas, planner_replicas_ready: what the planner wants, and what serves",
    needs: "planner_replicas",
    series: [{ name: "wanted", kind: "main" }, { name: "serving", kind: "second" }],
    format: count,
    values: (_, reading) => [reading.sum("planner_replicas"), reading.sum("planner_replicas_ready")],
  },
  {
    title: "Expected gain",
    hint: "spec_decode_estimated_gain: tokens per second with drafts over those without, as the controller expects",
    series: [{ name: "best method", kind: "main" }],
    format: (value) => `${value.toFixed(2)} ×`,
    values: (_, reading) => [reading.most("spec_decode_estimated_gain")],
  },
  {
    title: "Requests",
    hint: "num_requests_running, num_requests_waiting",
    series: [{ name: "running", kind: "main" }, { name: "waiting", kind: "second" }],
    format: count,
    values: (_, reading) => [reading.value("num_requests_running"), reading.value("num_requests_waiting")],
  },
  {
    title: "Cache",
    hint: "kv_cache_usage_perc; prefix_cache_hits / prefix_cache_queries",
    series: [{ name: "in use", kind: "main" }, { name: "prefix hits", kind: "second" }],
    format: percent,
    highest: 1,
    values: (change, reading) => [
      reading.mean("kv_cache_usage_perc"),
      change.ratio("prefix_cache_hits_total", "prefix_cache_queries_total"),
    ],
  },
  {
    title: "Time to first token",
    hint: "time_to_first_token_seconds",
    series: [{ name: "median", kind: "main" }, { name: "95th percentile", kind: "second" }],
    format: duration,
    values: (change) => [0.5, 0.95].map((share) => change.quantile("time_to_first_token_seconds", share)),
  },
  {
    title: "Between tokens",
    hint: "inter_token_latency_seconds",
    series: [{ name: "median", kind: "main" }, { name: "95th percentile", kind: "second" }],
    format: duration,
    values: (change) => [0.5, 0.95].map((share) => change.quantile("inter_token_latency_seconds", share)),
  },
  {
    title: "Time of steps",
    hint: "engine_step_seconds: shares of its parts",
    series: [
      { name: "target", kind: "main" },
      { name: "drafting", kind: "second" },
      { name: "host", kind: "third" },
    ],
    format: percent,
    highest: 1,
    values: (change) => {
      const parts = change.deltaBy("engine_step_seconds_total", "part");
      const shares = ["forward", "draft_forward", "host"].map((part) => parts.get(part) ?? null);
      const whole = shares.reduce(either, null);
      return shares.map((share) => (whole ? (share ?? 0) / whole : null));
    },
  },
];

export class Dashboard {
  constructor() {
    this.readings = [];
    this.paused = false;
    this.visible = false;
    this.charts = CHARTS.map((options) => ({ ...options, chart: new Chart(options), points: [] }));
    this.positions = el("div", { class: "bars" });
    this.methods = el("div", { class: "bars" });
    const first = ({ title }) => FIRST.includes(title);
    $("charts").append(...this.charts.filter(first).map(({ chart }) => chart.root));
    $("charts-more").append(
      ...this.charts.filter((one) => !first(one)).map(({ chart }) => chart.root),
      card(["Accepted by position", this.positions], ["Steps by method", this.methods]),
    );
    $("more-charts").addEventListener("toggle", () => this.draw());
    $("window").addEventListener("change", () => this.draw());
    $("pause").addEventListener("click", (event) => {
      this.paused = !this.paused;
      event.currentTarget.setAttribute("aria-pressed", String(this.paused));
      event.currentTarget.textContent = this.paused ? "Go on" : "Pause";
    });
    this.#loop();
  }

  show(visible) {
    this.visible = visible;
    if (visible) this.draw();
  }

  async #loop() {
    for (;;) {
      if (!document.hidden && !this.paused) await this.#read();
      await new Promise((resolve) => setTimeout(resolve, INTERVAL));
    }
  }

  async #read() {
    try {
      const reading = new Reading(await getText("metrics"), Date.now() / 1000);
      this.add(reading);
      await this.#readPlanner(reading);
      this.#problem(null);
    } catch (error) {
      this.#problem(`No metrics: ${error.message}`);
    }
  }

  /** What the planner says, where one runs. */
  async #readPlanner(reading) {
    const runs = reading.samples.has("planner_decisions_total");
    $("planner").hidden = !runs;
    if (!runs || !this.visible) return;
    const { mode, words, decision } = await getJSON("planner");
    $("planner-mode").textContent = mode === "advise" ? "(advice)" : "";
    $("planner-words").textContent = words;
    $("planner-reasons").replaceChildren(...(decision?.reasons ?? []).map((reason) => el("li", {}, reason)));
  }

  add(reading) {
    // A reading after a pause has nothing to be compared with: the page was hidden, or the server away.
    const last = this.readings.at(-1);
    if (last && reading.time - last.time > 5 * (INTERVAL / 1000)) this.gap = this.readings.length;
    this.readings.push(reading);
    const at = this.readings.length - 1;
    const from = Math.max(at - SMOOTH, this.gap ?? 0, 0);
    for (const { values, points } of this.charts) {
      const change = from < at ? new Change(this.readings[from], reading) : null;
      points.push({ time: reading.time, values: change ? values(change, reading) : nothing(values, reading) });
      if (points.length > KEPT) points.shift();
    }
    if (this.readings.length > KEPT) {
      this.readings.shift();
      if (this.gap) this.gap--;
    }
    if (this.visible) this.draw();
  }

  draw() {
    const reading = this.readings.at(-1);
    if (!reading) return;
    const end = reading.time;
    const start = end - Number($("window").value);
    for (const { chart, points, needs } of this.charts) {
      chart.root.hidden = Boolean(needs) && !reading.samples.has(needs);
      chart.draw(points.filter((point) => point.time >= start), start, end);
    }
    const oldest = this.readings.find((one) => one.time >= start) ?? reading;
    const change = new Change(oldest, reading);
    this.#drawPositions(change);
    this.#drawMethods(change);
    this.#drawTotals(reading);
  }

  #drawPositions(change) {
    const drafts = change.delta("spec_decode_num_drafts_total");
    const positions = [...change.deltaBy("spec_decode_num_accepted_tokens_per_pos_total", "position")];
    positions.sort((a, b) => a[0] - b[0]);
    const rows = drafts ? positions.slice(0, 8) : [];
    bars(this.positions, rows.map(([position, n]) => [`${Number(position) + 1}`, n / drafts, null, percent(n / drafts)]));
  }

  #drawMethods(change) {
    const steps = [...change.deltaBy("spec_decode_request_steps_total", "method")].filter(([, n]) => n > 0);
    const all = steps.reduce((sum, [, n]) => sum + n, 0);
    bars(this.methods, steps.map(([method, n]) => [method, n / all, method, count(n)]));
  }

  #drawTotals(reading) {
    const finished = reading.samples.get("request_success_total") ?? [];
    const totals = {
      "tokens generated": reading.value("generation_tokens_total"),
      "drafts accepted": reading.value("spec_decode_num_accepted_tokens_total"),
      "requests finished": finished.reduce((sum, { value }) => sum + value, 0),
      preemptions: reading.value("num_preemptions_total"),
    };
    const parts = Object.entries(totals).map(([name, value]) =>
      el("div", {}, el("dt", {}, name), el("dd", {}, Math.round(value).toLocaleString("en"))),
    );
    $("totals").replaceChildren(...parts);
  }

  #problem(text) {
    $("metrics-problem").textContent = text ?? "";
    $("metrics-problem").hidden = !text;
  }
}

/** Values of a first reading: there are no rates yet, gauges there are. */
function nothing(values, reading) {
  const still = new Change(reading, reading);
  return values(still, reading);
}

/** A card of parts, [title, body] each; what they count, they count in the window that is shown. */
function card(...parts) {
  const lists = parts.map(([title, body]) => {
    const head = el("div", { class: "head" }, el("span", { class: "name" }, title), el("span", { class: "now" }, "in the window"));
    return el("div", {}, head, body);
  });
  return el("figure", { class: "chart lists" }, ...lists);
}

/** Horizontal bars: [label, share, method or null, text]. */
function bars(holder, rows) {
  if (!rows.length) {
    holder.replaceChildren(el("p", { class: "hint" }, "Nothing yet."));
    return;
  }
  holder.replaceChildren(
    ...rows.map(([label, share, method, text]) => {
      const bar = el("span", { class: "bar" });
      if (method) paint(bar, method);
      bar.style.setProperty("--share", share.toFixed(4));
      const track = el("span", { class: "track" }, bar);
      return el("div", { class: "bar-row" }, el("span", {}, label), track, el("span", { class: "figure" }, text));
    }),
  );
}
