/* Strategies in human words. Pure; knows the wire form, no network. */
import type { JobSpec, PhaseWire, StrategySpec, StrategyWire } from "../types";

/** The phases of a strategy in any of its three forms (text, one strategy, list of phases). */
export function phases(spec: StrategySpec | null | undefined): PhaseWire[] {
  if (spec === null || spec === undefined) return [{ strategy: { name: "all_reduce" } }];
  if (typeof spec === "string") return [{ strategy: parseText(spec) }];
  if (Array.isArray(spec)) return spec.map((phase) => ({ epochs: phase.epochs ?? null, strategy: one(phase.strategy) }));
  return [{ strategy: spec }];
}

/** One strategy in words: "Parameter server, asynchronous, 2 shards". */
export function words(strategy: StrategyWire): string {
  if (strategy.name === "all_reduce") return "All-reduce";
  if (strategy.name === "hybrid") return hybrid(strategy);
  if (strategy.name !== "parameter_server") return sentence(strategy.name) + others(strategy, []);
  const parts = ["Parameter server"];
  if ("staleness" in strategy) parts.push(staleWords(strategy["staleness"]));
  const shards = strategy["shards"];
  if (typeof shards === "number") parts.push(shards === 1 ? "1 shard" : `${shards} shards`);
  const copies = copyWords(strategy["replicas"]);
  return parts.join(", ") + (copies && `, ${copies}`) + others(strategy, ["staleness", "shards", "replicas"]);
}

/** One strategy without its number of shards, for a narrow column. */
export function brief(spec: StrategySpec | null | undefined): string {
  return phases(spec).map(({ strategy }) => words({ ...strategy, shards: undefined })).join(" → ");
}

/** The shards of a strategy in words; "" where there are none. */
export function shardWords(spec: StrategySpec | null | undefined): string {
  const shards = phases(spec).map(({ strategy }) => strategy["shards"]).find((value) => typeof value === "number");
  return typeof shards === "number" ? (shards === 1 ? "1 shard" : `${shards} shards`) : "";
}

/** A whole strategy in words; phases are joined by an arrow. */
export function describe(spec: StrategySpec | null | undefined): string {
  return phases(spec).map((phase) => words(phase.strategy)).join(" → ");
}

/** The shortest label of a strategy, for a band in a chart. */
export function label(strategy: StrategyWire): string {
  if (strategy.name === "all_reduce") return "All-reduce";
  if (strategy.name !== "parameter_server") return sentence(strategy.name);
  return "staleness" in strategy ? `Server, ${staleWords(strategy["staleness"])}` : "Parameter server";
}

/** Whether any phase uses a parameter server (and so has shards and staleness). */
export function usesServer(spec: StrategySpec | null | undefined): boolean {
  return phases(spec).some((phase) => phase.strategy.name === "parameter_server");
}

/** The widest bound on staleness over all phases; null = asynchronous or not known. */
export function staleBound(spec: StrategySpec | null | undefined): number | null {
  let bound = 0;
  for (const { strategy } of phases(spec)) {
    if (strategy.name !== "parameter_server") continue;
    const value = "staleness" in strategy ? strategy["staleness"] : 0;
    if (typeof value !== "number") return null;
    bound = Math.max(bound, value);
  }
  return bound;
}

/** The strategy at work now: by its own name where progress says it, filled in from the job's spec. */
export function current(progress: StrategySpec | undefined, spec: StrategySpec | undefined): StrategyWire {
  const all = phases(spec);
  const now = progress === undefined ? undefined : phases(progress)[0]?.strategy;
  if (!now) return all[0]?.strategy ?? { name: "all_reduce" };
  if (Object.keys(now).length > 1) return now;
  return all.find((phase) => phase.strategy.name === now.name)?.strategy ?? now;
}

/** A job's length in words: "3 epochs", "500 steps", "" when neither was given. */
export function length(spec: JobSpec): string {
  if (spec.epochs) return spec.epochs === 1 ? "1 epoch" : `${spec.epochs} epochs`;
  if (spec.steps) return spec.steps === 1 ? "1 step" : `${spec.steps} steps`;
  return "";
}

function one(strategy: StrategyWire | string): StrategyWire {
  return typeof strategy === "string" ? parseText(strategy) : strategy;
}

function parseText(source: string): StrategyWire {
  const [name = "", rest = ""] = source.split(/:(.*)/s);
  const out: StrategyWire = { name: name.trim() };
  for (const pair of rest.split(",").filter(Boolean)) {
    const [key = "", value = ""] = pair.split("=");
    out[key.trim()] = value.trim() === "none" ? null : Number.isNaN(Number(value)) ? value.trim() : Number(value);
  }
  return out;
}

/** Dense part by all-reduce, tables on servers; switches that stand as they usually do are left out. */
function hybrid(strategy: StrategyWire): string {
  const servers = strategy["servers"];
  const parts = ["Hybrid", typeof servers === "number" ? `tables on ${servers === 1 ? "1 server" : `${servers} servers`}` : "", staleWords(strategy["staleness"] ?? null), copyWords(strategy["replicas"])];
  const said = ["servers", "staleness", "replicas", ...(strategy["prefetch"] === false ? [] : ["prefetch"]), ...["compression", "bucket_mb"].filter((key) => strategy[key] == null)];
  return parts.filter(Boolean).join(", ") + others(strategy, said);
}

function copyWords(replicas: unknown): string {
  return typeof replicas !== "number" || replicas === 0 ? "" : replicas === 1 ? "1 copy" : `${replicas} copies`;
}

function staleWords(value: unknown): string {
  if (value === null || value === "none") return "asynchronous";
  return value === 0 ? "synchronous" : `staleness ≤ ${String(value)}`;
}

function sentence(name: string): string {
  const spaced = name.replaceAll("_", " ");
  return spaced.charAt(0).toUpperCase() + spaced.slice(1);
}

function others(strategy: StrategyWire, said: string[]): string {
  const rest = Object.entries(strategy).filter(([key, value]) => key !== "name" && value !== undefined && !said.includes(key));
  return rest.length ? `, ${rest.map(([key, value]) => `${key} ${String(value)}`).join(", ")}` : "";
}
