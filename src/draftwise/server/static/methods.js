// Colours and words for methods and for where tokens came from.

const KNOWN = ["draft_model", "ngram", "suffix", "eagle", "eagle3", "medusa", "mtp", "early_exit", "hybrid", "synthetic", "grammar"];

/** Mark an element with a method, so that the style sheet gives it the method's colour. */
export function paint(node, method, position = 0) {
  node.setAttribute("data-method", KNOWN.includes(method) ? method : "other");
  node.setAttribute("data-depth", Math.min(position, 7));
}

export const SOURCES = {
  draft: "accepted draft",
  recovered: "target's own, in place of a rejected draft",
  bonus: "target's own, after a draft accepted to its end",
  target: "target's own, nothing was drafted",
};

export const RULES = [
  ["", "default"],
  ["rejection", "rejection"],
  ["block", "block"],
  ["coupled", "coupled"],
  ["typical", "typical (lossy)"],
  ["greedy", "greedy"],
];
