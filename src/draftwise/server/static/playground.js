// The form, and running one setting or two.

import { ApiError, stream } from "./api.js";
import { Conversation } from "./conversation.js";
import { $, el, recall, remember, short } from "./dom.js";
import { chips, PROMPTS, QUESTIONS } from "./examples.js";
import { paint, SOURCES } from "./methods.js";
import { Pane } from "./pane.js";
import { explainPause } from "./pause.js";
import { Samples } from "./samples.js";
import { describeFields } from "./tips.js";
import { describe, drawTree } from "./tree.js";

const SAVED = ["temperature", "max_tokens", "top_p", "top_k", "min_p", "stop", "seed", "n"];
const NUMBERS = ["temperature", "max_tokens", "top_p", "top_k", "min_p", "seed", "n"];

const NOTES = { aborted: "stopped", error: "failed" };

const pace = () => (matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth");

const MOST_SAMPLES = 16; // tabs that one can still tell apart

export class Playground {
  constructor() {
    const hooks = {
      onStep: (pane, step, token, keep) => this.#inspect(pane, step, token, keep),
      isKept: () => this.kept,
    };
    this.kept = false;
    this.treeHeight = 0; // of the largest tree since the last run
    this.invitation = $("step-text").textContent;
    const make = (letter) => {
      const pane = new Pane(letter, hooks);
      describeFields(pane.root);
      return pane;
    };
    this.panes = [make("A"), make("B")]; // they hold the settings, and the first sample of each
    this.samples = new Samples(this.panes, make);
    this.conversation = new Conversation({ run: (options) => this.run(options), stop: () => this.abort?.abort() });
    this.abort = null;
    this.inspected = null;
    this.guarantees = null;
    $("panes").append(...this.panes.map((pane) => pane.root));
    this.#restore();
    this.#listen();
    this.#showMode();
    this.#showPanes();
  }

  /** What the server said about itself (/version). */
  setServer(version) {
    this.guarantees = version.guarantees;
    for (const pane of this.panes) pane.setMethods(version.methods, version.default_method);
    // What one would compare first: with drafts and without.
    const other = version.default_method === "none" ? (version.methods.find((m) => m !== "none") ?? "none") : "none";
    if (!this.touched) this.panes[1].choose(other);
    this.#legend(version.methods.filter((method) => method !== "none"));
  }

  get comparing() {
    return $("compare").checked;
  }

  get mode() {
    return $("request").elements.mode.value;
  }

  focusPrompt() {
    $(this.mode === "chat" ? "composer" : "prompt").focus();
  }

  focusOutput() {
    (this.mode === "chat" && $("anatomy").hidden ? $("thread") : this.panes[0].output).focus();
  }

  /** What Escape does: end a run, or let go of a step that a click kept. */
  stop() {
    this.abort?.abort();
    this.#keep(false);
  }

  #keep(kept) {
    this.kept = kept;
    $("pinned").hidden = !kept;
  }

  // -------------------------------------------------------------------------------------------------- form

  #listen() {
    const form = $("request");
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.run();
    });
    form.addEventListener("change", () => this.#save());
    for (const radio of form.elements.mode) radio.addEventListener("change", () => this.#showMode());
    $("compare").addEventListener("change", () => this.#showPanes());
    $("stop-button").addEventListener("click", () => this.abort?.abort());
    $("dice").addEventListener("click", () => {
      $("seed").value = crypto.getRandomValues(new Uint32Array(1))[0] >>> 1;
      this.#save();
    });
    $("anatomy-button").addEventListener("click", () => {
      remember("draftwise.anatomy", $("anatomy").hidden);
      this.#showMode();
    });
    $("inspector").addEventListener("toggle", () => remember("draftwise.inspector", $("inspector").open));
    $("inspector").open = recall("draftwise.inspector") ?? true;
    chips($("examples"), PROMPTS, (text) => {
      $("prompt").value = text;
      $("prompt").focus();
    });
    chips($("chat-examples"), QUESTIONS, (text) => this.conversation.write(text));
    $("step-back").addEventListener("click", () => this.inspected?.moveStep(-1));
    $("step-next").addEventListener("click", () => this.inspected?.moveStep(1));
    for (const pane of this.panes) {
      pane.settings.addEventListener("change", () => {
        this.touched = true;
        pane.showPlain();
      });
      pane.settings.addEventListener("keydown", (event) => {
        if (event.key === "Enter" && event.target.tagName === "INPUT") this.run();
      });
    }
  }

  #showMode() {
    const chat = this.mode === "chat";
    $("completion-fields").hidden = chat;
    $("chat-fields").hidden = !chat;
    $("chat").hidden = !chat;
    $("actions").hidden = chat;
    const open = !chat || recall("draftwise.anatomy") === true;
    $("anatomy").hidden = !open;
    $("anatomy-button").setAttribute("aria-expanded", String(open));
    document.querySelector(".stage").classList.toggle("chatting", chat);
    document.querySelector(".stage").classList.toggle("opened", chat && open);
    for (const pane of this.samples.all) pane.strip.draw(pane.current?.step ?? null);
  }

  #showPanes() {
    for (const pane of this.samples.lists[1]) pane.root.hidden = !this.comparing;
    $("panes").classList.toggle("two", this.comparing);
    $("verdict").hidden = true;
    for (const pane of this.samples.all) pane.strip.draw(null);
  }

  #save() {
    try {
      const values = Object.fromEntries(SAVED.map((name) => [name, $(name).value]));
      localStorage.setItem("draftwise.settings", JSON.stringify(values));
    } catch {
      // Settings are a convenience.
    }
  }

  #restore() {
    try {
      const values = JSON.parse(localStorage.getItem("draftwise.settings") ?? "{}");
      for (const name of SAVED) if (typeof values[name] === "string") $(name).value = values[name];
    } catch {
      // As above.
    }
  }

  /** (path, body) of the request of a pane. Throws Error with a sentence for people. */
  #request(pane, seed) {
    const body = { return_trace: true, return_metrics: true };
    for (const name of NUMBERS) {
      const input = $(name);
      if (input.validity.badInput) throw new Error(`${input.labels[0].textContent.trim()}: this is no number.`);
      if (input.value !== "") body[name] = Number(input.value);
    }
    if (body.n > MOST_SAMPLES) throw new Error(`Samples: this page shows ${MOST_SAMPLES} at most.`);
    if (seed !== null) body.seed = seed;
    if ($("stop").value) body.stop = $("stop").value.replaceAll("\\n", "\n");
    try {
      const speculation = pane.speculation();
      if (speculation) body.speculation = speculation;
    } catch {
      throw new Error(`Setting ${pane.letter}: the tree is no JSON. An example: [[0],[1],[0,0]]`);
    }
    if (this.mode === "chat") {
      return ["v1/chat/completions", { ...body, messages: this.conversation.request() }];
    }
    if (!$("prompt").value) throw new Error("Write a prompt first.");
    return ["v1/completions", { ...body, prompt: $("prompt").value }];
  }

  // --------------------------------------------------------------------------------------------------- run

  /** `fresh`: with a seed of its own, to get another answer than before. */
  async run({ fresh = false } = {}) {
    if (this.abort) return;
    this.#problem(null);
    const chat = this.mode === "chat";
    if (chat && !this.conversation.send() && !this.conversation.waits) {
      this.#problem("Write a message first.");
      return;
    }
    $("verdict").hidden = true;
    const panes = this.comparing ? this.panes : this.panes.slice(0, 1);
    // Two texts can be told apart from chance only if they have one seed.
    const drawn = fresh || (panes.length === 2 && $("seed").value === "");
    const seed = drawn ? crypto.getRandomValues(new Uint32Array(1))[0] >>> 1 : null;
    let requests;
    try {
      requests = panes.map((pane) => this.#request(pane, seed));
    } catch (error) {
      this.#problem(error.message);
      return;
    }
    this.abort = new AbortController();
    $("run").disabled = true;
    $("stop-button").disabled = false;
    this.#clearInspector();
    this.samples.resize(Math.max(1, Math.floor(requests[0][1].n ?? 1)));
    this.#showPanes();
    for (const pane of this.samples.all) pane.reset();
    if (chat) this.conversation.begin();
    // On a phone the output is below all fields.
    else if (matchMedia("(max-width: 860px)").matches) $("panes").scrollIntoView({ block: "start", behavior: pace() });
    try {
      // One after the other: at the same time they would take each other's speed.
      for (const i of panes.keys()) await this.#runOne(this.samples.lists[i], ...requests[i]);
      if (panes.length === 2) this.#compare();
    } catch (error) {
      if (error.name !== "AbortError") this.#problem(sentence(error));
    } finally {
      if (chat) {
        this.conversation.finish(NOTES[this.panes[0].finishReason] ?? this.panes[0].summary(), $("problem").textContent);
      }
      this.abort = null;
      $("run").disabled = false;
      $("stop-button").disabled = true;
    }
  }

  /** `panes`: one for each sample. */
  async #runOne(panes, path, body) {
    for (const pane of panes) pane.start(performance.now());
    const reasons = panes.map(() => "error");
    let metrics = null;
    try {
      for await (const chunk of stream(path, body, this.abort.signal)) {
        const choice = chunk.choices[0];
        if (!choice) continue;
        const text = choice.text ?? choice.delta?.content ?? "";
        const thoughts = choice.delta?.reasoning ?? "";
        panes[choice.index].push(thoughts + text, chunk.trace ?? [], performance.now());
        if (panes[choice.index] === this.panes[0]) this.conversation.push(text, thoughts);
        reasons[choice.index] = choice.finish_reason ?? reasons[choice.index];
        metrics = chunk.metrics ?? metrics;
      }
    } catch (error) {
      reasons.forEach((reason, i) => {
        if (reason === "error" && error.name === "AbortError") reasons[i] = "aborted";
      });
      throw error;
    } finally {
      panes.forEach((pane, i) => {
        // The server's times are those of all samples together.
        pane.finish(reasons[i], panes.length === 1 ? metrics : null);
      });
      this.samples.label();
      for (const pane of panes) explainPause(pane, this.panes.find((one) => one.letter === pane.letter));
    }
  }

  #compare() {
    const [a, b] = this.panes;
    let same = 0;
    while (same < a.tokenIds.length && a.tokenIds[same] === b.tokenIds[same]) same++;
    const differ = this.#different();
    const equal = differ.length === 0;
    const verdict = $("verdict");
    verdict.className = `verdict ${equal ? "equal" : "different"}`;
    const ratio = a.speed() && b.speed() ? a.speed() / b.speed() : null;
    const pace = !ratio
      ? ""
      : ratio >= 1.05
        ? `A was ${short(ratio)} times as fast as B.`
        : ratio <= 1 / 1.05
          ? `B was ${short(1 / ratio)} times as fast as A.`
          : "Both were equally fast.";
    verdict.replaceChildren();
    if (equal) {
      verdict.append(el("strong", {}, "The texts are equal"), ` (${a.tokenIds.length} ${a.tokenIds.length === 1 ? "token" : "tokens"}). ${pace}`);
    } else if (this.samples.count > 1) {
      verdict.append(el("strong", {}, `The texts of samples ${differ.join(", ")} differ.`), ` ${this.#why()}`);
    } else {
      for (const pane of this.panes) pane.markDifference(same);
      verdict.append(el("strong", {}, `The texts differ from token ${same + 1} on.`), ` ${pace} ${this.#why()}`);
    }
    verdict.hidden = false;
  }

  /** Numbers of the samples whose texts differ between the settings. */
  #different() {
    const [mine, other] = this.samples.lists;
    return mine.flatMap((a, i) =>
      a.text === other[i].text && a.finishReason === other[i].finishReason ? [] : [i + 1],
    );
  }

  /** Whether a difference was to be expected. */
  #why() {
    const rules = this.panes.map((pane) => pane.field("rule").value);
    const greedy = Number($("temperature").value || 1) === 0;
    if (rules.includes("typical")) return "That is to be expected: the typical rule is lossy.";
    if (greedy) {
      return this.guarantees?.same_bits ? "" : "This engine promises equality of distribution, not of bits.";
    }
    const seeded = rules.every((rule) => rule === "" || rule === "coupled");
    if (seeded && this.guarantees?.same_seed_same_text) return "";
    return "That is to be expected: these rules keep the distribution, not the text. The coupled rule keeps both.";
  }

  #problem(text) {
    $("problem").textContent = text ?? "";
    $("problem").hidden = !text;
  }

  // --------------------------------------------------------------------------------------------- inspector

  #inspect(pane, step, token, keep) {
    this.#keep(keep);
    for (const other of this.samples.all) if (other !== pane) other.unselect();
    this.inspected = pane;
    const before = step.number > 0 ? pane.steps[step.number - 1].tokens.at(-1) : null;
    const name = this.comparing ? `${pane.letter}, step ` : "Step ";
    $("step-name").textContent = `${name}${step.number + 1} of ${pane.steps.length}`;
    const text = token ? `${Pane.describe(token)}. ${describe(step)}` : describe(step);
    $("step-text").textContent = text[0].toUpperCase() + text.slice(1);
    const drawing = drawTree(step, before?.text ?? "");
    $("tree").replaceChildren(drawing);
    // Room for the largest tree so far: the page does not jump from step to step.
    this.treeHeight = Math.max(this.treeHeight, drawing.height.baseVal.value + 4);
    $("tree").style.setProperty("--tall", `${this.treeHeight}px`);
    $("step-back").disabled = step.number === 0;
    $("step-next").disabled = step.number + 1 >= pane.steps.length;
  }

  #clearInspector() {
    for (const pane of this.samples.all) pane.unselect();
    this.inspected = null;
    this.#keep(false);
    $("step-name").textContent = "";
    $("step-text").textContent = this.invitation;
    $("tree").replaceChildren();
    this.treeHeight = 0;
    $("tree").style.removeProperty("--tall");
    $("step-back").disabled = $("step-next").disabled = true;
  }

  #legend(methods) {
    const legend = $("legend");
    legend.replaceChildren();
    for (const method of methods) {
      const swatches = el("span", { class: "swatches", "aria-hidden": "true" });
      for (let position = 0; position < 5; position++) {
        const swatch = el("span", { class: "tok draft" }, String(position + 1));
        paint(swatch, method, position);
        swatches.append(swatch);
      }
      legend.append(el("span", { class: "entry", title: "accepted drafts, by position" }, swatches, ` ${method}`));
    }
    for (const source of ["bonus", "recovered", "target"]) {
      const sample = el("span", { class: `tok ${source}`, "aria-hidden": "true" }, "abc");
      legend.append(el("span", { class: "entry", title: SOURCES[source] }, sample, ` ${LEGEND[source]}`));
    }
  }
}

const LEGEND = {
  bonus: "target, after a whole draft",
  recovered: "target, in place of a draft",
  target: "target, nothing drafted",
};

function sentence(error) {
  if (!(error instanceof ApiError)) return error.message;
  if (error.status === 401) return "The server wants an API key (above).";
  if (error.status === 429) {
    return `${error.message}${error.retryAfter ? ` Try again in ${error.retryAfter} s.` : ""}`;
  }
  return error.message;
}
