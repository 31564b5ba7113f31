// Which piece of the streamed text each token wrote.
//
// The server streams text and tokens side by side. A token's own text does not always stand in the text as it is:
// several tokens may make one character (each alone decodes to U+FFFD), some tokenizers drop a leading space, special
// tokens are left out, and text is held back while it could begin a stop string. The aligner walks both in step.

const BROKEN = "\uFFFD";
const LOOK_AHEAD = 12; // characters that a tokenizer's clean-up may have put before a token

export class Aligner {
  /** @param {(token: object|null, text: string) => void} emit called once per token, in order; null: text of no token */
  constructor(emit) {
    this.emit = emit;
    this.rest = ""; // text that no token was found for yet
    this.queue = []; // tokens without their text yet; each has `text`
  }

  /** More text and more tokens. Example: push("é", [{text: "\uFFFD"}, {text: "\uFFFD"}]) emits "" and "é". */
  push(text, tokens) {
    this.rest += text;
    this.queue.push(...tokens);
    this.#settle(false);
  }

  /** Nothing more comes: tokens that are left wrote nothing, text that is left belongs to none. */
  finish() {
    this.#settle(true);
    for (const token of this.queue.splice(0)) this.emit(token, "");
    if (this.rest) this.emit(null, this.rest);
    this.rest = "";
  }

  #settle(final) {
    while (this.queue.length) {
      const token = this.queue[0];
      if (token.text.includes(BROKEN) && !this.rest.startsWith(token.text)) {
        if (!this.#settleBroken(final)) return;
        continue;
      }
      const length = this.#match(token.text);
      if (length < 0) {
        // The beginning of the token is there, or nothing is: the rest of it is held back.
        if (!final && (!this.rest || token.text.startsWith(this.rest))) return;
        if (final && token.text.startsWith(this.rest)) this.#take(this.rest.length); // cut by a stop string
        else this.#take(0);
      } else {
        this.#take(length);
      }
    }
  }

  /** Length of text that belongs to a token's text, -1: it is not there. */
  #match(text) {
    const rest = this.rest;
    if (rest.startsWith(text)) return text.length;
    if (text.startsWith(" ") && text.length > 1 && rest.startsWith(text.slice(1))) return text.length - 1;
    const at = text.trim() ? rest.slice(0, LOOK_AHEAD + text.length).indexOf(text) : -1;
    return at < 0 ? -1 : at + text.length;
  }

  #take(length) {
    this.emit(this.queue.shift(), this.rest.slice(0, length));
    this.rest = this.rest.slice(length);
  }

  /** A run of tokens that are parts of characters: spread what they made over them. False: wait for more. */
  #settleBroken(final) {
    let run = 1;
    while (run < this.queue.length && this.queue[run].text.includes(BROKEN)) run++;
    if (!final && !this.rest) return false;
    let made = this.rest;
    if (run < this.queue.length) {
      const at = this.rest.indexOf(this.queue[run].text);
      if (at < 0 && !final) return false;
      if (at >= 0) made = this.rest.slice(0, at);
    }
    // k characters over m tokens, the last token of a character gets it: token i has those from i*k/m to (i+1)*k/m.
    const characters = Array.from(made);
    for (let i = 0; i < run; i++) {
      const from = Math.floor((i * characters.length) / run);
      const to = Math.floor(((i + 1) * characters.length) / run);
      this.emit(this.queue[i], characters.slice(from, to).join(""));
    }
    this.queue.splice(0, run);
    this.rest = this.rest.slice(made.length);
    return true;
  }
}
