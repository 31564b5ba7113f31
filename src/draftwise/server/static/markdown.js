// Markdown as elements. Text only ever becomes text nodes: markup in it stays text, and links lead to the web alone.
//
// What models write: headings, paragraphs, lists, code, quotes, rules, tables; bold, italic, struck out, code, links.
// Every pass over the text is linear: it comes from a model, and is read again while it grows.

import { el } from "./dom.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`\s]*)/;
const INDENTED = /^ {4,}\S/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*)$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const DIVIDER = /^ *\|?(?: *:?-{1,}:? *\|)+(?: *:?-{1,}:? *)?\|? *$/;
const DEEPEST = 8; // lists and quotes inside one another

/** The elements of a text. Example: "# A\n*b*" is <h3>A</h3><p><em>b</em></p>. */
export function markdown(text) {
  return blocks(text.replaceAll("\r\n", "\n").split("\n"), 0);
}

function blocks(lines, depth) {
  const out = document.createDocumentFragment();
  let i = 0;
  while (i < lines.length) {
    const line = lines[i];
    if (!line.trim()) {
      i++;
      continue;
    }
    const fence = FENCE.exec(line);
    if (fence) {
      const body = [];
      i++;
      while (i < lines.length && !closes(lines[i], fence[1])) body.push(lines[i++]);
      i++;
      out.append(code(body.join("\n"), fence[2]));
      continue;
    }
    if (INDENTED.test(line)) {
      const body = [];
      while (i < lines.length && (INDENTED.test(lines[i]) || !lines[i].trim())) body.push(lines[i++].slice(4));
      while (!body.at(-1).trim()) body.pop();
      out.append(code(body.join("\n"), ""));
      continue;
    }
    const heading = HEADING.exec(line);
    if (heading) {
      // The page has its own first and second level; most answers begin with the second.
      out.append(el(`h${Math.min(6, Math.max(3, heading[1].length + 1))}`, {}, ...inline(heading[2].replace(/\s+#+\s*$/, ""))));
      i++;
      continue;
    }
    if (RULE.test(line)) {
      out.append(el("hr"));
      i++;
      continue;
    }
    if (depth < DEEPEST && QUOTE.test(line)) {
      const body = [];
      while (i < lines.length && QUOTE.test(lines[i])) body.push(QUOTE.exec(lines[i++])[1]);
      out.append(el("blockquote", {}, blocks(body, depth + 1)));
      continue;
    }
    if (depth < DEEPEST && ITEM.test(line)) {
      const [list, next] = listAt(lines, i, depth);
      out.append(list);
      i = next;
      continue;
    }
    if (line.includes("|") && i + 1 < lines.length && DIVIDER.test(lines[i + 1])) {
      const [table, next] = tableAt(lines, i);
      out.append(table);
      i = next;
      continue;
    }
    const body = [line];
    i++;
    while (i < lines.length && lines[i].trim() && !opens(lines[i])) body.push(lines[i++]);
    out.append(el("p", {}, ...inline(body.join("\n"))));
  }
  return out;
}

const closes = (line, fence) => line.trim().startsWith(fence) && line.trim() === fence[0].repeat(line.trim().length);
const opens = (line) => [FENCE, HEADING, RULE, QUOTE, ITEM].some((pattern) => pattern.test(line));

function code(text, language) {
  const copy = el("button", { type: "button", class: "ghost small copy-code" }, "Copy");
  copy.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text);
      copy.textContent = "Copied";
    } catch {
      copy.textContent = "Not allowed";
    }
    setTimeout(() => (copy.textContent = "Copy"), 1200);
  });
  const head = el("div", { class: "code-head" }, el("span", {}, language || "code"), copy);
  return el("div", { class: "code" }, head, el("pre", { tabindex: "0" }, el("code", {}, text)));
}

/** [list, line behind it]. Lines that stand deeper than the first item's mark belong to an item. */
function listAt(lines, start, depth) {
  const [, indent, mark] = ITEM.exec(lines[start]);
  const ordered = /\d/.test(mark);
  const first = Number.parseInt(mark, 10);
  const list = el(ordered ? "ol" : "ul", ordered && first !== 1 ? { start: first } : {});
  let i = start;
  while (i < lines.length) {
    const item = ITEM.exec(lines[i]);
    if (!item || item[1].length > indent.length + 1 || item[1].length < indent.length) break;
    if (/\d/.test(item[2]) !== ordered) break;
    const body = [item[3]];
    const inner = item[1].length + item[2].length + 1;
    i++;
    while (i < lines.length) {
      const line = lines[i];
      const deep = line.length - line.trimStart().length;
      if (line.trim() && deep <= indent.length && (opens(line) || !lines[i - 1].trim())) break;
      if (!line.trim() && !(lines[i + 1] ?? "").startsWith(" ".repeat(indent.length + 2))) {
        i++;
        break;
      }
      body.push(line.slice(Math.min(deep, inner)));
      i++;
    }
    const parts = blocks(body, depth + 1);
    // A single paragraph needs no space around it.
    const only = parts.childNodes.length && parts.firstChild.nodeName === "P" ? parts.firstChild : null;
    if (only) only.replaceWith(...only.childNodes);
    list.append(el("li", {}, parts));
    while (i < lines.length && !lines[i].trim() && ITEM.test(lines[i + 1] ?? "")) i++;
  }
  return [list, i];
}

function tableAt(lines, start) {
  const cells = (line) => line.trim().replace(/^\|/, "").replace(/\|$/, "").split("|").map((cell) => cell.trim());
  const heads = cells(lines[start]);
  const head = el("tr", {}, ...heads.map((cell) => el("th", { scope: "col" }, ...inline(cell))));
  const body = el("tbody");
  let i = start + 2;
  for (; i < lines.length && lines[i].includes("|") && lines[i].trim(); i++) {
    const row = cells(lines[i]);
    body.append(el("tr", {}, ...heads.map((_, at) => el("td", {}, ...inline(row[at] ?? "")))));
  }
  const table = el("table", {}, el("thead", {}, head), body);
  return [el("div", { class: "table", tabindex: "0" }, table), i];
}

const SPECIAL = /[\\`*_~[]/g;
const MARKS = [["**", "strong"], ["__", "strong"], ["~~", "del"], ["*", "em"], ["_", "em"]];
const MOST_MARKS = 2000; // of one paragraph; behind these everything is plain

/** Nodes of a line of text. Example: "a **b** `c`" is "a ", <strong>b</strong>, " ", <code>c</code>. */
function inline(text, budget = { left: MOST_MARKS }) {
  const out = [];
  let plain = "";
  const say = (node) => {
    if (plain) out.push(plain);
    plain = "";
    out.push(node);
  };
  let i = 0;
  while (i < text.length) {
    SPECIAL.lastIndex = i;
    const found = budget.left > 0 ? SPECIAL.exec(text) : null;
    if (!found) break;
    plain += text.slice(i, found.index);
    i = found.index;
    budget.left--;
    const [node, next] = piece(text, i, budget);
    if (node === null) plain += text[i++];
    else {
      if (typeof node === "string") plain += node;
      else say(node);
      i = next;
    }
  }
  plain += text.slice(i);
  if (plain) out.push(plain);
  return out;
}

/** [node or text that begins at i, what comes behind it]; [null, i]: the character stands for itself. */
function piece(text, i, budget) {
  const char = text[i];
  if (char === "\\") return /[!-/:-@[-`{-~]/.test(text[i + 1] ?? "") ? [text[i + 1], i + 2] : [null, i];
  if (char === "`") {
    let run = 1;
    while (text[i + run] === "`") run++;
    const fence = "`".repeat(run);
    const end = text.indexOf(fence, i + run);
    if (end < 0) return [fence, i + run];
    return [el("code", {}, text.slice(i + run, end).replace(/^ (.*) $/s, "$1")), end + run];
  }
  if (char === "[") return link(text, i, budget);
  for (const [mark, name] of MARKS) {
    if (!text.startsWith(mark, i)) continue;
    const from = i + mark.length;
    if (!text[from] || /\s/.test(text[from])) continue;
    if (mark[0] === "_" && /\w/.test(text[i - 1] ?? "")) continue; // snake_case is no emphasis
    const end = text.indexOf(mark, from + 1);
    if (end < 0 || /\s/.test(text[end - 1])) continue;
    if (mark[0] === "_" && /\w/.test(text[end + mark.length] ?? "")) continue;
    return [el(name, {}, ...inline(text.slice(from, end), budget)), end + mark.length];
  }
  return [null, i];
}

function link(text, i, budget) {
  const middle = text.indexOf("](", i);
  if (middle < 0 || middle - i > 500) return [null, i];
  const end = text.indexOf(")", middle);
  if (end < 0 || end - middle > 2000) return [null, i];
  const target = text.slice(middle + 2, end).trim().split(/\s/)[0];
  let url;
  try {
    url = new URL(target);
  } catch {
    return [null, i];
  }
  if (!["http:", "https:", "mailto:"].includes(url.protocol)) return [null, i];
  const more = { href: url.href, target: "_blank", rel: "noopener noreferrer nofollow" };
  return [el("a", more, ...inline(text.slice(i + 1, middle), budget)), end + 1];
}
