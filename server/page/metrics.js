// Prometheus text as numbers.

/** Samples by name without the prefix, which is what stands before "build_info". */
export function parseMetrics(text) {
  const samples = [];
  for (const line of text.split("\n")) {
    const match = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$/.exec(line);
    if (!match) continue;
    const labels = Object.fromEntries([...(match[2] ?? "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)].map((found) => [found[1], found[2]]));
    samples.push({ name: match[1], labels, value: Number(match[3]) });
  }
  const prefix = samples.find((sample) => sample.name.endsWith("build_info"))?.name.slice(0, -"build_info".length) ?? "";
  const byName = new Map();
  for (const sample of samples) {
    if (!sample.name.startsWith(prefix)) continue;
    const name = sample.name.slice(prefix.length);
    byName.set(name, [...(byName.get(name) ?? []), sample]);
  }
  return new Samples(byName);
}

class Samples {
  constructor(byName) {
    this.byName = byName;
  }

  /** Sum over all labels; 0 where there is no sample yet. */
  total(name) {
    return (this.byName.get(name) ?? []).reduce((sum, sample) => sum + sample.value, 0);
  }

  /** Sums by one label. */
  by(name, label) {
    const sums = {};
    for (const { labels, value } of this.byName.get(name) ?? []) sums[labels[label]] = (sums[labels[label]] ?? 0) + value;
    return sums;
  }

  /** The mean over the workers of what each has; null where there is no sample yet. */
  perWorker(sum) {
    return sum == null ? null : sum / Math.max(1, this.total("worker_ready"));
  }
}
