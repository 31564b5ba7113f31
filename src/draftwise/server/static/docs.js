// The interface as openapi.json describes it: endpoints, their fields, and a form to try each.

import { getJSON, open, restoreKey } from "./api.js";
import { $, duration, el } from "./dom.js";
import { setUpKey, setUpTheme } from "./frame.js";
import { fieldsOf, filled, operationsOf, pretty } from "./schema.js";

const SHOWN = 200_000; // characters of an answer: more would only make the page slow

// ------------------------------------------------------------------------------------------------- reading

function table(head, rows) {
  return el(
    "div",
    { class: "table", tabindex: "0", role: "group", "aria-label": head.join(", ") },
    el(
      "table",
      { class: "fields" },
      el("thead", {}, el("tr", {}, ...head.map((word) => el("th", { scope: "col" }, word)))),
      el("tbody", {}, ...rows.map((cells) => el("tr", {}, ...cells.map((cell) => el("td", {}, ...cell))))),
    ),
  );
}

function fieldTable(schema) {
  const rows = fieldsOf(schema).map((field) => [
    [el("code", {}, field.name), ...(field.required ? [" ", el("span", { class: "must" }, "required")] : [])],
    [field.type],
    field.initial ? [el("code", {}, field.initial)] : [],
    [field.text],
  ]);
  return table(["Field", "Type", "Default", ""], rows);
}

function responseTable(responses) {
  return table(["Status", ""], responses.map(([code, { description }]) => [[el("code", {}, code)], [description]]));
}

// -------------------------------------------------------------------------------------------------- trying

function tryForm(operation, id) {
  const inputs = Object.fromEntries(
    operation.parameters.map(({ name }) => [name, el("input", { id: `${id}-${name}`, spellcheck: "false", required: "" })]),
  );
  const body = operation.schema && el("textarea", { id: `${id}-body`, rows: "8", spellcheck: "false" });
  if (body) body.value = JSON.stringify(operation.example ?? {}, null, 2);
  const send = el("button", { class: "primary", type: "submit" }, "Send ", el("kbd", {}, "Ctrl ↵"));
  const stop = el("button", { class: "secondary", type: "button", disabled: "" }, "Stop");
  const state = el("span", { class: "state", role: "status" });
  const answer = el("pre", { class: "answer", tabindex: "0", "aria-label": "Answer", hidden: "" });
  const form = el(
    "form",
    { class: "try", autocomplete: "off" },
    ...Object.entries(inputs).map(([name, input]) => el("label", {}, name, input)),
    ...(body ? [el("label", { class: "label", for: body.id }, "Body"), body] : []),
    el("div", { class: "actions" }, send, stop, state),
    answer,
  );
  let running = null;
  stop.addEventListener("click", () => running?.abort());
  form.addEventListener("keydown", (event) => {
    if ((event.ctrlKey || event.metaKey) && event.key === "Enter") form.requestSubmit();
    else if (event.key === "Escape") running?.abort();
    else return;
    event.preventDefault();
  });
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (running) return;
    running = new AbortController();
    [send.disabled, stop.disabled] = [true, false];
    const path = filled(operation.path, Object.fromEntries(Object.entries(inputs).map(([k, i]) => [k, i.value])));
    await exchange(operation.method, path, body?.value, running.signal, state, answer);
    running = null;
    [send.disabled, stop.disabled] = [false, true];
  });
  return form;
}

/** Send, and show what comes while it comes. Never throws. */
async function exchange(method, path, body, signal, state, answer) {
  const started = performance.now();
  const say = (words, good) => {
    state.textContent = words;
    state.dataset.state = good ? "good" : "bad";
  };
  answer.hidden = false;
  answer.textContent = "";
  say("…", true);
  let text = "";
  try {
    const headers = body === undefined ? {} : { "content-type": "application/json" };
    const response = await open(path, { method, headers, body, signal });
    const decoder = new TextDecoder();
    const reader = response.body?.getReader();
    for (let part = await reader?.read(); part && !part.done; part = await reader.read()) {
      const more = decoder.decode(part.value, { stream: true });
      if (text.length < SHOWN) answer.append(more);
      text += more;
    }
    const json = (response.headers.get("content-type") ?? "").startsWith("application/json");
    const shown = json ? pretty(text) : text;
    answer.textContent = shown.length > SHOWN ? `${shown.slice(0, SHOWN)}\n… ${text.length} characters in all` : shown;
    answer.hidden = shown === "";
    say(`${response.status} after ${duration((performance.now() - started) / 1000)}`, response.ok);
  } catch (error) {
    say(error.name === "AbortError" ? "stopped" : error.message, false);
    answer.hidden = text === "";
  }
}

// ---------------------------------------------------------------------------------------------------- page

function endpoint(operation, index) {
  const id = `op${index}`;
  const node = el(
    "details",
    { class: "endpoint", id },
    el(
      "summary",
      {},
      el("span", { class: "verb" }, operation.method),
      el("span", { class: "path" }, operation.path),
      el("span", { class: "says" }, operation.summary),
    ),
  );
  // Made when it is opened: most are only passed by.
  node.addEventListener("toggle", () => {
    if (!node.open || node.children.length > 1) return;
    const parts = [el("section", {}, el("h2", {}, "Try it"), tryForm(operation, id))];
    if (operation.schema) parts.push(el("section", {}, el("h2", {}, "Fields"), fieldTable(operation.schema)));
    parts.push(el("section", {}, el("h2", {}, "Answers"), responseTable(operation.responses)));
    node.append(el("div", { class: "endpoint-body" }, ...parts));
  });
  return node;
}

/** What one request may ask for, and what a client may send: the server's own values. */
function limits(rows) {
  const shown = rows.map(({ name, value, text, answer, option }) => [
    [el("code", {}, name)],
    [value === null ? "none" : value.toLocaleString("en")],
    [text],
    [answer],
    [el("code", {}, option)],
  ]);
  return el(
    "details",
    { class: "limits" },
    el("summary", {}, el("span", { class: "path" }, "Limits"), el("span", { class: "says" }, "Their values here, and what says so")),
    el("div", { class: "endpoint-body" }, table(["Limit", "Value", "Of", "Answer", "Option"], shown)),
  );
}

async function load() {
  try {
    const document = await getJSON("openapi.json");
    $("version").textContent = document.info.version;
    $("endpoints").replaceChildren(...operationsOf(document).map(endpoint));
    $("limits").replaceChildren(limits(document["x-limits"]));
    $("problem").hidden = true;
  } catch (error) {
    $("problem").textContent = error.message;
    $("problem").hidden = error.status === 401; // the field for the key says it
  }
}

setUpTheme(() => {});
setUpKey(load);
restoreKey();
load();
document.documentElement.dataset.ready = "true";
