// Explanations where a thing stands: of whatever has `data-help`, when it is pointed at, tapped, or has the focus.

import { $, el } from "./dom.js";

let shownFor = null;
let made = 0; // descriptions

function show(holder) {
  const tip = $("tip");
  shownFor = holder;
  tip.textContent = holder.dataset.help;
  tip.hidden = false;
  const box = holder.getBoundingClientRect();
  const own = tip.getBoundingClientRect();
  const left = Math.max(8, Math.min(box.left, innerWidth - own.width - 8));
  const below = box.bottom + 6;
  const top = below + own.height > innerHeight && box.top > own.height + 12 ? box.top - own.height - 6 : below;
  tip.style.setProperty("--left", `${left}px`);
  tip.style.setProperty("--top", `${top}px`);
}

export function hideTip() {
  $("tip").hidden = true;
  shownFor = null;
}

const holderOf = (target) => target.closest?.("[data-help]") ?? null;

export function setUpTips() {
  let timer = 0;
  document.addEventListener("pointerover", (event) => {
    const holder = holderOf(event.target);
    clearTimeout(timer);
    // Who goes on to the explanation itself may read it there.
    if (holder === shownFor || event.target.closest?.("#tip")) return;
    if (holder) timer = setTimeout(() => show(holder), shownFor ? 60 : 350);
    else timer = setTimeout(hideTip, 120);
  });
  document.addEventListener("focusin", (event) => {
    const holder = holderOf(event.target);
    if (holder && event.target.matches(":focus-visible")) show(holder);
    else hideTip();
  });
  document.addEventListener("focusout", hideTip);
  document.addEventListener("scroll", hideTip, true);
  document.addEventListener("click", (event) => {
    const holder = holderOf(event.target);
    if (holder && !event.target.matches("input, select, textarea")) show(holder);
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && shownFor) hideTip();
  });
}

/** Say explanations to those who cannot see them: each field is described by its own. */
export function describeFields(root) {
  for (const holder of root.querySelectorAll("[data-help]")) {
    const field = holder.matches("textarea") ? holder : holder.querySelector("input, select, textarea");
    if (!field) continue;
    const words = el("span", { id: `tip-${++made}`, hidden: "" }, holder.dataset.help);
    holder.after(words);
    field.setAttribute("aria-describedby", words.id);
  }
}
