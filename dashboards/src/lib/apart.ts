/* Workers that learn apart and meet: when they met and what it moved, and how far ADMM's workers disagree. Pure. */
import type { Bucket } from "./series";

export interface Meetings {
  x: number[]; // rounds
  bytes: number[]; // moved so far
  met: number[]; // meetings so far
  times: number; // meetings in all
  last: number | null; // the round of the newest
  rounds: number;
}

/** Meetings and bytes by round; null for a strategy that does not tell of meetings. */
export function meetings(buckets: readonly Bucket[]): Meetings | null {
  if (!buckets.some((bucket) => bucket.told && "met" in bucket.told)) return null;
  const out: Meetings = { x: [], bytes: [], met: [], times: 0, last: null, rounds: 0 };
  let moved = 0;
  for (const bucket of buckets) {
    const met = bucket.told?.["met"] ?? 0;
    moved += bucket.bytes;
    out.times += met;
    out.rounds += bucket.rounds;
    if (met > 0) out.last = bucket.end;
    out.x.push(bucket.end);
    out.bytes.push(moved);
    out.met.push(out.times);
  }
  return out;
}

export interface Residuals {
  x: number[];
  primal: (number | null)[];
  dual: (number | null)[];
  primalStop: (number | null)[];
  dualStop: (number | null)[];
  penalty: (number | null)[];
  reached: number | null; // the first round at which both were below their thresholds
}

/** ADMM's residuals by round beside the thresholds at which it stops; null where no round has any. */
export function residuals(buckets: readonly Bucket[]): Residuals | null {
  const own = buckets.filter((bucket) => bucket.told && "primal" in bucket.told);
  if (own.length === 0) return null;
  const of = (name: string) => own.map((bucket) => above(bucket.told![name])); // a logarithmic axis has no zero
  const out: Residuals = {
    x: own.map((bucket) => bucket.end), primal: of("primal"), dual: of("dual"), primalStop: of("primal_stop"),
    dualStop: of("dual_stop"), penalty: of("penalty"), reached: null,
  };
  const below = own.find(({ told }) => told!["primal"]! <= (told!["primal_stop"] ?? -1) && (told!["dual"] ?? Infinity) <= (told!["dual_stop"] ?? -1));
  out.reached = below ? below.end : null;
  return out;
}

function above(value: number | undefined): number | null {
  return value !== undefined && value > 0 ? value : null;
}
