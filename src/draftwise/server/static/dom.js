// Small helpers. Text from the server only ever becomes text nodes and attribute values, never markup.

export const $ = (id) => document.getElementById(id);

/** An element with attributes and children. `class`, `dataset`-like and aria names are set as attributes. */
export function el(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

export function svg(name, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
}

function fill(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) node.setAttribute(key, value);
  }
  node.append(...children);
  return node;
}

/** What this browser remembers under a name; null: nothing. */
export function recall(name) {
  try {
    return JSON.parse(localStorage.getItem(name) ?? "null");
  } catch {
    return null;
  }
}

/** Remember something; where storage is off, nothing is. */
export function remember(name, value) {
  try {
    localStorage.setItem(name, JSON.stringify(value));
  } catch {
    // A convenience.
  }
}

/** Text of a token made visible: spaces, line breaks and tabs have signs. */
export function visible(text) {
  return text.replaceAll(" ", "␣").replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll("\r", "␍");
}

/** A token as it stands in a sentence. */
export function quoted(text) {
  return `“${text.replaceAll("\n", "↵").replaceAll("\t", "⇥")}”`;
}

export const percent = (share) => `${Math.round(share * 100)} %`;

/** Seconds in a unit that fits. Examples: 0.0123 is "12 ms", 2.5 is "2.5 s". */
export function duration(seconds) {
  if (seconds < 0.00995) return `${(seconds * 1000).toFixed(1)} ms`;
  if (seconds < 0.9995) return `${Math.round(seconds * 1000)} ms`;
  return `${seconds < 9.95 ? seconds.toFixed(1) : Math.round(seconds)} s`;
}

/** A count or an average of counts: no needless zeros. Examples: 2, 2.5, 130. */
export const count = (value) => short(value).replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "");

/** A number with three digits or so. Examples: 0.034, 2.31, 48.2, 1,204, 1.2 M. */
export function short(value) {
  if (value >= 1e6) return `${(value / 1e6).toFixed(1)} M`;
  if (value >= 100) return Math.round(value).toLocaleString("en");
  if (value >= 10) return value.toFixed(1);
  if (value >= 0.1 || value === 0) return value.toFixed(2);
  return value.toPrecision(2);
}
