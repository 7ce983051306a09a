/* A pipeline's schedule as bars to draw: what its table says beside what a step really did, and what a step cost. Pure. */
import { bytes, percent } from "./format";
import type { JobEvent } from "../types";

export type Kind = "F" | "B" | "W";

export interface Pass {
  kind: Kind;
  chunk: number; // of the whole model
  turn: number; // of the chunk on its own worker, 0 first
  micro: number;
  start: number;
  end: number;
}

export interface Timeline {
  rows: Pass[][]; // of each stage
  length: number;
  idle: number; // share of all stages' time in which they wait
  idles: number[];
  held: number[]; // the most micro-batches that each stage held at once
}

export const KINDS: Record<Kind, string> = { F: "forward", B: "backward", W: "gradient of the weights" };

/** Rows of [action, start, end] as they stand in an event; null where they are none. */
export function timeline(given: unknown): Timeline | null {
  if (!Array.isArray(given) || given.length === 0) return null;
  const rows = given.map((row) => (Array.isArray(row) ? row.map((each) => pass(each, given.length)) : []));
  if (rows.some((row) => row.some((each) => each === null))) return null;
  const sure = rows as Pass[][];
  const length = Math.max(0, ...sure.flatMap((row) => row.map((each) => each.end)));
  if (!(length > 0)) return null;
  const idles = sure.map((row) => Math.max(0, 1 - row.reduce((sum, each) => sum + each.end - each.start, 0) / length));
  return { rows: sure, length, idles, idle: idles.reduce((sum, each) => sum + each, 0) / idles.length, held: sure.map(held) };
}

function pass(given: unknown, stages: number): Pass | null {
  if (!Array.isArray(given) || typeof given[1] !== "number" || typeof given[2] !== "number") return null;
  const match = /^(\d+)([FBW])(\d+)$/.exec(String(given[0]));
  if (!match) return null;
  const chunk = Number(match[1]);
  return { kind: match[2] as Kind, chunk, turn: Math.floor(chunk / stages), micro: Number(match[3]), start: given[1], end: given[2] };
}

/** From a forward pass to its backward pass, or to its weights' where the table has them. */
function held(row: readonly Pass[]): number {
  const frees = row.some((each) => each.kind === "W") ? "W" : "B";
  let now = 0;
  let most = 0;
  for (const { kind } of row) {
    now += kind === "F" ? 1 : kind === frees ? -1 : 0;
    most = Math.max(most, now);
  }
  return most;
}

/** The newest event of a kind. */
export function newest(events: readonly JobEvent[], kind: string): JobEvent | undefined {
  for (let i = events.length - 1; i >= 0; i -= 1) if (events[i]!.kind === kind) return events[i];
  return undefined;
}

export interface CostRow {
  what: string;
  measured: string;
  formula: string;
}

/** What a "costs" event says, each measured value beside its formula's. */
export function costRows(event: JobEvent | undefined): CostRow[] {
  const found = record(event?.["measured"]);
  const formula = record(event?.["formula"]);
  const traffic = Array.isArray(formula["traffic"]) ? formula["traffic"].map(record) : [];
  const stage = traffic.find((each) => each["axis"] === "stage") ?? {};
  return [
    row("Sent in a step", found["bytes"], formula["bytes"], bytes),
    row("Of this between stages", found["stage_bytes"], stage["bytes"], bytes),
    row("Messages between stages", found["messages"], stage["messages"], whole),
    row("Stages idle", found["idle"], formula["idle"], (value) => percent(value)),
    row("Activations held", found["activations"], formula["activations"], String),
    row("Longest worker above the mean", found["imbalance"], undefined, (value) => percent(value, 0)),
    row("Communication overlapped with compute", found["hidden"], undefined, (value) => percent(value, 0)),
  ].filter((each): each is CostRow => each !== null);
}

function row(what: string, measured: unknown, formula: unknown, write: (value: number) => string): CostRow | null {
  const said = written(measured, write);
  return said === "" ? null : { what, measured: said, formula: written(formula, write) };
}

function written(value: unknown, write: (value: number) => string): string {
  if (Array.isArray(value)) return value.map(String).join(", ");
  return typeof value === "number" && Number.isFinite(value) ? write(value) : "";
}

function whole(value: number): string {
  return String(Math.round(value * 10) / 10);
}

function record(value: unknown): Record<string, unknown> {
  return value !== null && typeof value === "object" && !Array.isArray(value) ? (value as Record<string, unknown>) : {};
}
