// Reading Prometheus' text form, and what can be computed from two readings.

/**
 * Samples of an exposition: name -> list of {labels, value}, the prefix taken off (--metrics-prefix says which).
 * Example: 'draftwise:x_total{position="0"} 3' is {x_total: [{labels: {position: "0"}, value: 3}]}.
 */
export function parse(text) {
  const samples = new Map();
  for (const line of text.split("\n")) {
    const match = /^\w+:([^\s{]+)(?:\{(.*)\})?\s+(\S+)/.exec(line);
    if (!match) continue;
    const name = match[1];
    const labels = {};
    for (const [, key, value] of (match[2] ?? "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)) {
      labels[key] = value.replace(/\\(.)/g, (_, c) => (c === "n" ? "\n" : c));
    }
    const value = match[3] === "+Inf" ? Infinity : Number(match[3]);
    if (!samples.has(name)) samples.set(name, []);
    samples.get(name).push({ labels, value });
  }
  return samples;
}

/** Pairs as a Map, in which the values of equal keys (those of several replicas) are added up. */
function summed(pairs) {
  const sums = new Map();
  for (const [key, value] of pairs) sums.set(key, (sums.get(key) ?? 0) + value);
  return sums;
}

/** One scrape of /metrics at a time (seconds). */
export class Reading {
  constructor(text, time) {
    this.samples = parse(text);
    this.time = time;
  }

  /** The sum over replicas, of which there may be one. */
  value(name) {
    return (this.samples.get(name) ?? []).reduce((sum, { value }) => sum + value, 0);
  }

  /** The mean over replicas. */
  mean(name) {
    return this.value(name) / Math.max(this.samples.get(name)?.length ?? 0, 1);
  }

  /** The largest of a name's samples; null if there is none. */
  most(name) {
    const samples = this.samples.get(name) ?? [];
    return samples.length ? Math.max(...samples.map(({ value }) => value)) : null;
  }

  /** All samples of a name together; null if there is none. */
  sum(name) {
    const samples = this.samples.get(name) ?? [];
    return samples.length ? samples.reduce((sum, { value }) => sum + value, 0) : null;
  }

  /** Values by a label. Example: by("spec_decode_request_steps_total", "method") is Map {"ngram" => 12}. */
  by(name, label) {
    return summed((this.samples.get(name) ?? []).map(({ labels, value }) => [labels[label], value]));
  }

  /** A histogram: bounds that rise, and how many observations lie at or below each. */
  histogram(name) {
    const buckets = (this.samples.get(`${name}_bucket`) ?? []).map(({ labels, value }) => [
      labels.le === "+Inf" ? Infinity : Number(labels.le),
      value,
    ]);
    return [...summed(buckets)].sort((a, b) => a[0] - b[0]);
  }
}

/** What happened from one reading to a later one. */
export class Change {
  constructor(before, after) {
    this.before = before;
    this.after = after;
    this.seconds = after.time - before.time;
  }

  delta(name) {
    // A server that started again counts from zero.
    const change = this.after.value(name) - this.before.value(name);
    return change < 0 ? this.after.value(name) : change;
  }

  rate(name) {
    return this.seconds > 0 ? this.delta(name) / this.seconds : null;
  }

  ratio(part, whole) {
    const n = this.delta(whole);
    return n > 0 ? this.delta(part) / n : null;
  }

  deltaBy(name, label) {
    const before = this.before.by(name, label);
    return new Map([...this.after.by(name, label)].map(([key, value]) => {
      const change = value - (before.get(key) ?? 0);
      return [key, change < 0 ? value : change];
    }));
  }

  /**
   * The value below which a share of the observations lies, linear within a bucket as Prometheus does; null: there
   * were none. Example: 10 observations in (0, 1], 10 in (1, 2]: the quantile of 0.75 is 1.5.
   */
  quantile(name, share) {
    const before = new Map(this.before.histogram(name));
    const counts = this.after.histogram(name).map(([bound, n]) => [bound, n - (before.get(bound) ?? 0)]);
    const total = counts.at(-1)?.[1] ?? 0;
    if (total <= 0) return null;
    const rank = share * total;
    let [low, below] = [0, 0];
    for (const [bound, n] of counts) {
      if (n >= rank) return bound === Infinity ? low : low + ((bound - low) * (rank - below)) / Math.max(n - below, 1e-9);
      [low, below] = [bound, n];
    }
    return low;
  }
}
