/*
 * Who holds the others up. In step, every worker's round takes as long as the slowest one's, and the fast ones look slow
 * because they wait. So a worker is judged by its own computing time alone: seconds of computing for one sample.
 */
import type { WorkerRow } from "../types";

export interface Verdict {
  rank: number;
  cost: number | null; // seconds of own computing for a sample
  ratio: number | null; // cost over the median of the other workers
  straggler: boolean;
}

/** From how many times the others' median on a worker is marked. */
export const STRAGGLER = 1.3;

/** Own computing time for a sample; null where it was not measured. */
export function cost(worker: WorkerRow): number | null {
  const { compute, samples_per_second: speed } = worker;
  if (typeof compute !== "number" || !(compute > 0)) return null;
  if (speed === undefined || speed === null) return compute; // in step all rounds are equally long: shares compare
  return speed > 0 ? compute / speed : null;
}

/** A verdict for each worker, in the order given. */
export function judge(workers: readonly WorkerRow[], costs: readonly (number | null)[] = workers.map(cost)): Verdict[] {
  return workers.map((worker, i) => {
    const own = costs[i] ?? null;
    const others = costs.filter((value, k): value is number => k !== i && value !== null);
    const middle = median(others);
    const ratio = own !== null && middle !== null ? own / middle : null;
    return { rank: worker.rank, cost: own, ratio, straggler: ratio !== null && ratio >= STRAGGLER };
  });
}

/** The median; null for no values. */
export function median(values: readonly number[]): number | null {
  if (values.length === 0) return null;
  const sorted = [...values].sort((a, b) => a - b);
  const half = sorted.length >> 1;
  return sorted.length % 2 ? sorted[half]! : (sorted[half - 1]! + sorted[half]!) / 2;
}

/** Ages above this one are counted with it. */
const OLDEST = 11;

/** Pushes by age as shares of one, from age 0 to the widest; null where none was counted. */
export function ageBars(ages: Record<string, number> | undefined): { age: number; share: number; more: boolean }[] | null {
  const found = Object.entries(ages ?? {}).map(([age, pushes]) => ({ age: Number(age), pushes })).filter((entry) => Number.isInteger(entry.age) && entry.age >= 0 && entry.pushes > 0);
  const all = found.reduce((sum, entry) => sum + entry.pushes, 0);
  if (all === 0) return null;
  const widest = Math.max(...found.map((entry) => entry.age));
  const top = Math.min(OLDEST, widest);
  const bars = Array.from({ length: top + 1 }, (_, age) => ({ age, share: 0, more: age === top && widest > top }));
  for (const entry of found) bars[Math.min(entry.age, top)]!.share += entry.pushes / all;
  return bars;
}
