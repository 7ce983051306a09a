/* Jobs that returned to an earlier state: the page shows each round once, the later one. The Python readers have the same table. */
import { describe, expect, it } from "vitest";
import { mean, Series } from "../src/lib/series";
import type { MetricPoint } from "../src/types";
import table from "../../tests/fixtures/returned_rounds.json";

interface Run {
  points: MetricPoint[];
  losses: [number, number][];
  errors: [number, number][];
}

describe("a job that returned to an earlier state", () => {
  for (const [name, run] of Object.entries(table as unknown as Record<string, Run>)) {
    for (const at of [1, 5, 1000]) {
      it(`shows each round once: ${name}, ${at} points at a time`, () => {
        const series = new Series();
        for (let i = 0; i < run.points.length; i += at) series.add(run.points.slice(i, i + at));
        expect(series.buckets.map((bucket) => [bucket.round, mean(bucket)])).toEqual(run.losses);
        expect(series.evaluations.map((point) => [point.round, point.metrics["error"]])).toEqual(run.errors);
      });
    }
  }
});
