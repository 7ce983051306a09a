/*
 * A server group as numbers to draw: which segment is whose, how busy each is, what a loss would cost, and the arcs of the
 * ring. Pure.
 */
import type { Group, GroupMove, GroupSegment, GroupServer, GroupSpace } from "../types";
import type { Tone } from "./status";
import { plural } from "./format";

/** Colours that servers take in turn. */
export const COLOURS = 8;

export const GROUP_TONES: Record<string, Tone> = {
  ready: "ok", healing: "warn", resizing: "run", degraded: "bad", starting: "run", stopping: "warn", unreachable: "warn",
};

/** A segment with the space it is of. */
export interface Placed extends GroupSegment {
  space: string;
  first: boolean; // of its space
  place: number; // within its table, or within the dense vector
}

/** How much of a newly heard rate counts: two looks a second make it the mean of the last few seconds. */
const NEWS = 0.25;

/** The group with its rates calmed: they are measured over fractions of a second. `memory` holds them between two looks. */
export function calm(group: Group, memory: Map<string, number>): Group {
  const seen = new Map<string, number>();
  const rate = (key: string, heard: number | null | undefined): number | null => {
    if (heard == null) return null; // of a dead one nobody knows
    const before = memory.get(key);
    const value = before === undefined ? heard : before + NEWS * (heard - before);
    seen.set(key, value < 0.01 ? 0 : value);
    return seen.get(key)!;
  };
  const servers = group.servers.map((server) => ({ ...server, operations_s: rate(`server ${server.name}`, server.operations_s) }));
  const spaces = group.spaces.map((space) => ({
    ...space,
    operations_s: rate(`space ${space.number}`, space.operations_s),
    segments: space.segments.map((segment) => ({ ...segment, operations_s: rate(`${space.number}/${segment.index}`, segment.operations_s) })),
  }));
  memory.clear();
  for (const [key, value] of seen) memory.set(key, value);
  return { ...group, servers, spaces };
}

/** Segments of the chosen space, or of all, in order. */
export function placed(spaces: readonly GroupSpace[], chosen = ""): Placed[] {
  return spaces.filter((space) => !chosen || space.name === chosen)
    .flatMap((space) => {
      const seen = new Map<string | null, number>();
      return space.segments.map((segment, i) => {
        const place = seen.get(segment.table) ?? 0;
        seen.set(segment.table, place + 1);
        return { ...segment, space: space.name, first: i === 0, place };
      });
    });
}

/** The number in a server's name, or its place in the list: what its colour is chosen by, whoever else comes and goes. */
export function tint(name: string, names: readonly string[] = []): number {
  const number = /(\d+)$/.exec(name);
  return (number ? Number(number[1]) : Math.max(0, names.indexOf(name))) % COLOURS;
}

/** Servers by the number in their names, then by name. */
export function inOrder(servers: readonly GroupServer[]): GroupServer[] {
  return [...servers].sort((a, b) => a.name.localeCompare(b.name, "en", { numeric: true }));
}

export interface Arc {
  from: number; // in turns, from the top, clockwise
  to: number;
}

/** The ring cut into equal arcs, with a gap (in turns) before each space where there are several. */
export function arcs(segments: readonly { first: boolean }[], gap = 0.012): Arc[] {
  const spaces = segments.filter((segment) => segment.first).length;
  const space = spaces > 1 ? Math.min(gap, 0.3 / spaces) : 0;
  const width = segments.length ? (1 - space * spaces) / segments.length : 0;
  let at = 0;
  return segments.map((segment) => {
    if (segment.first) at += space;
    at += width;
    return { from: at - width, to: at };
  });
}

/** An arc with a thickness, as an SVG path around the origin. */
export function sector({ from, to }: Arc, inner: number, outer: number): string {
  const end = Math.min(to, from + 0.9999); // a whole turn would begin where it ends
  const large = end - from > 0.5 ? 1 : 0;
  const at = (turn: number, radius: number) => `${round(radius * Math.sin(turn * 2 * Math.PI))} ${round(-radius * Math.cos(turn * 2 * Math.PI))}`;
  return `M${at(from, outer)}A${outer} ${outer} 0 ${large} 1 ${at(end, outer)}L${at(end, inner)}A${inner} ${inner} 0 ${large} 0 ${at(from, inner)}Z`;
}

/** The step of the colour ramp (0 to 4) for a load against the mean load; from 2 on it is hot. */
export function level(load: number, mean: number): number {
  if (!(mean > 0)) return 0;
  const ratio = load / mean;
  return ratio < 0.5 ? 0 : ratio < 1.25 ? 1 : ratio < 2 ? 2 : ratio < 4 ? 3 : 4;
}

/** From how many times the mean on a segment is called hot. */
export const HOT = 2;

/** The busiest segments, busiest first, each with its load against the mean of its kind. */
export function hottest(segments: readonly Placed[], most = 8): { segment: Placed; ratio: number }[] {
  const mean = average(segments.map((segment) => segment.operations_s ?? 0));
  if (!(mean > 0)) return [];
  return segments.map((segment) => ({ segment, ratio: (segment.operations_s ?? 0) / mean }))
    .sort((a, b) => b.ratio - a.ratio).slice(0, most);
}

/** The busiest living server's operations against the mean of all; null where nothing is asked of them. */
export function skew(servers: readonly GroupServer[]): number | null {
  const loads = servers.filter((server) => server.state === "alive").map((server) => server.operations_s ?? 0);
  const mean = average(loads);
  return mean > 0 ? Math.max(...loads) / mean : null;
}

export interface Replication {
  all: number;
  whole: number; // have a primary and every copy that is wanted
  bare: number; // have a primary but lack copies
  lost: number;
  moving: number;
}

/** How many segments are held as they should be. A segment that moves counts as whole or bare too. */
export function replication(group: Group): Replication {
  const segments = placed(group.spaces);
  const lost = segments.filter((segment) => !segment.primary || segment.state === "lost").length;
  const bare = segments.filter((segment) => segment.primary && segment.state !== "lost" && (segment.copies.length < group.replicas || segment.state === "copying")).length;
  return { all: segments.length, lost, bare, whole: segments.length - lost - bare, moving: segments.filter((segment) => segment.state === "moving").length };
}

/** What the death of a server would cost now, in a sentence. */
export function risk(group: Group): { tone: Tone; text: string } {
  const state = replication(group);
  if (state.lost > 0) return { tone: "bad", text: `${plural(state.lost, "segment")} ${state.lost === 1 ? "has" : "have"} no server: the job restores from its last checkpoint.` };
  if (group.replicas === 0) return { tone: "warn", text: "No backups: the death of a server loses the pushes since the job's last checkpoint, except those in the workers' replay buffers." };
  if (state.bare > 0) return { tone: "warn", text: `${plural(state.bare, "segment")} ${state.bare === 1 ? "lacks" : "lack"} a backup, which is being copied: until then the death of its server loses the pushes that are not in the workers' replay buffers.` };
  if (group.status === "healing") {
    const missing = group.wanted - group.servers.filter((server) => server.state === "alive").length;
    const why = missing > 0 ? `${plural(missing, "server")} ${missing === 1 ? "is" : "are"} being replaced` : "segments are moving back";
    return { tone: "warn", text: `Every segment has its ${group.replicas === 1 ? "backup" : "backups"} again; ${why}.` };
  }
  const many = group.replicas === 1 ? "Any one server may die" : `Any ${group.replicas} servers may die`;
  return { tone: "ok", text: `${many}: every acknowledged push is on another server.` };
}

/** How far a move is, from 0 to 1; null where that is not known: `bytes` may be what has been copied, or the whole size. */
export function moved(move: GroupMove, segment: Placed | undefined): number | null {
  if (move.phase === "handing") return 1;
  const share = segment?.bytes ? (move.bytes ?? 0) / segment.bytes : 1;
  return share > 0 && share < 0.99 ? share : null;
}

/** The segment that a move is of. */
export function movedSegment(move: GroupMove, segments: readonly Placed[]): Placed | undefined {
  return segments.find((segment) => segment.space === move.space && segment.index === move.segment);
}

/** Loads of servers (rows) by space (columns): operations a second of the segments whose primary each is. */
export function bySpace(servers: readonly GroupServer[], spaces: readonly GroupSpace[]): number[][] {
  return servers.map((server) => spaces.map((space) =>
    space.segments.reduce((sum, segment) => sum + (segment.primary === server.name ? segment.operations_s ?? 0 : 0), 0)));
}

/** A segment in words: "users 3", "parameters 7". */
export function segmentName(segment: { table: string | null; place: number }): string {
  return `${segment.table ?? "parameters"} ${segment.place}`;
}

/** The name of a space's job where it is known, else its own, shortened. */
export function spaceName(space: string, jobs: readonly { id: string; name: string }[]): string {
  return jobs.find((job) => job.id === space)?.name ?? (space.length > 24 ? `${space.slice(0, 10)}…${space.slice(-6)}` : space);
}

function average(values: readonly number[]): number {
  return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : 0;
}

function round(value: number): number {
  return Math.round(value * 100) / 100;
}
