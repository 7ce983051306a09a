/* A federated job: who was asked in a round, who counted, who did not and why, and what data the clients hold. Pure. */
import type { EvaluationPoint, JobEvent } from "../types";
import type { Bucket } from "./series";

export type Fate = "counted" | "dropped" | "rejected";

/** A client that did not count in a round, and why. */
export interface Out {
  name: string;
  why: string;
}

export interface Cohort {
  round: number;
  sampled: number;
  replied: number; // with an update that counted
  trained: string[]; // the first ones by name
  dropped: Out[];
  rejected: Out[];
  seconds: number | null; // on the virtual clock
  skipped: boolean; // the model is as it was
  stale: Record<string, number> | null; // updates by how many versions old they were
  message: string;
}

/** What the clients hold: the first ones by name, their sizes and how many rows of each label. */
export interface ClientMap {
  count: number;
  rows: number;
  smallest: number;
  median: number;
  largest: number;
  names: string[];
  sizes: number[];
  labels: string[];
  counts: number[][]; // of each named client; empty where the data has no labels
}

/** The reasons of the virtual clock in words. */
const WHY: Record<string, string> = {
  stale: "too old", dropout: "dropped out", offline: "went offline", deadline: "past the deadline", late: "after enough replies",
};

const MOST_NAMES = 50; // in a list of an event; under an asynchronous strategy others may be under way still
const MOST_ROUNDS = 2000; // whose names are kept; counts of older rounds stay in the series

/** The cohorts of a job by round, the newest in bounded number, and its map of clients. */
export class Cohorts {
  map: ClientMap | null = null;
  readonly rounds = new Map<number, Cohort>();

  /** File an event, and say whether it was one of these: then the page's list of events needs no line for it. */
  take(event: JobEvent): boolean {
    if (event.kind === "clients") this.map = clientMap(event) ?? this.map;
    if (event.kind !== "cohort") return false;
    const found = cohort(event);
    if (!found) return false;
    this.rounds.delete(found.round);
    for (const round of [...this.rounds.keys()].reverse()) {
      if (round < found.round) break;
      this.rounds.delete(round); // made again from a checkpoint: later ones did not count
    }
    this.rounds.set(found.round, found);
    if (this.rounds.size > MOST_ROUNDS) this.rounds.delete(this.rounds.keys().next().value!);
    return true;
  }

  get some(): boolean {
    return this.rounds.size > 0 || this.map !== null;
  }
}

/** A round of clients in numbers. */
export interface Tally {
  round: number;
  sampled: number;
  counted: number;
  dropped: number;
  rejected: number;
  seconds: number | null;
}

/** Every round's clients: by the round's point where it tells, by the event of its cohort elsewhere. */
export function tallies(buckets: readonly Bucket[], cohorts: Cohorts): Tally[] {
  const found = new Map<number, Tally>();
  for (const each of cohorts.rounds.values()) {
    const rejected = each.rejected.length;
    found.set(each.round, {
      round: each.round, sampled: each.sampled, counted: each.replied,
      dropped: each.dropped.length < MOST_NAMES ? each.dropped.length : Math.max(each.dropped.length, each.sampled - each.replied - rejected),
      rejected, seconds: each.seconds,
    });
  }
  for (const { end, told } of buckets) {
    if (!told || typeof told["sampled"] !== "number") continue;
    const { sampled, rejected = 0, replied = sampled - rejected, dropped = Math.max(0, sampled - replied - rejected) } = told as Record<string, number> & { sampled: number };
    found.set(end, { round: end, sampled, counted: replied, dropped, rejected, seconds: found.get(end)?.seconds ?? null });
  }
  return [...found.values()].sort((a, b) => a.round - b.round);
}

/** Why clients did not count, the commonest first; numbers within a reason do not tell two reasons apart. */
export function reasons(cohorts: Iterable<Cohort>): { fate: Fate; why: string; count: number }[] {
  const found = new Map<string, { fate: Fate; why: string; count: number }>();
  for (const each of cohorts) {
    for (const fate of ["dropped", "rejected"] as const) {
      for (const { why } of each[fate]) {
        const kind = reason(why);
        const held = found.get(`${fate}:${kind}`) ?? { fate, why: kind, count: 0 };
        held.count += 1;
        found.set(`${fate}:${kind}`, held);
      }
    }
  }
  return [...found.values()].sort((a, b) => b.count - a.count);
}

/** A reason without what is particular to one client: its numbers. */
export function reason(why: string): string {
  return why.replace(/(?<![\w.])-?\d[\d.,]*(e[+-]?\d+)?(?=\W|$)/gi, "…");
}

/** How often each client was asked, and what became of it, over the rounds whose names are known. */
export function presence(cohorts: Iterable<Cohort>): Map<string, Map<number, Fate>> {
  const found = new Map<string, Map<number, Fate>>();
  const note = (name: string, round: number, fate: Fate) => {
    const own = found.get(name) ?? new Map<number, Fate>();
    own.set(round, fate);
    found.set(name, own);
  };
  for (const each of cohorts) {
    for (const name of each.trained) note(name, each.round, "counted");
    for (const { name } of each.dropped) note(name, each.round, "dropped");
    for (const { name } of each.rejected) note(name, each.round, "rejected");
  }
  return found;
}

/** Updates by their staleness over all rounds, as points count it. */
export function staleUpdates(cohorts: Iterable<Cohort>): Map<number, number> {
  const found = new Map<number, number>();
  for (const { stale } of cohorts) {
    for (const [age, updates] of Object.entries(stale ?? {})) found.set(Number(age), (found.get(Number(age)) ?? 0) + updates);
  }
  return found;
}

export interface Learnt {
  x: number[]; // rounds, or virtual seconds
  global: (number | null)[];
  personal: (number | null)[];
}

/** A metric by round or by virtual time, of the global model and of the clients' own where it was measured. */
export function learnt(evaluations: readonly EvaluationPoint[], name: string, rounds: readonly Tally[], virtual: boolean): Learnt {
  const out: Learnt = { x: [], global: [], personal: [] };
  let at = 0;
  let spent = 0;
  for (const point of evaluations) {
    while (at < rounds.length && rounds[at]!.round <= point.round) spent += rounds[at++]!.seconds ?? 0;
    const x = virtual ? spent : point.round;
    if (virtual && out.x.length > 0 && x <= out.x[out.x.length - 1]!) continue; // a chart's x must grow
    out.x.push(x);
    out.global.push(finite(point.metrics[name]));
    out.personal.push(finite(point.metrics[`personal_${name}`]));
  }
  return out;
}

/** The lowest or the highest known value; null if there is none. */
export function bestOf(values: readonly (number | null)[], lowest: boolean): number | null {
  const better = (a: number, b: number) => (lowest ? a < b : a > b);
  return values.reduce((best, value) => (value !== null && (best === null || better(value, best)) ? value : best), null);
}

/** What a `clients` event tells; null where it is none. */
export function clientMap(event: Record<string, unknown>): ClientMap | null {
  const names = strings(event["names"]);
  const sizes = numbers(event["sizes"]);
  if (names.length === 0 || sizes.length < names.length) return null;
  const counts = Array.isArray(event["counts"]) ? event["counts"].map(numbers) : [];
  const ordered = [...sizes].sort((a, b) => a - b);
  const number = (key: string, other: number) => finite(event[key]) ?? other;
  return {
    names, sizes, counts,
    labels: strings(event["labels"]),
    count: number("clients", number("count", names.length)),
    rows: number("rows", sizes.reduce((sum, size) => sum + size, 0)),
    smallest: number("smallest", ordered[0]!),
    median: number("median", ordered[ordered.length >> 1]!),
    largest: number("largest", ordered[ordered.length - 1]!),
  };
}

/** How unlike the clients are: the share of a client's rows that its commonest label has, over the named clients. */
export function skew(map: ClientMap): number | null {
  const own = map.counts.map((row) => [Math.max(0, ...row), row.reduce((sum, n) => sum + n, 0)] as const).filter(([, all]) => all > 0);
  return own.length ? own.reduce((sum, [most, all]) => sum + most / all, 0) / own.length : null;
}

function cohort(event: JobEvent): Cohort | null {
  const round = finite(event["round"]);
  const sampled = finite(event["sampled"]);
  if (round === null || sampled === null) return null;
  const stale = event["staleness"];
  const rejected = outs(event["rejected"]);
  const spoilt = new Set(rejected.map((out) => out.name));
  return {
    round, sampled,
    replied: finite(event["replied"]) ?? sampled,
    trained: strings(event["trained"]).filter((name) => !spoilt.has(name)),
    dropped: outs(event["dropped"]),
    rejected,
    seconds: finite(event["seconds"]),
    skipped: Boolean(event["skipped"]),
    stale: stale !== null && typeof stale === "object" && !Array.isArray(stale) ? (stale as Record<string, number>) : null,
    message: event.message,
  };
}

function outs(given: unknown): Out[] {
  if (!Array.isArray(given)) return [];
  return given.map((each) => (Array.isArray(each) ? { name: String(each[0]), why: said(each[1]) } : { name: String(each), why: "" }));
}

function said(why: unknown): string {
  const text = String(why ?? "");
  return WHY[text] ?? text;
}

function strings(given: unknown): string[] {
  return Array.isArray(given) ? given.map(String) : [];
}

function numbers(given: unknown): number[] {
  return Array.isArray(given) ? given.map(Number) : [];
}

function finite(value: unknown): number | null {
  return typeof value === "number" && Number.isFinite(value) ? value : null;
}
