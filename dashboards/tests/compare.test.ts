import { describe, expect, test } from "vitest";
import { axes, chosenMetric, columns, joined, label, sorted, text, upTo } from "../src/lib/compare";
import type { ComparedRow, Comparison, Curve } from "../src/types";

const curve = (value: (number | null)[], round: number[], per: number | null = 2): Curve => ({
  value, round, epoch: per === null ? null : round.map((at) => at / per), seconds: round.map((at) => at * 0.5),
});

const row = (id: string, values: Record<string, unknown>, loss: number | null, best = loss): ComparedRow => ({
  id, name: `job ${id}`, status: "SUCCEEDED", reason: null, values, rounds: 4, seconds: 2, metrics: { loss: { last: loss, best }, "batch loss": { last: 1, best: 0.5 } },
});

const found: Comparison = {
  differing: ["lr", "strategy"],
  metrics: ["loss", "batch loss"],
  columns: [
    ...["id", "name", "status"].map((name) => ({ name, kind: "fact", of: name })),
    ...["lr", "strategy"].map((name) => ({ name, kind: "value", of: name })),
    ...["rounds", "seconds"].map((name) => ({ name, kind: "fact", of: name })),
    ...["loss", "batch loss"].flatMap((of) => [{ name: of, kind: "last", of }, { name: `best ${of}`, kind: "best", of }]),
  ],
  lowest: { loss: true, "batch loss": true },
  rows: [row("a", { lr: 0.1, strategy: { name: "all_reduce" } }, 0.4), row("b", { lr: 0.01, strategy: { name: "parameter_server", staleness: 3, shards: null } }, null), row("c", { strategy: { name: "all_reduce" } }, 0.2)],
  curves: {
    a: { loss: curve([0.4], [4]), "batch loss": curve([4, 2, 1], [1, 2, 4]) },
    b: { "batch loss": curve([3, null], [2, 3], null) },
    c: { loss: curve([0.2], [4]) },
  },
};

describe("the table", () => {
  test("has a column for each value that differs, and two for each metric", () => {
    expect(columns(found).map((column) => column.head)).toEqual(["Job", "Status", "lr", "strategy", "Rounds", "Time", "loss", "lowest", "batch loss", "lowest"]);
    expect(columns({ ...found, lowest: { loss: false } })[7]!.head).toBe("highest");
  });
  test("shows a metric and a parameter with the name of a fact beside it", () => {
    const rows = [{ ...row("a", { "params.seconds": 7 }, 0.4), metrics: { seconds: { last: 9, best: null } } }];
    const more = [{ name: "params.seconds", kind: "value", of: "params.seconds" }, { name: "seconds", kind: "fact", of: "seconds" }, { name: "metrics.seconds", kind: "last", of: "seconds" }];
    expect(columns({ ...found, rows, columns: more }).map((column) => [column.head, column.value(rows[0]!)])).toEqual([["params.seconds", 7], ["Time", 2], ["metrics.seconds", 9]]);
  });
  test("has no best column for a metric whose name does not say which value is the best", () => {
    const heads = columns({ ...found, lowest: { loss: null, "batch loss": true } }).map((column) => column.head);
    expect(heads.slice(6)).toEqual(["loss", "batch loss", "lowest"]);
  });
  test("sorts numbers as numbers, and keeps rows without a value last in both directions", () => {
    const lr = columns(found).find((column) => column.key === "lr");
    expect(sorted(found.rows, lr, false).map((each) => each.id)).toEqual(["b", "a", "c"]);
    expect(sorted(found.rows, lr, true).map((each) => each.id)).toEqual(["a", "b", "c"]);
    const loss = columns(found).find((column) => column.key === "loss");
    expect(sorted(found.rows, loss, false).map((each) => each.id)).toEqual(["c", "a", "b"]);
    expect(sorted(found.rows, undefined, false).map((each) => each.id)).toEqual(["a", "b", "c"]);
  });
  test("writes values short", () => {
    expect([text(null), text(0.1), text(true), text([1, 2]), text("x")]).toEqual(["–", "0.1", "true", "[1,2]", "x"]);
    expect(text({ name: "parameter_server", staleness: 3, shards: null })).toBe("parameter_server: staleness 3");
    expect(label(found, found.rows[0]!)).toBe("lr 0.1, strategy all_reduce");
    expect(label({ ...found, differing: [] }, found.rows[0]!)).toBe("job a");
  });
});

describe("the chart", () => {
  test("shows the wanted metric, or the first with several points", () => {
    expect(chosenMetric(found, "loss")).toBe("loss");
    expect(chosenMetric(found, "nothing")).toBe("batch loss");
    expect(chosenMetric({ ...found, metrics: [], curves: {} }, null)).toBe(null);
  });
  test("offers epochs only if all jobs have them", () => {
    expect(axes(found, "loss")).toEqual(["round", "epoch", "seconds"]);
    expect(axes(found, "batch loss")).toEqual(["round", "seconds"]);
  });
  test("puts all curves on one axis", () => {
    expect(joined(found, "batch loss", "round", false)).toEqual({ x: [1, 2, 3, 4], y: [[4, 2, null, 1], [null, 3, null, null], [null, null, null, null]] });
    expect(joined(found, "loss", "seconds", false).x).toEqual([2]);
  });
  test("leaves out what a logarithmic axis cannot show", () => {
    const zero = { ...found, curves: { a: { loss: curve([1, 0, -1], [1, 2, 3]) } } };
    expect(joined(zero, "loss", "round", true).y[0]).toEqual([1, null, null]);
    expect(joined(zero, "loss", "round", false).y[0]).toEqual([1, 0, -1]);
  });
  test("reads the last known value at a position", () => {
    expect(upTo([null, 2, null, 1, null], 2)).toBe(2);
    expect(upTo([null, 2, null, 1, null], 9)).toBe(1);
    expect(upTo([null, null], 1)).toBe(null);
  });
});
