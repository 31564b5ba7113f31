// Prompts and questions to begin with, as chips.

import { el } from "./dom.js";

/** Of code, which the model that ships has read. */
export const PROMPTS = [
  ["A function", 'import os\n\n\ndef read_lines(path):\n    """Return the lines of a file."""\n    with open(path'],
  ["A class", 'class Queue:\n    """A queue of limited size."""\n\n    def __init__(self, maxsize=0):\n        self.maxsize ='],
  ["A test", "import unittest\n\n\nclass TestParser(unittest.TestCase):\n    def test_empty(self):\n        self.assert"],
  ["Imports", "import argparse\nimport json\nimport os\nimport"],
];
export const QUESTIONS = [
  ["Explain", "What is a generator in Python? Explain it in three sentences."],
  ["Write code", "Write a function that counts the words of a text."],
  ["A table", "Compare lists, tuples and sets in a table."],
];

/** A chip for each of `examples`, [name, text]; `use(text)` is called with the one that was chosen. */
export function chips(holder, examples, use) {
  for (const [name, text] of examples) {
    const chip = el("button", { type: "button", class: "chip" }, name);
    chip.addEventListener("click", () => use(text));
    holder.append(chip);
  }
}
