/* What a private job claims, from its events and its rounds. Pure. */
import type { JobEvent, StrategySpec } from "../types";
import type { Series } from "./series";
import { phases } from "./strategy";

export interface Claim {
  epsilon: number | null; // spent; null before the first release, and if there is no finite bound
  budget: number | null;
  delta: number;
  unit: string;
  releases: number;
  noise: number;
  neighbours: string;
  proves: boolean;
  notProven: string; // why it proves nothing; "" if it proves what it says
  holdsAgainst: string[];
  trusted: string;
  assumes: string[];
}

/** Whether any phase is differentially private. */
export function isPrivate(spec: StrategySpec | null | undefined): boolean {
  return phases(spec).some(({ strategy }) => Boolean(strategy["privacy"]));
}

/** The claim of a job, or null before its first round. */
export function claimOf(events: readonly JobEvent[], series: Series): Claim | null {
  const event = [...events].reverse().find((each) => each.kind === "privacy" && "neighbours" in each);
  if (!event) return null;
  const told = series.buckets.map((bucket) => bucket.told).filter((each) => each && "epsilon" in each);
  const most = (name: string) => told.reduce((found, each) => Math.max(found, each?.[name] ?? 0), 0);
  return {
    epsilon: told.length ? most("epsilon") : null,
    budget: number(event["budget"]),
    delta: number(event["delta"]) ?? 0,
    unit: String(event["unit"] ?? "client"),
    releases: most("releases"),
    noise: number(event["noise_multiplier"]) ?? 0,
    neighbours: String(event["neighbours"] ?? ""),
    proves: event["proves"] === true,
    notProven: event["proves"] === true ? "" : String(event["not_proven"] ?? "its noise was drawn from the job's seed."),
    holdsAgainst: texts(event["holds_against"]),
    trusted: String(event["trusted"] ?? ""),
    assumes: texts(event["assumes"]),
  };
}

/** The share of the budget that is spent, from 0 to 1; null without a budget. */
export function spentShare(claim: Claim): number | null {
  return claim.budget ? Math.min(1, (claim.epsilon ?? 0) / claim.budget) : null;
}

/** A number of a claim, in the shortest form that keeps three digits: 4.5, 0.0123, 1e-5. */
export function shown(value: number | null): string {
  if (value === null) return "–";
  if (!Number.isFinite(value)) return "∞";
  const short = Number(value.toPrecision(3));
  return short !== 0 && Math.abs(short) < 1e-3 ? short.toExponential() : String(short);
}

function number(value: unknown): number | null {
  return typeof value === "number" ? value : null;
}

function texts(value: unknown): string[] {
  return Array.isArray(value) ? value.map(String) : [];
}
