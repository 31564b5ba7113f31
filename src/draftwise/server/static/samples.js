// Several samples of one request: a tab for each, and in every setting's place the pane of the chosen one.

import { $, el, percent } from "./dom.js";

export class Samples {
  /** `firsts`: the panes that hold the settings, one per setting. `make(letter)`: another pane. */
  constructor(firsts, make) {
    this.lists = firsts.map((pane) => [pane]);
    this.make = make;
    this.chosen = 0;
  }

  get all() {
    return this.lists.flat();
  }

  get count() {
    return this.lists[0].length;
  }

  /** Make room for n samples per setting. */
  resize(n) {
    this.show(0);
    this.lists.forEach((list) => {
      for (const pane of list.splice(n)) pane.root.remove();
      while (list.length < n) {
        const pane = this.make(list[0].letter);
        pane.root.dataset.pane = `${pane.letter}${list.length + 1}`;
        pane.output.setAttribute("aria-label", `Output ${pane.letter}, sample ${list.length + 1}.`);
        pane.settings.remove(); // those of the first pane are moved here when this one is shown
        list.at(-1).root.after(pane.root);
        list.push(pane);
      }
    });
    const tabs = $("samples");
    tabs.hidden = n === 1;
    tabs.replaceChildren(...Array.from({ length: n === 1 ? 0 : n }, (_, i) => this.#tab(i)));
    this.show(0);
  }

  #tab(i) {
    const tab = el("button", { role: "tab", type: "button" }, `Sample ${i + 1}`);
    tab.addEventListener("click", () => this.show(i));
    tab.addEventListener("keydown", (event) => {
      const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!by) return;
      this.show((i + by + this.count) % this.count);
      $("samples").children[this.chosen].focus();
      event.preventDefault();
    });
    return tab;
  }

  show(chosen) {
    this.chosen = chosen;
    for (const list of this.lists) {
      const shown = list[chosen];
      // Moving what is there already would take the focus from it.
      if (shown.root.firstElementChild !== list[0].settings) shown.root.prepend(list[0].settings);
      for (const pane of list) pane.root.classList.toggle("behind", pane !== shown);
      shown.strip.draw(shown.current?.step ?? null);
    }
    [...$("samples").children].forEach((tab, i) => {
      tab.setAttribute("aria-selected", String(i === chosen));
      tab.tabIndex = i === chosen ? 0 : -1;
    });
  }

  /** Say in the tabs how many drafts were accepted, once it is known. */
  label() {
    [...$("samples").children].forEach((tab, i) => {
      const shares = this.lists.map((list) => list[i].acceptance()).filter((share) => share !== null);
      tab.textContent = [`Sample ${i + 1}`, ...shares.map(percent)].join(" · ");
      if (shares.length) tab.title = "Accepted of the drafted tokens";
    });
  }
}
