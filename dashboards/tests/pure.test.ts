/* The pure half of the page: smoothing, bucketing, formatting, cursors, words. */
import { describe, expect, it } from "vitest";
import { asCli, asCurl } from "../src/lib/commands";
import { backoff, read, write } from "../src/lib/cursor";
import { ema } from "../src/lib/ema";
import * as format from "../src/lib/format";
import { parse } from "../src/lib/json";
import { csv, lossData, mainMetric, metricData, metricNames, rateData, roundColumns, sampled } from "../src/lib/plot";
import { dataShare, mean, rate, Series } from "../src/lib/series";
import { share } from "../src/lib/status";
import { brief, current, describe as inWords, metricBound, shardWords, staleBound, target, words } from "../src/lib/strategy";
import { cost, judge } from "../src/lib/worker";
import { scaleText, workersText } from "../src/lib/workers";
import type { Job, MetricPoint, RoundPoint } from "../src/types";

const round = (n: number, loss: number | null, more: Partial<RoundPoint> = {}): RoundPoint =>
  ({ kind: "round", round: n, loss, samples: 10, seconds: 0.5, generation: 1, strategy: "all_reduce", ...more });
const rounds = (n: number, loss: (i: number) => number | null = (i) => 1 / (i + 1)): RoundPoint[] =>
  Array.from({ length: n }, (_, i) => round(i, loss(i)));
const evaluation = (n: number, accuracy: number): MetricPoint => ({ kind: "evaluation", round: n, metrics: { accuracy } });

describe("ema", () => {
  it("gives a constant back from its first value on", () => {
    for (const value of ema([3, 3, 3, 3], 0.9)) expect(value).toBeCloseTo(3, 12);
  });
  it("equals the weighted mean that it stands for", () => {
    const [a, b, c] = [1, 5, 2];
    const w = [0.25, 0.5, 1];
    expect(ema([a, b, c], 0.5)[2]).toBeCloseTo((w[0]! * a + w[1]! * b + w[2]! * c) / 1.75, 12);
  });
  it("leaves gaps where there is no number, and goes on behind them", () => {
    expect(ema([1, null, NaN, 1], 0.8)).toEqual([1, null, null, expect.closeTo(1, 12)]);
  });
  it("counts a bucket as its rounds", () => {
    const flat = ema([2, 2, 2, 2, 8, 8], 0.9);
    const bucketed = ema([2, 8], 0.9, [4, 2]);
    expect(bucketed[1]).toBeCloseTo(flat[5]!, 12);
  });
  it("is the raw curve at zero", () => expect(ema([1, 2, 3], 0)).toEqual([1, 2, 3]));
  it("does not depend on what comes later", () => {
    const values = Array.from({ length: 50 }, (_, i) => Math.sin(i));
    expect(ema(values, 0.95).slice(0, 20)).toEqual(ema(values.slice(0, 20), 0.95));
  });
});

describe("series", () => {
  it("keeps rounds as they came below its limit", () => {
    const series = new Series(100);
    series.add(rounds(80));
    expect(series.buckets).toHaveLength(80);
    expect(mean(series.buckets[4]!)).toBeCloseTo(0.2);
    expect(rate(series.buckets[4]!)).toBe(20);
  });
  it("holds its bound and loses nothing of minimum, maximum and mean", () => {
    const series = new Series(100);
    const all = rounds(5000, (i) => Math.cos(i) + 2);
    for (let i = 0; i < all.length; i += 37) series.add(all.slice(i, i + 37));
    expect(series.buckets.length).toBeLessThanOrEqual(100);
    expect(series.width).toBe(64);
    const losses = all.map((point) => point.loss!);
    expect(Math.min(...series.buckets.map((b) => b.min))).toBe(Math.min(...losses));
    expect(Math.max(...series.buckets.map((b) => b.max))).toBe(Math.max(...losses));
    const sum = series.buckets.reduce((s, b) => s + b.sum, 0);
    expect(sum).toBeCloseTo(losses.reduce((s, v) => s + v, 0), 6);
    expect(series.buckets.reduce((s, b) => s + b.rounds, 0)).toBe(5000);
  });
  it("aligns buckets to the round, so that the way the points came does not matter", () => {
    const [one, other] = [new Series(64), new Series(64)];
    one.add(rounds(1000));
    for (const point of rounds(1000)) other.add([point]);
    expect(other.buckets).toEqual(one.buckets);
    for (const bucket of one.buckets) expect(Math.floor(bucket.round / one.width)).toBe(Math.floor(bucket.end / one.width));
  });
  it("goes back when a new generation resumes from a checkpoint", () => {
    const series = new Series();
    series.add([...rounds(50), evaluation(20, 0.5), evaluation(40, 0.7)]);
    series.add([round(30, 9, { generation: 2 }), round(31, 8, { generation: 2 })]);
    expect(series.buckets).toHaveLength(32);
    expect(mean(series.buckets[30]!)).toBe(9);
    expect(series.evaluations.map((point) => point.round)).toEqual([20]);
    expect(series.resumes.map((mark) => mark.round)).toEqual([30]);
  });
  it("puts a late round into its place and ignores one that it has", () => {
    const series = new Series();
    series.add([round(0, 1), round(2, 3), round(1, 2), round(2, 99)]);
    expect(series.buckets.map(mean)).toEqual([1, 2, 3]);
  });
  it("counts and marks losses that are not numbers, once for each run of them", () => {
    const series = new Series();
    series.add([round(0, 1), round(1, null), round(2, null), round(3, 1), round(4, null)]);
    expect(series.badRounds).toBe(3);
    expect(series.firstBad).toBe(1);
    expect(series.nanMarks().map((mark) => mark.round)).toEqual([1, 4]);
    expect(mean(series.buckets[1]!)).toBeNull();
  });
  it("thins evaluations over the whole run and keeps the newest", () => {
    const series = new Series();
    for (let n = 1; n <= 5000; n++) series.add([evaluation(n, n / 5000)]);
    expect(series.evaluations.length).toBeLessThanOrEqual(1001);
    expect(series.evaluations[0]!.round).toBeLessThan(200);
    expect(series.evaluations.at(-1)!.round).toBe(5000);
  });
  it("counts the pulls of servers only", () => {
    const series = new Series();
    series.add([round(0, 1, { strategy: "parameter_server", staleness: { "0": 1, "2": 3 } }), round(1, 1, { strategy: "parameter_server", staleness: { "2": 1 } }), round(2, 1, { staleness: { "0": 4 } })]);
    expect([...series.staleness]).toEqual([[0, 1], [2, 4]]);
  });
  it("finds the phases", () => {
    const series = new Series();
    series.add([round(0, 1, { strategy: "parameter_server" }), round(1, 1, { strategy: "parameter_server" }), round(2, 1)]);
    expect(series.bands()).toEqual([{ from: 0, to: 1, strategy: "parameter_server" }, { from: 2, to: 2, strategy: "all_reduce" }]);
  });
});

describe("plot data", () => {
  it("puts evaluations at their rounds, and what comes after the last round at the last", () => {
    const series = new Series();
    series.add([...rounds(10), evaluation(4, 0.5), evaluation(10, 0.9)]);
    const data = lossData(series, 0.9, "accuracy", false);
    expect(data.evaluation[4]).toBe(0.5);
    expect(data.evaluation[9]).toBe(0.9);
    expect(data.x).toHaveLength(10);
  });
  it("leaves out what a logarithmic axis cannot show", () => {
    const series = new Series();
    series.add([round(0, 1), round(1, 0), round(2, -1)]);
    expect(lossData(series, 0, null, true).raw).toEqual([1, null, null]);
  });
  it("measures throughput as samples over seconds", () => {
    const series = new Series();
    series.add(rounds(3));
    expect(rateData(series).raw).toEqual([20, 20, 20]);
  });
  it("names the metric to show", () => {
    const of = (metrics: Record<string, number>, run: string | null = null, lowest: Record<string, boolean | null> = {}) =>
      mainMetric([], { metrics, lowest, spec: { workload: null, run }, progress: null } as unknown as Job);
    expect(mainMetric([{ kind: "evaluation", round: 1, metrics: { loss: 1, f1: 2, accuracy: 3 } }], null)).toBe("accuracy");
    expect(of({ loss: 1, rmse: 2 })).toBe("rmse");
    expect(of({ loss: 1 })).toBeNull();
    expect(of({ grad_norm: 1, val_error: 2 }, "a.py:f", { grad_norm: null, val_error: true })).toBe("val_error");
    expect(of({ grad_norm: 1, lr: 0.1 }, "a.py:f", { grad_norm: null, lr: null })).toBeNull();
    expect(of({ skill: 1, f1: 2 }, null, { skill: null, f1: false })).toBe("f1");
    expect(of({ skill: 1 }, null, { skill: null })).toBe("skill");
  });
  it("samples evenly with both ends, and writes CSV", () => {
    expect(sampled([0, 1, 2, 3, 4, 5, 6, 7, 8], 3)).toEqual([0, 4, 8]);
    const series = new Series();
    series.add([round(0, 0.5), round(1, null)]);
    expect(csv(series)).toBe("round,round_end,loss_mean,loss_min,loss_max,samples_per_second\n0,0,0.5,0.5,0.5,20\n1,1,,,,20\n");
  });
  it("leaves out columns of the table that no round has", () => {
    const heads = (...points: MetricPoint[]) => {
      const series = new Series();
      series.add(points);
      return roundColumns(series).map(({ head }) => head);
    };
    expect(heads(round(0, 0.5), round(1, null))).toEqual(["Round", "Loss", "Samples/s"]);
    expect(heads(round(0, null))).toEqual(["Round", "Loss", "Samples/s"]);
    expect(heads({ ...round(0, null), samples: 0, epsilon: 1.5 } as MetricPoint)).toEqual(["Round", "Epsilon"]);
  });
});

describe("cursor", () => {
  it("is read and written", () => {
    expect(read("m123.l456.e7")).toEqual({ m: 123, l: 456, e: 7 });
    expect(write({ m: 1, l: 0, e: 68719476736 })).toBe("m1.l0.e68719476736");
    expect(write(read("l5"))).toBe("l5");
    expect(read("nonsense.m-1.x3")).toEqual({});
    expect(read(null)).toEqual({});
  });
  it("backs off up to a limit, with jitter around it", () => {
    expect(backoff(0, 0.5)).toBe(500);
    expect(backoff(3, 0.5)).toBe(4000);
    expect(backoff(30, 0.5)).toBe(15_000);
    expect(backoff(30, 0)).toBeLessThan(backoff(30, 0.99));
  });
});

describe("json", () => {
  it("reads bare NaN and Infinity as null, but not inside strings", () => {
    expect(parse('{"a": NaN, "b": [-Infinity, 1], "c": "x: NaN, y"}')).toEqual({ a: null, b: [null, 1], c: "x: NaN, y" });
    expect(() => parse("{nope}")).toThrow(SyntaxError);
  });
});

describe("format", () => {
  it.each([
    [0.04, "0.0 s"], [0.99, "0.9 s"], [12.7, "12 s"], [185, "3 min 05 s"], [7440, "2 h 04 min"], [266_400, "3 d 2 h"], [null, "–"], [-1, "–"],
  ])("duration %s", (value, shown) => expect(format.duration(value)).toBe(shown));
  it.each([[0, "0 B"], [1536, "1.5 KiB"], [12 * 2 ** 20, "12.0 MiB"], [undefined, "–"]])("bytes %s", (value, shown) => expect(format.bytes(value)).toBe(shown));
  it.each([[0.41234, "0.4123"], [0.00012345, "1.23e-4"], [12.3456, "12.35"], [0, "0"], [NaN, "–"], [null, "–"]])("loss %s", (value, shown) => expect(format.loss(value)).toBe(shown));
  it.each([[0.734, "0.73"], [12.44, "12.4"], [1234, "1,234"], [1.23e6, "1.23M"]])("short %s", (value, shown) => expect(format.short(value)).toBe(shown));
  it.each([[2, "just now"], [12, "12 s ago"], [200, "3 min ago"], [7300, "2 h ago"], [90_000, "1 d ago"]])("ago %s", (value, shown) => expect(format.ago(value)).toBe(shown));
  it("shows shares as percentages and the rest as numbers", () => {
    expect(format.metric("accuracy", 0.97222)).toBe("97.22%");
    expect(format.metric("rmse", 0.5)).toBe("0.5000");
  });
  it("counts nouns", () => {
    expect(format.plural(1, "worker")).toBe("1 worker");
    expect(format.plural(1500, "round")).toBe("1,500 rounds");
  });
});

describe("strategy", () => {
  const server = { name: "parameter_server", shards: 2, staleness: 3 };
  it("says it in words, whatever its form", () => {
    expect(words({ name: "all_reduce" })).toBe("All-reduce");
    expect(words(server)).toBe("Parameter server, staleness ≤ 3, 2 shards");
    expect(inWords("parameter_server:staleness=none,shards=1")).toBe("Parameter server, asynchronous, 1 shard");
    expect(inWords([{ epochs: 2, strategy: { ...server, staleness: 0 } }, { strategy: { name: "all_reduce" } }]))
      .toBe("Parameter server, synchronous, 2 shards → All-reduce");
    expect(words({ name: "own_way", every: 8 })).toBe("Own way, every 8");
    expect(brief(server)).toBe("Parameter server, staleness ≤ 3");
    expect(shardWords(server)).toBe("2 shards");
  });
  it("knows the bound, and the strategy at work now", () => {
    expect(staleBound(server)).toBe(3);
    expect(staleBound({ ...server, staleness: null })).toBeNull();
    expect(staleBound({ name: "all_reduce" })).toBe(0);
    expect(current("parameter_server", [{ epochs: 1, strategy: server }, { strategy: { name: "all_reduce" } }])).toEqual(server);
  });
});

describe("commands", () => {
  const spec = { workload: "examples/digits.py:Digits", strategy: { name: "all_reduce" }, workers: 2, epochs: 3, steps: null, name: "it's: on" };
  it("writes a job file that YAML reads as the spec", () => {
    expect(asCli(spec)).toContain('workload: examples/digits.py:Digits\nstrategy: {"name":"all_reduce"}\nworkers: 2\nepochs: 3\nname: "it\'s: on"\nYAML');
    expect(asCli({ workload: "a:B", name: "yes" })).toContain('name: "yes"');
  });
  it("names environment variables without a value, as the service's own", () => {
    expect(asCli({ ...spec, env: ["A", "B"] })).toContain('env: {"A":null,"B":null}\n');
    expect(asCurl({ ...spec, env: ["A"] }, "http://x")).toContain('"env": {"A":null}');
  });
  it("quotes for the shell", () => {
    const line = asCurl(spec, "http://127.0.0.1:8420");
    expect(line).toContain(`it'\\''s: on`);
    expect(line).not.toContain("steps");
  });
});

describe("the number of workers", () => {
  const counts = { least: 2, most: 8, now: 4, allowed: 4, requested: null };
  const job = (elastic: typeof counts | null) => ({ spec: { workers: 2 }, elastic }) as unknown as Job;
  it("is a range for an elastic job", () => {
    expect(workersText(job(counts))).toBe("4 of 2 to 8 workers");
    expect(workersText(job(null))).toBe("2 workers");
  });
  it("says what follows from a request", () => {
    expect(scaleText(counts, 3)).toBe("1 worker leaves; the others continue from memory. It was submitted with 2 to 8 workers.");
    expect(scaleText(counts, 2)).toContain("2 workers leave;");
    expect(scaleText(counts, 6)).toContain("grows to 6 workers");
    expect(scaleText(counts, 4)).toContain("keeps its 4 workers");
  });
});

describe("workers", () => {
  it("blames own computing time, not waiting", () => {
    const fast = { compute: 0.3, wait: 0.6, move: 0.1, samples_per_second: 100 };
    const verdicts = judge([{ rank: 0, ...fast }, { rank: 1, ...fast }, { rank: 2, compute: 0.9, wait: 0, move: 0.1, samples_per_second: 100 }]);
    expect(verdicts.map((verdict) => verdict.straggler)).toEqual([false, false, true]);
    expect(verdicts[2]?.ratio).toBeCloseTo(3);
  });
  it("does not call a worker slow that learns more samples in its time", () => {
    const verdicts = judge([{ rank: 0, compute: 0.9, samples_per_second: 300 }, { rank: 1, compute: 0.3, samples_per_second: 100 }]);
    expect(verdicts.some((verdict) => verdict.straggler)).toBe(false);
  });
  it("says nothing without a measurement", () => {
    expect(cost({ rank: 0 })).toBeNull();
    expect(judge([{ rank: 0 }])[0]).toEqual({ rank: 0, cost: null, ratio: null, straggler: false });
  });
});

describe("status", () => {
  const job = { id: "1", name: "digits", status: "RUNNING", reason: null, spec: { workload: "a.py:A", strategy: { name: "all_reduce" } }, progress: { round: 5, rounds: 20 } } as Job;
  it("knows how far a job is", () => {
    expect(share(job)).toBe(0.25);
    expect(share({ ...job, status: "SUCCEEDED", progress: null })).toBe(1);
    expect(share({ ...job, progress: null })).toBeNull();
  });
});

describe("metrics of the user's own", () => {
  const told = (n: number, more: Record<string, number>): RoundPoint => round(n, 1, more as Partial<RoundPoint>);
  it("are those of training and of evaluations, without what all jobs and strategies tell", () => {
    const series = new Series();
    series.add([told(0, { perplexity: 9, met: 1, data: 0.1, data_share: 0.2, compute: 0.2 }), { kind: "evaluation", round: 1, metrics: { loss: 1, perplexity: 8, personal_accuracy: 1 } }]);
    expect(metricNames(series)).toEqual(["loss", "perplexity"]);
    expect(metricData(series, "perplexity")).toEqual({ x: [0], training: [9], evaluation: [8] });
  });
  it("keep the newest value of a bucket of rounds", () => {
    const series = new Series(4);
    series.add(Array.from({ length: 8 }, (_, i) => told(i, { norm: i })));
    const { x, training, evaluation } = metricData(series, "norm");
    expect(training).toEqual(x);
    expect(evaluation.every((value) => value === null)).toBe(true);
  });
});

describe("the share of the time that waits for data", () => {
  it("is that of all rounds of a bucket", () => {
    const series = new Series(2);
    series.add([round(0, 1, { data: 0.5 }), round(1, 1, { data: 0.25 }), round(2, 1), round(3, 1)]);
    expect(series.buckets.map(dataShare)).toEqual([0.75, 0]);
    expect(rateData(series).data).toEqual([0.75, 0]);
  });
});

describe("metrics of clients", () => {
  it("are limited under masks and with noise only", () => {
    const secure = { name: "fedavg", client_evaluation: true, secure: { name: "secagg" } };
    expect(metricBound(secure)).toBe(1);
    expect(metricBound({ ...secure, metric_bound: 5 })).toBe(5);
    expect(metricBound({ name: "fedavg", client_evaluation: true })).toBeNull();
    expect(metricBound({ ...secure, client_evaluation: false })).toBeNull();
  });
});

describe("a job of a function", () => {
  const spec = { workload: null, run: "train.py:train_fn", params: { lr: 0.3 } };
  it("is named and submitted again by its function", () => {
    expect(target(spec)).toBe("train.py:train_fn");
    expect(target({ workload: "a:B" })).toBe("a:B");
    expect(asCli(spec)).toContain("run: train.py:train_fn\nparams:");
    expect(asCurl(spec, "http://x")).not.toContain("workload");
  });
});
