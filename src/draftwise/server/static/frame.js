// What both pages have at the top: the theme, and the field for the API key.

import { setKey, whenUnauthorized } from "./api.js";
import { $ } from "./dom.js";

const THEMES = { auto: ["◐", "as the system"], light: ["☀", "light"], dark: ["☾", "dark"] };

/** Show the remembered theme and let the button change it. `repaint()` is called whenever colours change. */
export function setUpTheme(repaint) {
  function show(theme) {
    const [sign, words] = THEMES[theme];
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    $("theme").dataset.value = theme;
    $("theme").setAttribute("aria-label", `Theme: ${words}`);
    $("theme").title = `Theme: ${words}`;
    $("theme").firstElementChild.textContent = sign;
    repaint();
  }

  $("theme").addEventListener("click", () => {
    const names = Object.keys(THEMES);
    const next = names[(names.indexOf($("theme").dataset.value) + 1) % names.length];
    try {
      localStorage.setItem("draftwise.theme", next);
    } catch {
      // Then it lasts as long as the page.
    }
    show(next);
  });
  let remembered = null;
  try {
    remembered = localStorage.getItem("draftwise.theme");
  } catch {
    // Storage is switched off.
  }
  show(remembered in THEMES ? remembered : "auto");
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
}

/** Ask for a key when the server refuses. `retry()` is called with the new key in use. */
export function setUpKey(retry) {
  whenUnauthorized((refused) => {
    const opening = $("key-form").hidden;
    $("key-form").hidden = false;
    $("key-button").hidden = false;
    $("key-form").querySelector("label").textContent = refused
      ? "The server refused this API key"
      : "This server asks for an API key";
    if (opening || refused) $("key").focus();
  });
  $("key-button").addEventListener("click", () => {
    $("key-form").hidden = !$("key-form").hidden;
    if (!$("key-form").hidden) $("key").focus();
  });
  $("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    setKey($("key").value);
    $("key").value = "";
    $("key-form").hidden = true;
    retry();
  });
}
