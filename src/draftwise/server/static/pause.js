// Why nothing is drafted, instead of silence.

import { getText } from "./api.js";
import { parse } from "./metrics.js";

const ENOUGH = 8; // steps without a draft, before anybody asks why

/** Steps without drafts have a reason, and the server knows it: what its controller drafts now is in its metrics. */
export async function explainPause(pane, settings) {
  const method = settings.field("method").value;
  const idle = pane.idleSteps();
  if (!method || method === "none" || idle < ENOUGH) return;
  const steps = pane.steps;
  let length = null;
  try {
    const lengths = parse(await getText("metrics")).get("spec_decode_draft_length") ?? [];
    const own = lengths.filter(({ labels }) => labels.method === method).map(({ value }) => value);
    length = own.length ? Math.max(...own) : null;
  } catch {
    // Without metrics there is less to say.
  }
  if (pane.steps !== steps) return; // another run has begun
  const where = idle === steps.length ? "In this answer" : `In the last ${idle} steps`;
  const why =
    length === 0
      ? `the controller paused drafting with ${method}; it measured that plain decoding is faster now, and tries again from time to time`
      : `${method} found nothing to guess, or the controller paused it because guessing costs more than it gains`;
  pane.explainPause(`${where} nothing was drafted: ${why}.`);
}
