// A bar for every step, as high as the tokens it gave. Where bars are high, drafts were right.

import { KIND_COLOURS, methodColour } from "./colours.js";

export class Strip {
  constructor(canvas, onPick) {
    this.canvas = canvas;
    this.steps = [];
    canvas.addEventListener("click", (event) => {
      const i = Math.floor(((event.offsetX || 0) / canvas.clientWidth) * this.#slots());
      if (this.steps[i]) onPick(this.steps[i]);
    });
    new ResizeObserver(() => this.draw(this.picked ?? null)).observe(canvas);
  }

  reset(steps) {
    this.steps = steps;
    this.draw(null);
  }

  #slots() {
    return Math.max(this.steps.length, 48);
  }

  draw(picked) {
    this.picked = picked;
    const { canvas } = this;
    const ratio = devicePixelRatio || 1;
    const [width, height] = [canvas.clientWidth, canvas.clientHeight];
    if (!width) return;
    if (canvas.width !== Math.round(width * ratio)) canvas.width = Math.round(width * ratio);
    if (canvas.height !== Math.round(height * ratio)) canvas.height = Math.round(height * ratio);
    const context = canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    const slot = width / this.#slots();
    const gap = slot > 4 ? 1.5 : slot > 2 ? 0.5 : 0;
    const highest = Math.max(4, ...this.steps.map((step) => step.tokens.length));
    const unit = (height - 1) / highest;
    const line = KIND_COLOURS().line;
    context.fillStyle = line;
    context.fillRect(0, height - 1, width, 1);
    this.steps.forEach((step, i) => {
      const accepted = step.accepted.length;
      const own = step.tokens.length - accepted;
      context.globalAlpha = picked && picked !== step ? 0.6 : 1;
      context.fillStyle = KIND_COLOURS().own;
      context.fillRect(i * slot, height - own * unit, slot - gap, own * unit);
      if (accepted) {
        context.fillStyle = methodColour(step.method);
        context.fillRect(i * slot, height - (own + accepted) * unit, slot - gap, accepted * unit);
      }
    });
    context.globalAlpha = 1;
  }
}
