/* The pure half of the pages of server groups: the ring's arcs, who holds what, what is hot, what a loss would cost. */
import { describe, expect, it } from "vitest";
import { arcs, bySpace, calm, hottest, inOrder, level, moved, movedSegment, placed, replication, risk, sector, segmentName, skew, spaceName, tint } from "../src/lib/servers";
import { words } from "../src/lib/strategy";
import { ageBars } from "../src/lib/worker";
import type { Group, GroupSegment, GroupServer, GroupSpace } from "../src/types";

const segment = (index: number, more: Partial<GroupSegment> = {}): GroupSegment =>
  ({ index, table: null, primary: "server-0", copies: ["server-1"], generation: 1, bytes: 100, rows: 0, operations_s: 10, state: "ready", ...more });
const space = (name: string, segments: GroupSegment[]): GroupSpace => ({ name, number: 1, segments });
const server = (name: string, more: Partial<GroupServer> = {}): GroupServer => ({ name, state: "alive", operations_s: 10, ...more });
const group = (spaces: GroupSpace[], more: Partial<Group> = {}): Group => ({
  name: "g", status: "ready", reason: null, wanted: 2, replicas: 1, created_at: "2026-01-01T00:00:00Z", settled: true,
  servers: [server("server-0"), server("server-1")], spaces, moves: [], counts: {}, events: [], jobs: [], ...more,
});

describe("the ring", () => {
  it("gives every segment an equal arc and the whole turn to all of them", () => {
    const cut = arcs(placed([space("a", [segment(0), segment(1), segment(2), segment(3)])]));
    expect(cut.map((arc) => arc.to - arc.from)).toEqual([0.25, 0.25, 0.25, 0.25].map((width) => expect.closeTo(width, 9)));
    expect(cut[3]!.to).toBeCloseTo(1, 9);
  });
  it("leaves a gap before each of several spaces", () => {
    const cut = arcs(placed([space("a", [segment(0), segment(1)]), space("b", [segment(0)])]), 0.02);
    expect(cut[0]!.from).toBeCloseTo(0.02, 9);
    expect(cut[2]!.from - cut[1]!.to).toBeCloseTo(0.02, 9);
    expect(cut[2]!.to).toBeCloseTo(1, 9);
  });
  it("keeps room for segments however many spaces there are", () => {
    const many = Array.from({ length: 400 }, (_, i) => space(`s${i}`, [segment(0)]));
    for (const arc of arcs(placed(many))) expect(arc.to).toBeGreaterThan(arc.from);
  });
  it("is empty for nothing", () => expect(arcs([])).toEqual([]));
  it("draws a quarter from the top to the right, and a whole turn as a large arc", () => {
    expect(sector({ from: 0, to: 0.25 }, 50, 100)).toBe("M0 -100A100 100 0 0 1 100 0L50 0A50 50 0 0 0 0 -50Z");
    expect(sector({ from: 0, to: 1 }, 50, 100)).toContain("A100 100 0 1 1");
  });
});

describe("servers", () => {
  it("keep their colour when others come and go", () => {
    expect(tint("server-11")).toBe(3);
    expect(tint("server-11", ["server-11"])).toBe(tint("server-11", ["a", "b", "server-11"]));
    expect(tint("blue", ["red", "blue"])).toBe(1);
  });
  it("stand in the order of their numbers", () => {
    expect(inOrder([server("server-10"), server("server-9")]).map((each) => each.name)).toEqual(["server-9", "server-10"]);
  });
  it("are skewed by the busiest living one", () => {
    expect(skew([server("a", { operations_s: 30 }), server("b", { operations_s: 10 })])).toBeCloseTo(1.5, 9);
    expect(skew([server("a", { operations_s: 0 })])).toBeNull();
    expect(skew([server("a", { operations_s: 10 }), server("b", { operations_s: 90, state: "dead" })])).toBe(1);
  });
  it("serve the segments whose primary they are", () => {
    const two = space("a", [segment(0), segment(1, { primary: "server-1", operations_s: 7 }), segment(2, { primary: null })]);
    expect(bySpace([server("server-0"), server("server-1")], [two])).toEqual([[10], [7]]);
  });
});

describe("segments", () => {
  it("are named by their place in their table", () => {
    const found = placed([space("a", [segment(0), segment(1), segment(2, { table: "users" }), segment(3, { table: "users" })])]);
    expect(found.map(segmentName)).toEqual(["parameters 0", "parameters 1", "users 0", "users 1"]);
  });
  it("are those of the chosen space", () => {
    expect(placed([space("a", [segment(0)]), space("b", [segment(0), segment(1)])], "b")).toHaveLength(2);
  });
  it("are hot against the mean", () => {
    const found = hottest(placed([space("a", [segment(0, { operations_s: 90 }), segment(1), segment(2), segment(3, { operations_s: null })])]), 2);
    expect(found.map((entry) => entry.segment.index)).toEqual([0, 1]);
    expect(found[0]!.ratio).toBeCloseTo(90 / 27.5, 9);
    expect(hottest(placed([space("a", [segment(0, { operations_s: 0 })])]))).toEqual([]);
    expect([0, 10, 20, 30, 90].map((load) => level(load, 10))).toEqual([0, 1, 3, 3, 4]);
    expect(level(5, 0)).toBe(0);
  });
});

describe("replication", () => {
  it("counts what lacks a copy and what is lost", () => {
    const mixed = space("a", [segment(0), segment(1, { copies: [] }), segment(2, { state: "copying" }), segment(3, { primary: null, state: "lost" }), segment(4, { state: "moving" })]);
    expect(replication(group([mixed]))).toEqual({ all: 5, whole: 2, bare: 2, lost: 1, moving: 1 });
  });
  it("says what the next death would cost", () => {
    expect(risk(group([space("a", [segment(0)])]))).toMatchObject({ tone: "ok", text: expect.stringContaining("Any one server may die") });
    expect(risk(group([space("a", [segment(0, { copies: [] })])]))).toMatchObject({ tone: "warn", text: expect.stringContaining("1 segment lacks a backup") });
    expect(risk(group([space("a", [segment(0, { copies: [] })])], { replicas: 0 })).text).toContain("last checkpoint");
    expect(risk(group([space("a", [segment(0, { primary: null })])])).tone).toBe("bad");
  });
  it("says what is healed where every segment has its copies", () => {
    const hurt = group([space("a", [segment(0)])], { status: "healing", servers: [server("server-0"), server("server-2", { state: "dead" })] });
    expect(risk(hurt)).toEqual({ tone: "warn", text: "Every segment has its backup again; 1 server is being replaced." });
  });
  it("knows nothing of what a dead server does", () => {
    const dead = group([], { servers: [server("server-0", { state: "dead", operations_s: null })] });
    expect(calm(dead, new Map([["server server-0", 10]])).servers[0]!.operations_s).toBeNull();
  });
});

describe("moves", () => {
  const segments = placed([space("a", [segment(0), segment(1)])]);
  const move = { space: "a", segment: 1, from: "server-0", to: "server-1", phase: "copying", bytes: 25 };
  it("are of a segment", () => expect(movedSegment(move, segments)?.index).toBe(1));
  it("are as far as their bytes, where these are not simply the size", () => {
    expect(moved(move, segments[1])).toBe(0.25);
    expect(moved({ ...move, bytes: 100 }, segments[1])).toBeNull();
    expect(moved({ ...move, bytes: 0 }, segments[1])).toBeNull();
    expect(moved(move, undefined)).toBeNull();
    expect(moved({ ...move, phase: "handing" }, segments[1])).toBe(1);
  });
});

describe("rates", () => {
  it("begin as they are heard, and then follow slowly", () => {
    const memory = new Map<string, number>();
    const at = (rate: number) => calm(group([space("a", [segment(0, { operations_s: rate })])]), memory).spaces[0]!.segments[0]!.operations_s;
    expect(at(100)).toBe(100);
    expect(at(0)).toBe(75);
    expect(at(75)).toBe(75);
    for (let i = 0; i < 60; i++) at(0);
    expect(at(0)).toBe(0);
  });
  it("of what is gone are forgotten", () => {
    const memory = new Map<string, number>();
    calm(group([space("a", [segment(0)])]), memory);
    calm(group([]), memory);
    expect([...memory.keys()]).toEqual(["server server-0", "server server-1"]);
  });
});

describe("names", () => {
  it("are the job's where it is known", () => {
    expect(spaceName("01ABC", [{ id: "01ABC", name: "digits" }])).toBe("digits");
    expect(spaceName("mine", [])).toBe("mine");
    expect(spaceName("01JD8Q1B5N7P9R2S4T6V8W0XYZ", [])).toBe("01JD8Q1B5N…W0XYZ".replace("W0XYZ", "8W0XYZ"));
  });
});

describe("strategies on elastic servers", () => {
  it("are said in words", () => {
    expect(words({ name: "hybrid", servers: 2, staleness: null, replicas: 1, prefetch: true, compression: null, bucket_mb: null }))
      .toBe("Hybrid, tables on 2 servers, asynchronous, 1 backup");
    expect(words({ name: "parameter_server", shards: 3, staleness: 2, replicas: 1 })).toBe("Parameter server, staleness ≤ 2, 3 shards, 1 backup");
    expect(words({ name: "hybrid", prefetch: false })).toBe("Hybrid, asynchronous, prefetch false");
  });
});

describe("push ages", () => {
  it("are shares from age 0 to the widest", () => {
    expect(ageBars({ "0": 6, "2": 2 })).toEqual([{ age: 0, share: 0.75, more: false }, { age: 1, share: 0, more: false }, { age: 2, share: 0.25, more: false }]);
  });
  it("end with one bar for all that is older", () => {
    const bars = ageBars({ "0": 1, "40": 1 })!;
    expect(bars).toHaveLength(12);
    expect(bars[11]).toEqual({ age: 11, share: 0.5, more: true });
  });
  it("are nothing where none was counted", () => {
    expect(ageBars(undefined)).toBeNull();
    expect(ageBars({})).toBeNull();
    expect(ageBars({ "0": 0, x: 3 })).toBeNull();
  });
});
