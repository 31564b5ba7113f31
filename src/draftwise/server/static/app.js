// The page: what the server is, tabs, theme, key, shortcuts.

import { getJSON, getText, restoreKey, whenUnreachable } from "./api.js";
import { forgetColours } from "./colours.js";
import { Dashboard } from "./dashboard.js";
import { $ } from "./dom.js";
import { setUpKey, setUpTheme } from "./frame.js";
import { Playground } from "./playground.js";
import { describeFields, hideTip, setUpTips } from "./tips.js";

const playground = new Playground();
const dashboard = new Dashboard();

// ---------------------------------------------------------------------------------------------------- tabs

const TABS = ["playground", "dashboard"];

function showTab(name) {
  for (const tab of TABS) {
    const chosen = tab === name;
    $(tab).hidden = !chosen;
    $(`tab-${tab}`).setAttribute("aria-selected", String(chosen));
    $(`tab-${tab}`).tabIndex = chosen ? 0 : -1;
  }
  dashboard.show(name === "dashboard");
  history.replaceState(null, "", name === "playground" ? location.pathname : `#${name}`);
}

for (const tab of TABS) {
  $(`tab-${tab}`).addEventListener("click", () => showTab(tab));
  $(`tab-${tab}`).addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by) return;
    const next = TABS[(TABS.indexOf(tab) + by + TABS.length) % TABS.length];
    showTab(next);
    $(`tab-${next}`).focus();
  });
}
showTab(location.hash === "#dashboard" ? "dashboard" : "playground");

// ------------------------------------------------------------------------------------------- theme and key

setUpTheme(() => {
  forgetColours();
  for (const pane of playground.samples.all) pane.strip.draw(pane.strip.picked ?? null);
});
setUpKey(async () => {
  if (await loadServer()) playground.focusPrompt();
});

// -------------------------------------------------------------------------------------------------- server

async function loadServer() {
  try {
    playground.setServer(await getJSON("version"));
    const models = await getJSON("v1/models");
    $("model").textContent = models.data[0]?.id ?? "";
    return true;
  } catch {
    return false; // A 401 has opened the field for the key; everything else shows in the health sign.
  }
}

async function checkHealth() {
  let [state, words] = ["good", "ready"];
  try {
    // A server that takes the connection and does not answer is as good as gone.
    await getText("health", { signal: AbortSignal.timeout(HEALTH_TIMEOUT), cache: "no-store" });
  } catch (error) {
    [state, words] = error.status === 503 ? ["bad", error.message] : ["bad", "not reachable"];
  }
  showHealth(state, words);
}

function showHealth(state, words) {
  const sign = $("health");
  const before = sign.dataset.state;
  if (sign.textContent !== words) sign.textContent = words;
  sign.dataset.state = state;
  if (before === "bad" && state === "good") loadServer();
}

const HEALTH_TIMEOUT = 3000;

async function watchHealth() {
  for (;;) {
    if (!document.hidden) await checkHealth();
    await new Promise((resolve) => setTimeout(resolve, 5000));
  }
}

// What the sign says is not older than what can be seen: who comes back to the tab, or sees a request fail, sees it, too.
document.addEventListener("visibilitychange", () => document.hidden || checkHealth());
whenUnreachable(() => showHealth("bad", "not reachable"));

// ----------------------------------------------------------------------------------------------- shortcuts

$("help-button").addEventListener("click", () => $("help").showModal());
document.addEventListener("keydown", (event) => {
  const typing = event.target.closest?.("input, textarea, select");
  if ((event.ctrlKey || event.metaKey) && event.key === "Enter") {
    showTab("playground");
    playground.run();
  } else if (event.key === "Escape" && !$("help").open) {
    hideTip();
    playground.stop();
  } else if (event.altKey && (event.code === "Digit1" || event.code === "Digit2")) {
    showTab(TABS[event.code === "Digit1" ? 0 : 1]);
  } else if (event.altKey && event.code === "KeyP") {
    showTab("playground");
    playground.focusPrompt();
  } else if (event.altKey && event.code === "KeyO") {
    showTab("playground");
    playground.focusOutput();
  } else if (event.key === "?" && !typing) {
    $("help").showModal();
  } else {
    return;
  }
  event.preventDefault();
});
if (/Mac|iPhone|iPad/.test(navigator.platform)) {
  $("run").querySelector("kbd").textContent = "⌘ ↵";
}

setUpTips();
describeFields(document);
restoreKey();
loadServer();
watchHealth();
document.documentElement.dataset.ready = "true";
