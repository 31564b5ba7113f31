// One setting and what it wrote: the output coloured token by token, figures, a strip of steps.

import { Aligner } from "./align.js";
import { $, duration, el, percent, short } from "./dom.js";
import { paint, RULES, SOURCES } from "./methods.js";
import { Strip } from "./strip.js";

export class Pane {
  /**
   * `onStep(pane, step, token, keep)`: a step was pointed at, moved to, or clicked (`keep`). `isKept()`: a clicked step
   * stays, and pointing does nothing until it is let go.
   */
  constructor(letter, { onStep, isKept }) {
    this.isKept = isKept;
    this.letter = letter;
    this.onStep = onStep;
    this.root = $("pane-template").content.firstElementChild.cloneNode(true);
    this.root.dataset.pane = letter;
    this.root.querySelector(".letter").textContent = letter;
    this.settings = this.root.querySelector(".pane-settings");
    this.output = this.root.querySelector(".output");
    this.invitation = this.output.dataset.empty;
    this.output.setAttribute("aria-label", `Output ${letter}. Arrow keys move through its tokens.`);
    this.strip = new Strip(this.root.querySelector(".strip"), (step) => {
      this.select(step.spans[0] ?? null, step, { keep: true });
    });
    const rule = this.field("rule");
    for (const [value, text] of RULES) rule.append(new Option(text, value));
    this.#listen();
    this.reset();
  }

  field(name) {
    return this.settings.querySelector(`[name=${name}]`); // the settings go where the sample is that is shown
  }

  figure(name, text) {
    this.root.querySelector(`[data-figure=${name}]`).textContent = text;
  }

  /** Offer these methods; the chosen one stays if it is among them. */
  setMethods(methods, defaultMethod) {
    const select = this.field("method");
    const chosen = select.value;
    this.defaultMethod = defaultMethod;
    select.replaceChildren();
    for (const method of methods) {
      select.append(new Option(method === defaultMethod ? `${method} (default)` : method, method));
    }
    this.choose(methods.includes(chosen) ? chosen : defaultMethod);
  }

  choose(method) {
    this.field("method").value = method;
    this.showPlain();
  }

  /** Plain decoding drafts nothing: K and tree have no meaning then. */
  showPlain() {
    const plain = this.field("method").value === "none";
    for (const name of ["k", "tree"]) this.field(name).disabled = plain;
  }

  /** The request's `speculation`, or undefined for the engine's own. Throws SyntaxError for a tree that is no JSON. */
  speculation() {
    const out = {};
    const method = this.field("method").value;
    if (method && method !== this.defaultMethod) out.method = method;
    if (method !== "none") {
      if (this.field("k").value !== "") out.num_speculative_tokens = Number(this.field("k").value);
      Object.assign(out, treeOf(this.field("tree").value.trim()));
    }
    if (this.field("rule").value) out.rule = this.field("rule").value;
    return Object.keys(out).length ? out : undefined;
  }

  reset() {
    this.steps = [];
    this.spans = [];
    this.text = "";
    this.tokenIds = [];
    this.finishReason = null;
    this.metrics = null;
    this.drafted = [];
    this.accepted = [];
    this.numDrafts = 0;
    this.current = null;
    this.firstTime = null;
    this.lastTime = null;
    this.firstCount = 0;
    this.pending = document.createDocumentFragment();
    this.frame = 0;
    this.aligner = new Aligner((token, text) => this.#addToken(token, text));
    this.output.replaceChildren();
    this.output.dataset.empty = this.invitation;
    this.output.classList.remove("differs", "busy");
    this.root.querySelector(".finish").textContent = "";
    this.root.querySelector(".positions").replaceChildren();
    this.root.querySelector(".copy").disabled = true;
    this.root.querySelector(".paused").hidden = true;
    for (const name of ["speed", "length", "rate", "ttft", "counts"]) this.figure(name, "–");
    this.strip.reset(this.steps);
  }

  start(now) {
    this.reset();
    this.startTime = now;
    this.output.classList.add("busy");
    this.output.setAttribute("aria-busy", "true");
  }

  /** One chunk: the new text of the answer and the steps that made it. */
  push(text, trace, now) {
    this.text += text;
    const tokens = [];
    for (const step of trace) {
      step.number = this.steps.length;
      step.spans = [];
      this.steps.push(step);
      this.#count(step);
      for (const token of step.tokens) {
        token.step = step;
        tokens.push(token);
        this.tokenIds.push(token.token_id);
      }
    }
    if (tokens.length) {
      if (this.firstTime === null) {
        this.firstTime = now;
        this.firstCount = tokens.length;
      }
      this.lastTime = now;
    }
    this.aligner.push(text, tokens);
    this.#schedule();
  }

  finish(reason, metrics) {
    this.aligner.finish();
    this.finishReason = reason;
    this.metrics = metrics;
    this.output.classList.remove("busy");
    this.output.removeAttribute("aria-busy");
    this.root.querySelector(".finish").textContent =
      reason === "stop" && !this.text ? "ended at once, without text" : FINISH[reason] ?? reason ?? "";
    this.root.querySelector(".copy").disabled = !this.text;
    this.output.dataset.empty = reason === "stop" ? "The model ended at once." : "Nothing came.";
    cancelAnimationFrame(this.frame);
    this.#draw();
  }

  /** Tokens per second after the first step's: the server's clock once it is there, ours until then. */
  speed() {
    const times = this.metrics;
    if (times?.itl) return 1 / times.itl;
    const seconds = (this.lastTime - this.firstTime) / 1000;
    return seconds > 0 ? (this.tokenIds.length - this.firstCount) / seconds : null;
  }

  /** Accepted over drafted tokens; null where nothing was drafted. */
  acceptance() {
    const drafted = this.steps.reduce((sum, step) => sum + step.draft.length, 0);
    return drafted ? this.accepted.reduce((sum, n) => sum + n, 0) / drafted : null;
  }

  /** Steps at the end of the answer in which nothing was drafted. */
  idleSteps() {
    let idle = 0;
    while (idle < this.steps.length && !this.steps.at(-1 - idle).draft.length) idle++;
    return idle;
  }

  /** Say why nothing was drafted; null: there is nothing to say. */
  explainPause(text) {
    const note = this.root.querySelector(".paused");
    note.textContent = text ?? "";
    note.hidden = !text;
  }

  /** The run in a line. Example: "41.2 tokens/s, 2.60 per step, 71 % accepted". */
  summary() {
    const speed = this.speed();
    const share = this.acceptance();
    const parts = [];
    if (speed) parts.push(`${short(speed)} tokens/s`);
    if (this.steps.length) parts.push(`${(this.tokenIds.length / this.steps.length).toFixed(2)} per step`);
    if (share !== null) parts.push(`${percent(share)} accepted`);
    return parts.join(", ");
  }

  /** Mark where this text leaves another's: tokens from the i-th on. */
  markDifference(i) {
    this.spans.find((span) => span.token && span.token.output_index >= i)?.classList.add("fork");
  }

  // ------------------------------------------------------------------------------------------------ tokens

  #addToken(token, text) {
    if (!token) {
      this.pending.append(el("span", { class: "untraced", title: "not traced" }, text));
      return;
    }
    const span = el("span", { class: `tok ${token.source}` }, text);
    if (text.includes("\n")) span.classList.add("nl");
    if (token.source === "draft") paint(span, token.step.method, token.position);
    span.token = token;
    token.step.spans.push(span);
    this.spans.push(span);
    this.pending.append(span);
  }

  #count(step) {
    if (!step.draft.length) return;
    this.numDrafts++;
    const depths = [];
    step.draft.forEach((node, i) => depths.push(node.parent < 0 ? 0 : depths[node.parent] + 1));
    for (let depth = 0; depth <= Math.max(...depths); depth++) {
      this.drafted[depth] = (this.drafted[depth] ?? 0) + 1;
    }
    step.accepted.forEach((_, depth) => {
      this.accepted[depth] = (this.accepted[depth] ?? 0) + 1;
    });
    this.method = step.method;
  }

  #schedule() {
    if (!this.frame) this.frame = requestAnimationFrame(() => this.#draw());
  }

  #draw() {
    this.frame = 0;
    const atEnd = this.output.scrollHeight - this.output.scrollTop - this.output.clientHeight < 40;
    this.output.append(this.pending);
    if (atEnd) this.output.scrollTop = this.output.scrollHeight;
    this.#drawFigures();
    this.strip.draw(this.current?.step ?? null);
  }

  #drawFigures() {
    const speed = this.speed();
    this.figure("speed", speed ? short(speed) : "–");
    const steps = this.steps.length;
    const tokens = this.tokenIds.length;
    if (steps) this.figure("length", (tokens / steps).toFixed(2));
    const share = this.acceptance();
    this.figure("rate", share === null ? "–" : percent(share));
    const ttft = this.metrics?.ttft ?? (this.firstTime === null ? null : (this.firstTime - this.startTime) / 1000);
    if (ttft !== null) this.figure("ttft", duration(ttft));
    this.figure("counts", steps ? `${tokens} in ${steps}` : "–");
    this.#drawPositions();
  }

  #drawPositions() {
    const holder = this.root.querySelector(".positions");
    const depths = this.drafted.slice(0, 8);
    while (holder.childElementCount > depths.length) holder.lastElementChild.remove();
    depths.forEach((drafted, depth) => {
      let cell = holder.children[depth];
      if (!cell) {
        cell = el("span", { class: "pos tok draft" });
        holder.append(cell);
      }
      paint(cell, this.method, depth);
      const share = percent((this.accepted[depth] ?? 0) / drafted);
      cell.textContent = share;
      cell.title = `Position ${depth + 1}: ${this.accepted[depth] ?? 0} of ${drafted} drafts were accepted so far`;
    });
  }

  // ------------------------------------------------------------------------------------------------ moving

  #listen() {
    this.output.addEventListener("pointerover", (event) => {
      const span = event.target.closest(".tok");
      if (span?.token && !this.isKept()) this.select(span, span.token.step, { scroll: false });
    });
    this.output.addEventListener("click", (event) => {
      const span = event.target.closest(".tok");
      if (span?.token) this.select(span, span.token.step, { scroll: false, keep: true });
    });
    this.output.addEventListener("keydown", (event) => this.#key(event));
    this.output.addEventListener("focus", () => {
      if (!this.current?.span && this.spans.length && this.output.matches(":focus-visible")) this.moveTo(0);
    });
    this.root.querySelector(".copy").addEventListener("click", async (event) => {
      const button = event.currentTarget;
      try {
        await navigator.clipboard.writeText(this.text);
        button.textContent = "Copied";
      } catch {
        getSelection().selectAllChildren(this.output);
        button.textContent = "Selected";
      }
      setTimeout(() => (button.textContent = "Copy"), 1200);
    });
  }

  #key(event) {
    if (event.altKey || event.ctrlKey || event.metaKey || !this.spans.length) return;
    const at = this.current?.span ? this.spans.indexOf(this.current.span) : -1;
    const moves = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: this.spans.length - 1 };
    if (event.key in moves) this.moveTo(moves[event.key]);
    else if (event.key === "ArrowDown") this.moveStep(1);
    else if (event.key === "ArrowUp") this.moveStep(-1);
    else return;
    event.preventDefault();
  }

  moveTo(i) {
    const span = this.spans[Math.max(0, Math.min(i, this.spans.length - 1))];
    if (span) this.select(span, span.token.step);
  }

  /** To the step before (-1) or after (1) the current one. */
  moveStep(by) {
    const number = this.current ? this.current.step.number + by : 0;
    const step = this.steps[number];
    if (step) this.select(step.spans[0] ?? null, step);
  }

  select(span, step, { scroll = true, keep = false } = {}) {
    this.unselect();
    this.current = { span, step };
    for (const part of step.spans) part.classList.add("same-step");
    span?.classList.add("current");
    if (scroll) span?.scrollIntoView({ block: "nearest" });
    this.strip.draw(step);
    this.onStep(this, step, span?.token ?? null, keep);
  }

  unselect() {
    for (const part of this.current?.step.spans ?? []) part.classList.remove("same-step", "current");
    this.current = null;
  }

  /** What to say about a token. Example: "accepted draft, position 2 of ngram". */
  static describe(token) {
    const what = SOURCES[token.source] ?? token.source;
    return token.source === "draft" ? `${what}, position ${token.position + 1} of ${token.step.method}` : what;
  }
}

/** The fields that a tree in words or JSON stands for: "dynamic", "chain", a list of paths, limits of a dynamic tree. */
function treeOf(text) {
  if (!text) return {};
  if (text === "dynamic" || text === "chain") return { speculative_dynamic_tree: text === "dynamic" };
  const value = JSON.parse(text);
  return Array.isArray(value) ? { speculative_token_tree: value } : { speculative_dynamic_tree: value };
}

const FINISH = {
  length: "reached its max tokens",
  stop: "ended by itself",
  aborted: "stopped",
  error: "failed",
};
