// The draft tree of one step as a picture: what was committed runs along the top, what was rejected hangs below.

import { quoted, svg, visible } from "./dom.js";
import { paint, SOURCES } from "./methods.js";

const ROW = 32;
const BOX = 24;
const GAP = 30;
const CHARACTER = 7.3; // width of one, in px, at the font size of the style sheet
const LONGEST = 16;

/**
 * Places of the nodes: `{row, column}` each, and the number of rows and columns. The root stands at column 0; the child
 * that was committed comes first in its parent's row, every other child opens a row of its own below.
 *
 * Example: parents [-1, -1, 0], committed {1}: node 1 has row 0, node 0 row 1, node 2 row 1 (its parent's).
 */
export function layout(parents, committed) {
  const children = new Map();
  parents.forEach((parent, i) => {
    if (!children.has(parent)) children.set(parent, []);
    children.get(parent).push(i);
  });
  const places = parents.map(() => null);
  let rows = 1;
  let columns = 1;
  const place = (parent, row, column) => {
    const below = [...(children.get(parent) ?? [])].sort((a, b) => committed.has(b) - committed.has(a));
    below.forEach((node, rank) => {
      // The first child goes on in its parent's row.
      const at = rank === 0 ? row : rows++;
      places[node] = { row: at, column: column + 1 };
      columns = Math.max(columns, column + 2);
      place(node, at, column + 1);
    });
  };
  place(-1, 0, 0);
  return { places, rows, columns };
}

/** Nodes of a step's picture: the drafts, then the target's own token where the accepted path ends. */
function nodesOf(step) {
  const accepted = new Set(step.accepted);
  const nodes = step.draft.map((node, i) => ({
    text: node.text,
    parent: node.parent,
    kind: accepted.has(i) ? "draft" : "rejected",
  }));
  for (const token of step.tokens.slice(step.accepted.length)) {
    nodes.push({ text: token.text, parent: step.accepted.at(-1) ?? -1, kind: token.source });
  }
  return nodes;
}

const shown = (text) => {
  const signs = Array.from(visible(text));
  return signs.length > LONGEST ? signs.slice(0, LONGEST - 1).join("") + "…" : signs.join("");
};

/** An SVG of the step; `before` is the text of the token that it went on from. */
export function drawTree(step, before) {
  const nodes = nodesOf(step);
  const committed = new Set(nodes.flatMap((node, i) => (node.kind === "rejected" ? [] : [i])));
  const { places, rows, columns } = layout(nodes.map((node) => node.parent), committed);
  const labels = nodes.map((node) => shown(node.text));
  const widths = new Array(columns).fill(0);
  const width = (label) => Math.max(28, Math.ceil(Array.from(label).length * CHARACTER) + 16);
  const root = shown(before) || "start";
  widths[0] = width(root);
  labels.forEach((label, i) => {
    widths[places[i].column] = Math.max(widths[places[i].column], width(label));
  });
  const x = [];
  let right = 2;
  for (const columnWidth of widths) {
    x.push(right);
    right += columnWidth + GAP;
  }
  const picture = svg("svg", {
    width: right - GAP + 2,
    height: rows * ROW,
    viewBox: `0 0 ${right - GAP + 2} ${rows * ROW}`,
    role: "img",
    "aria-label": describe(step),
  });
  const middle = (row) => row * ROW + ROW / 2;
  const box = (label, column, row, kind, title, position) => {
    const group = svg("g", { class: `node ${kind}` });
    paint(group, step.method, position);
    const boxWidth = width(label);
    const frame = { x: x[column], y: middle(row) - BOX / 2, width: boxWidth, height: BOX, rx: 5 };
    const text = svg("text", { x: x[column] + boxWidth / 2, y: middle(row) + 4.5, "text-anchor": "middle" }, label);
    group.append(svg("title", {}, title), svg("rect", frame), text);
    return group;
  };
  const edges = svg("g");
  const boxes = svg("g");
  boxes.append(box(root, 0, 0, "root", "the token before the step"));
  nodes.forEach((node, i) => {
    const { row, column } = places[i];
    const from = node.parent < 0 ? { row: 0, column: 0 } : places[node.parent];
    const startX = x[from.column] + width(node.parent < 0 ? root : labels[node.parent]);
    const [y1, y2, endX] = [middle(from.row), middle(row), x[column]];
    const bend = endX - GAP / 2;
    const path = y1 === y2 ? `M${startX} ${y1}H${endX}` : `M${startX} ${y1}H${bend - 8}Q${bend} ${y1} ${bend} ${y1 + 8}V${y2 - 8}Q${bend} ${y2} ${bend + 8} ${y2}H${endX}`;
    const edge = svg("path", { d: path, class: `edge ${node.kind}` });
    paint(edge, step.method);
    edges.append(edge);
    const what = node.kind === "rejected" ? "rejected draft" : SOURCES[node.kind];
    boxes.append(box(labels[i], column, row, node.kind, `${quoted(node.text)}: ${what}`, column - 1));
  });
  picture.append(edges, boxes);
  return picture;
}

/** A step in words. Every picture has this beside it. */
export function describe(step) {
  const accepted = step.accepted.length;
  const own = step.tokens[accepted];
  if (!step.draft.length) {
    return own ? `Nothing was drafted; the target wrote ${quoted(own.text)}.` : "Nothing was drafted.";
  }
  const chain = step.draft.every((node, i) => node.parent === i - 1);
  const what = step.draft.length === 1 ? "one token" : `${step.draft.length} tokens`;
  const parts = [`${step.method} drafted ${what}${chain ? "" : " in a tree"}`];
  if (accepted === 0) parts.push("none was accepted");
  else if (accepted === step.draft.length) parts.push(accepted === 1 ? "it was accepted" : "all were accepted");
  else parts.push(`${accepted} accepted`);
  if (own) {
    const last = step.accepted.at(-1) ?? -1;
    const refused = step.draft.filter((node) => node.parent === last).map((node) => quoted(node.text));
    const instead = refused.length === 1 ? ` in place of ${refused[0]}` : refused.length ? ` in place of ${refused.length} others` : " on top";
    parts.push(`the target wrote ${quoted(own.text)}${instead}`);
  }
  return `${parts.join("; ")}.`;
}
