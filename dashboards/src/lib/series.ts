/*
 * The rounds of one job in bounded memory. Up to `limit` rounds are kept as they came; past that, neighbours merge into
 * buckets of 2, 4, 8 ... rounds with minimum, mean and maximum, aligned to the round number: a closed bucket never
 * changes, so a finished curve looks the same for everyone and every time.
 */
import type { EvaluationPoint, MetricPoint, RoundPoint } from "../types";

export interface Bucket {
  round: number; // first round in it
  end: number; // last round in it
  count: number; // rounds with a finite loss
  rounds: number; // rounds in it
  min: number;
  max: number;
  sum: number; // of finite losses
  bad: number; // rounds whose loss is NaN, infinite or null
  void: number; // secure rounds without a sum, and so without a loss
  samples: number;
  seconds: number;
  data: number; // seconds that rounds waited for their batches
  bytes: number;
  strategy: string; // wire form as JSON, for the phase bands
  epoch: number;
  told: Record<string, number> | null; // metrics of the workload and what the strategy says of the round, by name; the newest of several rounds, meetings summed
}

export interface Mark {
  round: number;
  kind: "nan" | "resume";
  text: string;
}

export interface Band {
  from: number;
  to: number;
  strategy: string;
}

/** Fields that every round has; any other number in it is a metric of the workload or was told by the strategy. */
const COMMON = new Set(["round", "epoch", "time", "loss", "samples", "seconds", "compute", "data", "data_share", "wait", "move", "pull", "pull_hidden", "bytes", "generation", "rank", "lead"]);
const MAX_MARKS = 64;
const MAX_EVALUATIONS = 1000; // past that, one for each 2, 4, 8 ... rounds

export class Series {
  buckets: Bucket[] = [];
  evaluations: EvaluationPoint[] = [];
  resumes: Mark[] = [];
  width = 1; // rounds to a bucket
  total = 0; // rounds seen, including those that a resume took back
  staleness = new Map<number, number>(); // pulls by how many rounds behind, of rounds under a server
  badRounds = 0;
  firstBad: number | null = null;
  private generation = 0;
  private evaluationWidth = 1;
  /** How far back evaluations are filed: 1 files one after k rounds at the last of them, round k - 1. */
  filedBack = 0;

  constructor(readonly limit = 20_000) {}

  add(points: readonly MetricPoint[]): void {
    for (const point of points) {
      if (point.kind === "evaluation") this.evaluate(point);
      else if (point.kind === "returned") this.rewind(point.round);
      else if (point.kind === "round") this.round(point);
    }
  }

  /** The phases: runs of rounds under one strategy. One band means that it never changed. */
  bands(): Band[] {
    const out: Band[] = [];
    for (const bucket of this.buckets) {
      const last = out[out.length - 1];
      if (last && last.strategy === bucket.strategy) last.to = bucket.end;
      else out.push({ from: bucket.round, to: bucket.end, strategy: bucket.strategy });
    }
    return out;
  }

  /** How many secure rounds have no sum. */
  get voidRounds(): number {
    return this.buckets.reduce((sum, bucket) => sum + bucket.void, 0);
  }

  /** Rounds to mark because their loss is not a finite number: one mark for each run of them. */
  nanMarks(): Mark[] {
    const marks: Mark[] = [];
    let inside = false;
    for (const bucket of this.buckets) {
      if (bucket.bad > 0 && !inside && marks.length < MAX_MARKS) {
        marks.push({ round: bucket.round, kind: "nan", text: `loss is not a number from round ${bucket.round}` });
      }
      inside = bucket.bad > 0;
    }
    return marks;
  }

  private evaluate(given: EvaluationPoint): void {
    const point = this.filedBack ? { ...given, round: given.round - this.filedBack } : given;
    const kept = this.evaluations.filter((old) => old.round < point.round);
    kept.push(point);
    this.evaluations = newestOfEach(kept, this.evaluationWidth);
    while (this.evaluations.length > MAX_EVALUATIONS) {
      this.evaluationWidth *= 2;
      this.evaluations = newestOfEach(this.evaluations, this.evaluationWidth);
    }
  }

  private round(point: RoundPoint): void {
    this.total += 1;
    this.pulls(point);
    const generation = point.generation ?? this.generation;
    const last = this.buckets[this.buckets.length - 1];
    if (last && point.round <= last.end && generation > this.generation) this.rewind(point.round); // of a job before "returned" was written
    this.generation = Math.max(this.generation, generation);
    const tail = this.buckets[this.buckets.length - 1];
    if (tail && point.round <= tail.end) {
      this.insert(point);
      return;
    }
    if (tail && this.width > 1 && slot(point.round, this.width) === slot(tail.round, this.width)) merge(tail, single(point));
    else this.buckets.push(single(point));
    this.count(point);
    if (this.buckets.length > this.limit) this.coarsen();
  }

  /** All-reduce has no pulls: its rounds would only make the histogram look fresher than the server was. */
  private pulls(point: RoundPoint): void {
    if (!point.staleness || JSON.stringify(point.strategy ?? "").includes("all_reduce")) return;
    for (const [age, pulls] of Object.entries(point.staleness)) {
      this.staleness.set(Number(age), (this.staleness.get(Number(age)) ?? 0) + pulls);
    }
  }

  /** The job goes on from an earlier state: the rounds after it did not count. */
  private rewind(round: number): void {
    this.buckets = this.buckets.filter((bucket) => bucket.end < round);
    this.evaluations = this.evaluations.filter((point) => point.round + this.filedBack <= round); // after `round` rounds
    this.resumes = this.resumes.filter((mark) => mark.round < round);
    this.resumes.push({ round, kind: "resume", text: `returned to round ${round}` });
    if (this.resumes.length > MAX_MARKS) this.resumes.shift();
    if (this.firstBad !== null && this.firstBad >= round) this.firstBad = null;
    this.badRounds = this.buckets.reduce((sum, bucket) => sum + bucket.bad, 0);
  }

  /** A round that comes late (asynchronous workers): put it in its place. A round seen before is left as it was. */
  private insert(point: RoundPoint): void {
    let lo = 0;
    let hi = this.buckets.length;
    while (lo < hi) {
      const middle = (lo + hi) >> 1;
      if (this.buckets[middle]!.end < point.round) lo = middle + 1;
      else hi = middle;
    }
    const place = this.buckets[lo];
    if (place && place.round <= point.round) return;
    if (this.width === 1) this.buckets.splice(lo, 0, single(point));
    else if (place) merge(place, single(point));
    this.count(point);
  }

  private count(point: RoundPoint): void {
    if (finite(point.loss) || hidden(point)) return;
    this.badRounds += 1;
    this.firstBad = this.firstBad === null ? point.round : Math.min(this.firstBad, point.round);
  }

  private coarsen(): void {
    this.width *= 2;
    const merged: Bucket[] = [];
    for (const bucket of this.buckets) {
      const last = merged[merged.length - 1];
      if (last && slot(last.round, this.width) === slot(bucket.round, this.width)) merge(last, bucket);
      else merged.push(bucket);
    }
    this.buckets = merged;
  }
}

/** Mean loss of a bucket; null where no round of it had a finite one. */
export function mean(bucket: Bucket): number | null {
  return bucket.count > 0 ? bucket.sum / bucket.count : null;
}

/** Samples per second over a bucket; null where no time was measured. */
export function rate(bucket: Bucket): number | null {
  return bucket.seconds > 0 ? bucket.samples / bucket.seconds : null;
}

/** The part of the rounds' time in which they waited for their batches; null where no time was measured. */
export function dataShare(bucket: Bucket): number | null {
  return bucket.seconds > 0 ? bucket.data / bucket.seconds : null;
}

/** Whether a round has no loss to report: it is of a private job, or a secure round without a sum. */
function hidden(point: RoundPoint): boolean {
  return told(point)?.["epsilon"] !== undefined || isVoid(point);
}

function isVoid(point: RoundPoint): boolean {
  return told(point)?.["void"] === 1;
}

function single(point: RoundPoint): Bucket {
  const ok = finite(point.loss);
  const value = ok ? (point.loss as number) : 0;
  return {
    round: point.round, end: point.round, rounds: 1, count: ok ? 1 : 0, bad: ok || hidden(point) ? 0 : 1, void: isVoid(point) ? 1 : 0,
    min: ok ? value : Infinity, max: ok ? value : -Infinity, sum: value,
    samples: point.samples ?? 0, seconds: point.seconds ?? 0, data: point.data ?? 0, bytes: point.bytes ?? 0, epoch: point.epoch ?? 0, told: told(point),
    strategy: typeof point.strategy === "string" ? point.strategy : point.strategy ? JSON.stringify(point.strategy) : "",
  };
}

/** The numbers of a round beside those of all jobs: metrics of the workload, residuals, meetings, clients. */
function told(point: RoundPoint): Record<string, number> | null {
  let found: Record<string, number> | null = null;
  for (const [name, value] of Object.entries(point)) {
    if (!COMMON.has(name) && typeof value === "number" && Number.isFinite(value)) (found ??= {})[name] = value;
  }
  return found;
}

function merge(into: Bucket, other: Bucket): void {
  if (other.told) {
    const met = (into.told?.["met"] ?? 0) + (other.told["met"] ?? 0);
    into.told = other.round >= into.round ? { ...into.told, ...other.told } : { ...other.told, ...into.told };
    if ("met" in into.told) into.told["met"] = met;
  }
  into.round = Math.min(into.round, other.round);
  into.end = Math.max(into.end, other.end);
  into.rounds += other.rounds;
  into.count += other.count;
  into.bad += other.bad;
  into.void += other.void;
  into.min = Math.min(into.min, other.min);
  into.max = Math.max(into.max, other.max);
  into.sum += other.sum;
  into.samples += other.samples;
  into.seconds += other.seconds;
  into.data += other.data;
  into.bytes += other.bytes;
}

function newestOfEach(points: EvaluationPoint[], width: number): EvaluationPoint[] {
  return points.filter((point, i) => i === points.length - 1 || slot(point.round, width) !== slot(points[i + 1]!.round, width));
}

function slot(round: number, width: number): number {
  return Math.floor(round / width);
}

function finite(value: number | null | undefined): boolean {
  return typeof value === "number" && Number.isFinite(value);
}
