// A chat: bubbles, a field to write in, and the conversations of before.

import { $, el } from "./dom.js";
import { History, newId } from "./history.js";
import { markdown } from "./markdown.js";

const REDRAW = 80; // ms between renderings of an answer that grows

export class Conversation {
  /** `run()`: answer the messages so far. `stop()`: end what runs. */
  constructor({ run, stop }) {
    this.run = run;
    this.stop = stop;
    this.history = new History();
    this.busy = false;
    this.trouble = ""; // why the last answer failed, until something else happens
    this.growing = null; // the answer that comes: {content, thoughts, bubble, drawn}
    this.#begin(newId(), [], "");
    this.#listen();
    this.#drawHistory();
  }

  /** For the request. */
  request() {
    const system = $("system").value.trim();
    const said = this.messages.map(({ role, content }) => ({ role, content }));
    return system ? [{ role: "system", content: system }, ...said] : said;
  }

  /** Whether the last word is the user's: there is something to answer. */
  get waits() {
    return this.messages.at(-1)?.role === "user";
  }

  /** What was written and not sent becomes a message. False: there was nothing. */
  send() {
    const text = $("composer").value;
    if (this.busy || !text.trim()) return false;
    this.messages.push({ role: "user", content: text.trim() });
    $("composer").value = "";
    this.#fit();
    this.#draw();
    return true;
  }

  write(text) {
    $("composer").value = text;
    this.#fit();
    $("composer").focus();
  }

  // ------------------------------------------------------------------------------------------ an answer

  begin() {
    this.busy = true;
    this.growing = { content: "", thoughts: "", drawn: 0, timer: 0 };
    this.#draw();
    this.#buttons();
  }

  push(content, thoughts) {
    const growing = this.growing;
    if (!growing) return;
    growing.content += content;
    growing.thoughts += thoughts;
    const wait = REDRAW - (performance.now() - growing.drawn);
    if (!growing.timer) growing.timer = setTimeout(() => this.#grow(), Math.max(0, wait));
  }

  /** The answer ended; `note`: what to say below it; `trouble`: why there is none, or not all of it. */
  finish(note, trouble = "") {
    const growing = this.growing;
    this.busy = false;
    this.growing = null;
    if (growing) {
      clearTimeout(growing.timer);
      if (growing.content || growing.thoughts) {
        this.messages.push({ role: "assistant", content: growing.content, thoughts: growing.thoughts, note });
      }
    }
    this.trouble = trouble;
    this.#draw();
    this.#buttons();
    this.#keep();
  }

  #grow() {
    const growing = this.growing;
    if (!growing) return;
    growing.timer = 0;
    growing.drawn = performance.now();
    const near = this.#nearEnd();
    fillBubble(growing.bubble, growing);
    if (near) this.#toEnd();
  }

  // ----------------------------------------------------------------------------------------- the thread

  #begin(id, messages, system) {
    this.id = id;
    this.messages = messages;
    $("system").value = system;
    this.#draw();
  }

  #nearEnd() {
    const thread = $("thread");
    return thread.scrollHeight - thread.scrollTop - thread.clientHeight < 60;
  }

  #toEnd() {
    $("thread").scrollTop = $("thread").scrollHeight;
  }

  #draw() {
    const bubbles = this.messages.map((message, at) => this.#bubble(message, at));
    if (this.growing) {
      const body = el("div", { class: "bubble-body busy" });
      this.growing.bubble = body;
      fillBubble(body, this.growing);
      bubbles.push(el("li", { class: "bubble assistant", "aria-busy": "true" }, body));
    }
    else if (this.trouble) bubbles.push(el("li", { class: "notice error" }, this.trouble));
    this.trouble = "";
    $("messages").replaceChildren(...bubbles);
    $("thread-empty").hidden = bubbles.length > 0;
    this.#toEnd();
  }

  #bubble(message, at) {
    const body = el("div", { class: "bubble-body" });
    const mine = message.role === "user";
    if (mine) body.append(el("p", { class: "as-written" }, message.content));
    else fillBubble(body, message);
    const actions = el("div", { class: "bubble-actions" });
    const act = (label, name, work) => {
      const button = el("button", { type: "button", class: `ghost small ${name}` }, label);
      button.addEventListener("click", work);
      actions.append(button);
    };
    if (message.note) actions.append(el("span", { class: "hint" }, message.note));
    if (!this.busy) {
      act("Copy", "copy-message", () => navigator.clipboard?.writeText(message.content).catch(() => {}));
      if (mine) act("Edit", "edit", () => this.#edit(at));
      else act("Regenerate", "regenerate", () => this.#regenerate(at));
    }
    const who = el("span", { class: "visually-hidden" }, mine ? "You wrote:" : "The model wrote:");
    return el("li", { class: `bubble ${message.role}` }, who, body, actions);
  }

  /** Write a message anew: what came after it goes. */
  #edit(at) {
    if (this.busy) return;
    const item = $("messages").children[at];
    const field = el("textarea", { rows: 3, "aria-label": "Edit the message" });
    field.value = this.messages[at].content;
    const save = el("button", { type: "button", class: "primary small save-edit" }, "Send");
    const cancel = el("button", { type: "button", class: "ghost small" }, "Cancel");
    item.replaceChildren(field, el("div", { class: "bubble-actions" }, save, cancel));
    item.classList.add("editing");
    field.focus();
    cancel.addEventListener("click", () => this.#draw());
    const done = () => {
      if (!field.value.trim()) return;
      this.messages = this.messages.slice(0, at);
      this.messages.push({ role: "user", content: field.value.trim() });
      this.#draw();
      this.run();
    };
    save.addEventListener("click", done);
    field.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) done();
      else if (event.key === "Escape") this.#draw();
      else return;
      event.preventDefault();
      event.stopPropagation();
    });
  }

  /** Ask for an answer again: it goes, and what came after it. */
  #regenerate(at) {
    if (this.busy) return;
    this.messages = this.messages.slice(0, at);
    this.#draw();
    this.run({ fresh: true });
  }

  // ------------------------------------------------------------------------------------------- history

  #keep() {
    if (!this.messages.length) return;
    this.history.keep(this.id, this.messages, $("system").value);
    this.#drawHistory();
  }

  #drawHistory() {
    const items = this.history.list.map((one) => {
      const open = el("button", { type: "button", class: "ghost open-chat", title: one.title }, one.title);
      if (one.id === this.id) open.setAttribute("aria-current", "true");
      open.addEventListener("click", () => {
        if (this.busy) return;
        this.#begin(one.id, [...one.messages], one.system);
        this.#drawHistory();
      });
      const forget = el("button", { type: "button", class: "ghost icon", "aria-label": `Forget ${one.title}` }, "×");
      forget.addEventListener("click", () => {
        if (this.busy && one.id === this.id) return;
        this.history.forget(one.id);
        if (one.id === this.id) this.#begin(newId(), [], "");
        this.#drawHistory();
        $("new-chat").focus();
      });
      return el("li", {}, open, forget);
    });
    $("chats").replaceChildren(...items);
    $("chats-empty").hidden = items.length > 0;
  }

  // -------------------------------------------------------------------------------------------- writing

  #listen() {
    const composer = $("composer");
    composer.addEventListener("input", () => this.#fit());
    composer.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing || event.ctrlKey || event.metaKey) return;
      event.preventDefault();
      if (!this.busy) this.run();
    });
    $("send").addEventListener("click", () => (this.busy ? this.stop() : this.run()));
    $("new-chat").addEventListener("click", () => {
      if (this.busy) return;
      this.#begin(newId(), [], $("system").value);
      this.#drawHistory();
      composer.focus();
    });
    this.#buttons();
  }

  #buttons() {
    $("send").textContent = this.busy ? "Stop" : "Send";
    $("send").className = this.busy ? "secondary" : "primary";
    $("new-chat").disabled = this.busy;
  }

  #fit() {
    const composer = $("composer");
    composer.rows = Math.max(1, Math.min(8, composer.value.split("\n").length));
  }
}

function fillBubble(body, { content, thoughts = "" }) {
  const parts = [];
  if (thoughts) {
    const before = body.querySelector("details.thoughts");
    const details = el("details", { class: "thoughts" }, el("summary", {}, "Reasoning"), el("p", {}, thoughts));
    details.open = before ? before.open : !content;
    parts.push(details);
  }
  const made = markdown(content);
  body.replaceChildren(...parts, made);
}
