// A small line chart over time, in SVG: grid, lines, a cross-hair with values.

import { el, svg } from "./dom.js";

const HEIGHT = 150;
const LEFT = 52;
const RIGHT = 8;
const TOP = 8;
const BOTTOM = 20;

export class Chart {
  /** `series`: [{name, kind}], kind names the colour in the style sheet. `format`: number -> text. */
  constructor({ title, hint, series, format, highest = null }) {
    this.series = series;
    this.format = format;
    this.highest = highest;
    this.points = [];
    this.now = el("span", { class: "now" });
    this.picture = svg("svg", { height: HEIGHT, role: "img" });
    this.grid = svg("g", { class: "grid" });
    this.lines = series.map(({ kind }) => svg("path", { class: `line ${kind}` }));
    this.cross = svg("g", { class: "cross", visibility: "hidden" });
    this.crossLine = svg("line", { y1: TOP, y2: HEIGHT - BOTTOM });
    this.cross.append(this.crossLine);
    this.picture.append(this.grid, ...this.lines, this.cross);
    this.title = title;
    const keys = series.length > 1 ? series.map(({ name, kind }) => el("span", { class: `key ${kind}` }, name)) : [];
    this.root = el(
      "figure",
      { class: "chart" },
      el("figcaption", {}, el("span", { class: "name", "data-help": hint }, title), this.now),
      this.picture,
      el("div", { class: "keys" }, ...keys),
    );
    // As many units as pixels: letters keep their size whatever the width.
    this.width = 400;
    new ResizeObserver(([{ contentRect }]) => {
      if (!contentRect.width) return; // hidden
      this.width = contentRect.width;
      if (this.end) this.draw(this.points, this.start, this.end);
    }).observe(this.picture);
    this.picture.addEventListener("pointermove", (event) => this.#hover(event));
    this.picture.addEventListener("pointerleave", () => {
      this.hovered = null;
      this.#values();
    });
  }

  /** `points`: [{time, values}] in order of time, values one per series or null; from `start` to `end` (seconds). */
  draw(points, start, end) {
    Object.assign(this, { points, start, end });
    const all = points.flatMap((point) => point.values.filter((value) => value !== null));
    this.top = this.highest ?? ceiling(Math.max(...all, 0));
    this.#drawGrid();
    this.lines.forEach((line, i) => line.setAttribute("d", this.#path(i)));
    this.#values();
  }

  x(time) {
    return LEFT + ((time - this.start) / (this.end - this.start)) * (this.width - LEFT - RIGHT);
  }

  y(value) {
    return HEIGHT - BOTTOM - (Math.min(value, this.top) / this.top) * (HEIGHT - TOP - BOTTOM);
  }

  #path(i) {
    let path = "";
    let down = false; // a gap in the data is a gap in the line
    for (const { time, values } of this.points) {
      if (values[i] === null) {
        down = false;
        continue;
      }
      const [x, y] = [this.x(time).toFixed(1), this.y(values[i]).toFixed(1)];
      // A point without neighbours is drawn as a dot: a line of no length with round ends.
      path += down ? `L${x} ${y}` : `M${x} ${y}h.01`;
      down = true;
    }
    return path;
  }

  #drawGrid() {
    const parts = [];
    for (const share of [0, 0.5, 1]) {
      const value = this.top * share;
      const y = this.y(value);
      parts.push(svg("line", { x1: LEFT, x2: this.width - RIGHT, y1: y, y2: y }));
      parts.push(svg("text", { x: LEFT - 6, y: y + 4, "text-anchor": "end" }, value === 0 ? "0" : this.format(value)));
    }
    const minutes = (this.end - this.start) / 60;
    const ago = (at) => {
      const seconds = Math.round(this.end - at);
      return seconds === 0 ? "now" : minutes > 1 ? `−${Number((seconds / 60).toFixed(1))} min` : `−${seconds} s`;
    };
    for (const [share, anchor] of [[0, "start"], [0.5, "middle"], [1, "end"]]) {
      const time = this.start + (this.end - this.start) * share;
      parts.push(svg("text", { x: this.x(time), y: HEIGHT - 5, "text-anchor": anchor }, ago(time)));
    }
    this.grid.replaceChildren(...parts);
  }

  #hover(event) {
    const box = this.picture.getBoundingClientRect();
    const share = (event.clientX - box.left - LEFT) / (this.width - LEFT - RIGHT);
    const time = this.start + share * (this.end - this.start);
    let best = null;
    for (const point of this.points) {
      if (!best || Math.abs(point.time - time) < Math.abs(best.time - time)) best = point;
    }
    this.hovered = best;
    this.#values();
  }

  #values() {
    const hovered = this.hovered && this.hovered.time >= this.start ? this.hovered : null;
    const point = hovered ?? this.points.at(-1);
    this.cross.setAttribute("visibility", hovered ? "visible" : "hidden");
    if (hovered) {
      const x = this.x(hovered.time);
      this.crossLine.setAttribute("x1", x);
      this.crossLine.setAttribute("x2", x);
    }
    const values = (point?.values ?? []).map((value) => (value === null ? "–" : this.format(value)));
    this.now.textContent = values.length ? values.join(" · ") : "–";
    const words = this.series.map(({ name }, i) => `${name} ${values[i] ?? "–"}`).join(", ");
    this.picture.setAttribute("aria-label", `${this.title}: ${words}`);
  }
}

/** The next round number: 1, 2 or 5 times a power of ten. Examples: 0.034 is 0.05, 7 is 10, 0 is 1. */
function ceiling(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  for (const step of [1, 2, 5, 10]) if (value <= step * power * 1.0001) return step * power;
  return 10 * power;
}
