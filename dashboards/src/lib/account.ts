/* Where the time of a job went: each worker's and server's seconds by part, as shares to draw. Pure. */
import type { Account } from "../types";

/** The parts in the order in which they are drawn, with what they mean. Useful time is first. */
export const PARTS = {
  compute: "computing that is kept",
  data: "waiting for batches",
  communication: "sending and receiving that nothing hides",
  waiting: "waiting for a worker or a server",
  evaluation: "evaluating",
  checkpoint: "copying and writing states",
  start: "starting",
  recovery: "from a failure to the next round",
  again: "rounds done again after a failure",
  idle: "nothing to do",
} as const;

export type Part = keyof typeof PARTS;

export interface Strip {
  name: string;
  seconds: number;
  parts: { part: Part; share: number; seconds: number }[]; // those with time, in the order of PARTS
  guilty: boolean;
}

/** A strip for each worker and server, workers by rank first; none if nothing is known. */
export function strips(account: Account | null | undefined): Strip[] {
  const members = Object.entries(account?.members ?? {});
  return members
    .map(([name, given]) => {
      const seconds = Object.values(given).reduce((sum, value) => sum + Math.max(0, value), 0);
      const parts = (Object.keys(PARTS) as Part[])
        .map((part) => ({ part, seconds: Math.max(0, given[part] ?? 0) }))
        .filter((each) => each.seconds > 0)
        .map((each) => ({ ...each, share: each.seconds / seconds }));
      return { name, seconds, parts, guilty: (account?.guilty ?? []).includes(name) };
    })
    .filter((strip) => strip.seconds > 0)
    .sort((a, b) => order(a.name) - order(b.name) || a.name.localeCompare(b.name));
}

/** The parts that at least one strip has, for the legend. */
export function used(found: readonly Strip[]): Part[] {
  return (Object.keys(PARTS) as Part[]).filter((part) => found.some((strip) => strip.parts.some((each) => each.part === part)));
}

function order(name: string): number {
  const match = /^worker-(\d+)$/.exec(name);
  return match ? Number(match[1]) : 1e9;
}
