/* From a job's series to the arrays that a chart draws. Pure, so that tests can look at them. */
import type { EvaluationPoint, Job } from "../types";
import { ema } from "./ema";
import { count, loss, short } from "./format";
import { type Bucket, dataShare, mean, rate, type Series } from "./series";

export interface LossData {
  x: number[];
  raw: (number | null)[];
  smooth: (number | null)[];
  low: (number | null)[];
  high: (number | null)[];
  evaluationLoss: (number | null)[];
  evaluation: (number | null)[];
}

/** Arrays of the loss chart; on a logarithmic axis values at or below zero are left out. */
export function lossData(series: Series, beta: number, name: string | null, log: boolean): LossData {
  const { buckets } = series;
  const fit = (value: number | null) => (log && value !== null && value <= 0 ? null : value);
  const raw = buckets.map((bucket) => fit(mean(bucket)));
  return {
    x: buckets.map((bucket) => bucket.end),
    raw,
    smooth: beta > 0 ? ema(raw, beta, buckets.map((bucket) => Math.max(1, bucket.count))) : raw,
    low: buckets.map((bucket) => (bucket.count ? fit(bucket.min) : null)),
    high: buckets.map((bucket) => (bucket.count ? fit(bucket.max) : null)),
    evaluationLoss: at(buckets, series.evaluations, "loss").map(fit),
    evaluation: name ? at(buckets, series.evaluations, name) : buckets.map(() => null),
  };
}

/** Arrays of the throughput chart: samples per second as measured, and smoothed; and the share of the time spent waiting for data. */
export function rateData(series: Series): { x: number[]; raw: (number | null)[]; smooth: (number | null)[]; data: (number | null)[] } {
  const raw = series.buckets.map(rate);
  const weights = series.buckets.map((bucket) => bucket.rounds);
  return { x: series.buckets.map((bucket) => bucket.end), raw, smooth: ema(raw, 0.9, weights), data: series.buckets.map(dataShare) };
}

/** Numbers that a strategy tells, which have cards of their own, as clients' personal metrics have. */
const TOLD = new Set(["met", "primal", "dual", "primal_stop", "dual_stop", "penalty", "sampled", "replied", "dropped", "rejected", "void", "present"]);

/** The names of a job's metrics, of training and of evaluations, without the loss of training. */
export function metricNames(series: Series): string[] {
  const names = new Set<string>();
  for (const point of series.evaluations) for (const name of Object.keys(point.metrics)) names.add(name);
  for (const { told } of series.buckets) for (const name of Object.keys(told ?? {})) names.add(name);
  return [...names].filter((name) => !TOLD.has(name) && !name.startsWith("personal_"));
}

/** Arrays of a metric's chart: its values in training, of which a bucket has the newest, and in evaluations. */
export function metricData(series: Series, name: string): { x: number[]; training: (number | null)[]; evaluation: (number | null)[] } {
  const { buckets } = series;
  return {
    x: buckets.map((bucket) => bucket.end),
    training: buckets.map((bucket) => bucket.told?.[name] ?? null),
    evaluation: at(buckets, series.evaluations, name),
  };
}

/**
 * The metric that a job is best read by: accuracy, else the first that is no loss and whose name says which value is the
 * best, else the first of its evaluations that is no loss. What a loop logs is not all a measure: a gradient's norm is none.
 */
export function mainMetric(evaluations: readonly EvaluationPoint[], job: Job | null): string | null {
  const names = Object.keys(evaluations[evaluations.length - 1]?.metrics ?? job?.metrics ?? job?.progress?.metrics ?? {}).filter((name) => !/loss/i.test(name));
  return names.find((name) => name === "accuracy")
    ?? names.find((name) => job?.lowest?.[name] != null)
    ?? (job?.spec.run ? null : names[0] ?? null);
}

/** At most `rows` rows, evenly spread and with the last, as the chart's table. */
export function sampled<T>(items: readonly T[], rows: number): T[] {
  if (items.length <= rows) return [...items];
  const step = (items.length - 1) / (rows - 1);
  return Array.from({ length: rows }, (_, i) => items[Math.round(i * step)]!);
}

/** A column of the chart's table: its heading, and a bucket's value in it. */
export interface RoundColumn {
  head: string;
  cell: (bucket: Bucket) => string;
}

/** The columns of the chart's table, without those that no round has: a private job reports epsilon, and no loss or speed. */
export function roundColumns({ buckets }: Series): RoundColumn[] {
  const all: (RoundColumn & { known: boolean })[] = [
    { head: "Round", cell: (bucket) => count(bucket.end), known: true },
    { head: "Loss", cell: (bucket) => (bucket.bad && !bucket.count ? "not a number" : loss(mean(bucket))), known: buckets.some((bucket) => bucket.count > 0 || bucket.bad > 0) },
    { head: "Samples/s", cell: (bucket) => short(rate(bucket)), known: buckets.some((bucket) => bucket.samples > 0) },
    { head: "Epsilon", cell: (bucket) => loss(bucket.told?.["epsilon"]), known: buckets.some((bucket) => bucket.told?.["epsilon"] !== undefined) },
  ];
  return all.filter((column) => column.known);
}

/** The rounds as comma-separated values. */
export function csv(series: Series): string {
  const head = "round,round_end,loss_mean,loss_min,loss_max,samples_per_second";
  const rows = series.buckets.map((bucket) => {
    const some = bucket.count > 0;
    return [bucket.round, bucket.end, mean(bucket) ?? "", some ? bucket.min : "", some ? bucket.max : "", rate(bucket) ?? ""].join(",");
  });
  return [head, ...rows].join("\n") + "\n";
}

function at(buckets: readonly Bucket[], evaluations: readonly EvaluationPoint[], name: string): (number | null)[] {
  const out: (number | null)[] = buckets.map(() => null);
  let i = 0;
  for (const point of evaluations) {
    while (i < buckets.length - 1 && buckets[i]!.end < point.round) i += 1;
    const value = point.metrics[name];
    if (i < out.length && typeof value === "number" && Number.isFinite(value)) out[i] = value;
  }
  return out;
}
