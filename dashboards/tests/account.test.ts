import { describe, expect, it } from "vitest";
import { PARTS, strips, used } from "../src/lib/account";

const account = {
  goodput: 0.5,
  members: {
    "shard-0": { idle: 8, compute: 2 },
    "worker-10": { compute: 5, waiting: 5 },
    "worker-2": { waiting: 1, compute: 3, data: 0, start: 4 },
  },
  verdict: "worker-2 holds up the others",
  guilty: ["worker-2"],
};

describe("strips of time", () => {
  it("has workers by rank first, and parts in their order, without those of no time", () => {
    const found = strips(account);
    expect(found.map((strip) => strip.name)).toEqual(["worker-2", "worker-10", "shard-0"]);
    expect(found[0]!.parts.map((each) => [each.part, each.share])).toEqual([["compute", 3 / 8], ["waiting", 1 / 8], ["start", 1 / 2]]);
    expect(found.map((strip) => strip.guilty)).toEqual([true, false, false]);
  });

  it("has shares that add up to one", () => {
    for (const strip of strips(account)) expect(strip.parts.reduce((sum, each) => sum + each.share, 0)).toBeCloseTo(1);
  });

  it("is empty where nothing is known", () => {
    expect(strips(null)).toEqual([]);
    expect(strips({ goodput: null, members: {} })).toEqual([]);
    expect(strips({ goodput: null, members: { "worker-0": {} } })).toEqual([]);
  });

  it("names in the legend only what is drawn", () => {
    expect(used(strips(account))).toEqual(["compute", "waiting", "start", "idle"]);
    expect(Object.keys(PARTS)).toHaveLength(10);
  });
});
