// The messages of a chat, as a list that can be edited.

import { el } from "./dom.js";

const ROLES = ["system", "user", "assistant"];

export class Conversation {
  constructor(list) {
    this.list = list;
    this.add("user");
  }

  /** A message at the end. Without a role: the one whose turn it is. */
  add(role = null, content = "") {
    const last = this.list.lastElementChild?.querySelector("select").value;
    const select = el("select", { "aria-label": "Role" });
    for (const name of ROLES) select.append(new Option(name, name));
    select.value = role ?? (last === "user" ? "assistant" : "user");
    const text = el("textarea", { rows: 3, "aria-label": "Message", spellcheck: "false" });
    text.value = content;
    const remove = el("button", { type: "button", class: "ghost icon", "aria-label": "Remove message" }, "×");
    const item = el("li", {}, el("div", { class: "message-head" }, select, remove), text);
    remove.addEventListener("click", () => {
      const next = item.nextElementSibling ?? item.previousElementSibling;
      item.remove();
      if (next) next.querySelector("textarea").focus();
      else this.add("user").focus();
    });
    this.list.append(item);
    return text;
  }

  /** Take an answer in, and make room for what comes next. */
  answer(text) {
    this.add("assistant", text);
    this.add("user").focus();
  }

  /** For the request; empty ones are left out. */
  messages() {
    const all = [...this.list.children].map((item) => ({
      role: item.querySelector("select").value,
      content: item.querySelector("textarea").value,
    }));
    return all.filter((message) => message.content.trim());
  }
}
