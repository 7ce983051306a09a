/* A pipeline's schedule and the cost of a step, as the job page shows them. */
import { describe, expect, it } from "vitest";
import { costRows, newest, timeline } from "../src/lib/schedule";
import { brief, describe as inWords, usesPipeline, usesServer, words } from "../src/lib/strategy";
import type { JobEvent } from "../src/types";

const event = (kind: string, seq: number, facts: Record<string, unknown> = {}): JobEvent => ({ kind, seq, time: 0, message: "", ...facts });
const ONE_F_ONE_B = [
  [["0F0", 0, 1], ["0F1", 1, 2], ["0B0", 4, 6], ["0B1", 7, 9]],
  [["1F0", 1, 2], ["1B0", 2, 4], ["1F1", 4, 5], ["1B1", 5, 7]],
];

describe("a timeline", () => {
  it("knows who waits and what is held", () => {
    const found = timeline(ONE_F_ONE_B)!;
    expect(found.length).toBe(9);
    expect(found.idle).toBeCloseTo(1 / 3, 12);
    expect(found.idles).toEqual([expect.closeTo(1 / 3, 12), expect.closeTo(1 / 3, 12)]);
    expect(found.held).toEqual([2, 1]);
    expect(found.rows[1]![3]).toEqual({ kind: "B", chunk: 1, turn: 0, micro: 1, start: 5, end: 7 });
  });
  it("holds an activation until its weights' gradient where there is one", () => {
    expect(timeline([[["0F0", 0, 1], ["0B0", 1, 2], ["0F1", 2, 3], ["0W0", 3, 4], ["0B1", 4, 5], ["0W1", 5, 6]]])!.held).toEqual([2]);
  });
  it("counts the chunks of a worker", () => {
    const found = timeline([[["0F0", 0, 1], ["2F0", 2, 3]], [["1F0", 1, 2], ["3F0", 3, 4]]])!;
    expect(found.rows.map((row) => row.map((each) => each.turn))).toEqual([[0, 1], [0, 1]]);
  });
  it("is none where an event is not one", () => {
    for (const wrong of [undefined, null, [], "x", [[["F0", 0, 1]]], [[["0F0", "a", 1]]], [[["0F0", 0, 0]]], [[null]], [[]]]) expect(timeline(wrong)).toBeNull();
  });
  it("is that of the newest event", () => {
    const events = [event("schedule", 0, { theory: 1 }), event("phase", 1), event("schedule", 2, { theory: 2 }), event("costs", 3)];
    expect(newest(events, "schedule")?.["theory"]).toBe(2);
    expect(newest(events, "none")).toBeUndefined();
  });
});

describe("the cost of a step", () => {
  it("stands beside its formula", () => {
    const rows = costRows(event("costs", 0, {
      measured: { bytes: 452_192, stage_bytes: 32_768, messages: 16, idle: 0.25, activations: [2, 1], imbalance: 0.12 },
      formula: { bytes: 451_152, idle: 0.2, activations: [2, 1], traffic: [{ axis: "data", bytes: 1, messages: 9 }, { axis: "stage", bytes: 32_768, messages: 16 }] },
    }));
    expect(rows.map((row) => row.what)).toHaveLength(6);
    expect(rows[1]).toMatchObject({ what: "Of this between stages" });
    expect(rows[1]!.measured).toBe(rows[1]!.formula);
    expect(rows[2]).toEqual({ what: "Messages between stages", measured: "16", formula: "16" });
    expect(rows[3]).toEqual({ what: "Stages idle", measured: "25.0%", formula: "20.0%" });
    expect(rows[4]).toEqual({ what: "Activations held", measured: "2, 1", formula: "2, 1" });
  });
  it("is empty before there is any", () => {
    expect(costRows(undefined)).toEqual([]);
    expect(costRows(event("costs", 0, { measured: {}, formula: null }))).toEqual([]);
  });
});

describe("replicas of several workers in words", () => {
  const pipeline = { name: "pipeline", stages: 4, micro_batches: 8, schedule: "zero_bubble", chunks: 1 };
  it("says what a replica is, in all forms", () => {
    const said = "All-reduce, pipeline of 4 stages, 8 micro-batches, zero bubble";
    expect(words({ name: "all_reduce", replica: pipeline })).toBe(said);
    expect(inWords("all_reduce:replica=pipeline(stages=4,micro_batches=8,schedule=zero_bubble)")).toBe(said);
    expect(words({ name: "parameter_server", shards: 2, replica: { name: "tensor_parallel", size: 2 } })).toBe("Parameter server, 2 shards, tensor parallel over 2");
    expect(inWords("pipeline:stages=2,micro_batches=4,stage=tensor_parallel(size=2)")).toBe("Pipeline of 2 stages, 4 micro-batches, 1f1b, each stage tensor parallel over 2");
    expect(brief("all_reduce:replica=pipeline(stages=2,chunks=2,schedule=interleaved)")).toContain("2 stages x 2 chunks");
  });
  it("knows a pipeline and servers", () => {
    expect(usesPipeline({ name: "all_reduce", replica: pipeline })).toBe(true);
    expect(usesPipeline("pipeline:stages=2")).toBe(true);
    expect(usesPipeline([{ epochs: 1, strategy: { name: "all_reduce" } }, { strategy: { name: "downpour", replica: pipeline } }])).toBe(true);
    for (const other of ["all_reduce", "tensor_parallel:size=2", "parameter_server:shards=2"]) expect(usesPipeline(other)).toBe(false);
    expect(usesServer("downpour:n_push=5")).toBe(true);
    expect(words({ name: "downpour", n_push: 5, n_fetch: 2, shards: 2, adagrad: null, warm_start: 0 })).toBe("Downpour, pushes every 5, fetches every 2, 2 shards");
  });
});
