/* Clients by round, what they hold, and meetings: the pure half of their cards. */
import { describe, expect, it } from "vitest";
import { folded } from "../src/lib/events";
import { meetings, residuals } from "../src/lib/apart";
import { bestOf, clientMap, Cohorts, learnt, presence, reason, reasons, skew, staleUpdates, tallies } from "../src/lib/federated";
import { claimOf, isPrivate, shown, spentShare } from "../src/lib/privacy";
import { Series } from "../src/lib/series";
import { attack, describe as inWords, hasRealClients, hasStaleness, isFederated, label, length, meetsNowAndThen, staleBound, usesAdmm } from "../src/lib/strategy";
import type { JobEvent, MetricPoint } from "../src/types";

const event = (kind: string, facts: Record<string, unknown>, seq = 0): JobEvent => ({ seq, time: 0, kind, message: "", ...facts });
const cohort = (round: number, facts: Record<string, unknown> = {}): JobEvent =>
  event("cohort", { round, sampled: 4, replied: 2, trained: ["a", "b", "d"], dropped: [["c", "deadline"]], rejected: [["d", "update is not finite"]], seconds: 10, ...facts }, round);
const point = (round: number, told: Record<string, number> = {}, generation = 1): MetricPoint =>
  ({ kind: "round", round, loss: 1, samples: 10, seconds: 0.1, bytes: 100, generation, ...told });

function held(...events: JobEvent[]): Cohorts {
  const cohorts = new Cohorts();
  for (const each of events) cohorts.take(each);
  return cohorts;
}

describe("a private job", () => {
  const claim = event("privacy", { delta: 1e-5, budget: 8, unit: "client", noise_multiplier: 1.1, neighbours: "one client is added or removed", proves: true, holds_against: ["a", "b"], trusted: "c", assumes: ["d"] }, 3);
  it("shows what its rounds have spent, of the budget", () => {
    const series = new Series();
    expect(claimOf([], series)).toBe(null);
    expect(claimOf([claim], series)).toMatchObject({ proves: true, notProven: "" });
    expect(claimOf([{ ...claim, proves: false, not_proven: "delta=0.5" }], series)).toMatchObject({ notProven: "delta=0.5" });
    expect(claimOf([claim], series)).toMatchObject({ epsilon: null, releases: 0, budget: 8 });
    series.add([point(1, { epsilon: 1.5, releases: 1 }), point(2, { epsilon: 2, releases: 2 })]);
    const found = claimOf([event("started", {}), claim], series)!;
    expect(found).toMatchObject({ epsilon: 2, releases: 2, delta: 1e-5, holdsAgainst: ["a", "b"], assumes: ["d"] });
    expect(spentShare(found)).toBe(0.25);
    expect(spentShare({ ...found, budget: null })).toBe(null);
  });
  it("is known by its strategy", () => {
    expect(isPrivate("fedavg:privacy=dp(noise_multiplier=1.1)")).toBe(true);
    expect(isPrivate({ name: "fedavg", privacy: { name: "dp" } })).toBe(true);
    expect(isPrivate("fedavg:fraction=0.1")).toBe(false);
  });
  it("does not report its training loss, which is no fault", () => {
    const series = new Series();
    series.add([{ ...point(1, { epsilon: 1 }), loss: null } as MetricPoint, { ...point(2), loss: null } as MetricPoint]);
    expect(series.badRounds).toBe(1);
  });
  it("counts a void round apart from a loss that is not a number", () => {
    const series = new Series();
    series.add([{ ...point(1, { void: 1 }), loss: null } as MetricPoint, { ...point(2), loss: null } as MetricPoint]);
    expect([series.voidRounds, series.badRounds, series.firstBad]).toEqual([1, 1, 2]);
  });
  it("has short words for its strategy", () => {
    expect(inWords("fedavg:privacy=dp(noise_multiplier=1.1,epsilon=8)")).toBe("FedAvg, private, ε ≤ 8");
    expect(inWords({ name: "fedavg", privacy: { name: "dp", noise_multiplier: 1.1, epsilon: null }, secure: { name: "secagg" } })).toBe("FedAvg, private, noise 1.1, secure sums");
  });
  it("writes numbers in three digits", () => {
    expect([shown(4.4971), shown(1e-5), shown(0), shown(Infinity), shown(null)]).toEqual(["4.5", "1e-5", "0", "∞", "–"]);
  });
});

describe("clients by round", () => {
  it("are told by the event, and by the point where the event is no longer held", () => {
    const series = new Series();
    series.add([point(1, { sampled: 9, replied: 6, dropped: 1, rejected: 2 }), point(2)]);
    expect(tallies(series.buckets, held(cohort(2)))).toEqual([
      { round: 1, sampled: 9, counted: 6, dropped: 1, rejected: 2, seconds: null },
      { round: 2, sampled: 4, counted: 2, dropped: 1, rejected: 1, seconds: 10 },
    ]);
  });
  it("take only their own events", () => {
    const cohorts = new Cohorts();
    expect(cohorts.take(event("started", {}))).toBe(false);
    expect(cohorts.take(event("cohort", {}))).toBe(false); // nothing to show: it stays among the events
    expect(cohorts.take(cohort(1))).toBe(true);
    expect(cohorts.take(event("clients", { names: ["a"], sizes: [3] }))).toBe(false);
    expect(cohorts.map?.rows).toBe(3);
    cohorts.take(event("clients", { names: ["a", "b"], sizes: [3, 4] })); // one has joined late
    expect([cohorts.map?.count, cohorts.map?.rows]).toEqual([2, 7]);
  });
  it("go back with the job to its checkpoint", () => {
    const cohorts = held(cohort(1), cohort(2), cohort(3), cohort(2, { sampled: 7 }));
    expect([...cohorts.rounds.keys()]).toEqual([1, 2]);
    expect(cohorts.rounds.get(2)?.sampled).toBe(7);
  });
  it("stay bounded", () => {
    const cohorts = held(...Array.from({ length: 2500 }, (_, i) => cohort(i)));
    expect(cohorts.rounds.size).toBe(2000);
    expect(Math.min(...cohorts.rounds.keys())).toBe(500);
  });
  it("say why, the commonest first, whatever the numbers", () => {
    const cohorts = held(cohort(1), cohort(2, { rejected: [] }), cohort(3, { dropped: [["a", "31.5 s, of at most 30"], ["b", "44 s, of at most 30"], ["c", "33 s, of at most 30"]], rejected: [] }));
    expect(reasons(cohorts.rounds.values())).toEqual([
      { fate: "dropped", why: "… s, of at most …", count: 3 },
      { fate: "dropped", why: "past the deadline", count: 2 },
      { fate: "rejected", why: "update is not finite", count: 1 },
    ]);
    expect(reason("norm 1.5e+12 is above -3")).toBe("norm … is above …");
    expect(reason("int64 overflow")).toBe("int64 overflow");
  });
  it("are known by client", () => {
    const seen = presence(held(cohort(1), cohort(4)).rounds.values());
    expect(seen.get("a")).toEqual(new Map([[1, "counted"], [4, "counted"]]));
    expect(seen.get("d")?.get(4)).toBe("rejected");
    expect(seen.get("e")).toBeUndefined();
  });
  it("count the versions that updates were late by", () => {
    const ages = staleUpdates(held(cohort(1, { staleness: { 0: 3, 2: 1 } }), cohort(2, { staleness: { 0: 1 } })).rounds.values());
    expect([...ages]).toEqual([[0, 4], [2, 1]]);
  });
});

describe("what was learnt", () => {
  it("has a best value in the direction that the service states", () => {
    expect([bestOf([0.2, null, 0.5, 0.1], false), bestOf([0.2, null, 0.5, 0.1], true), bestOf([null], true)]).toEqual([0.5, 0.1, null]);
  });
  const series = new Series();
  series.filedBack = 1;
  series.add([1, 2, 3].map((done) => ({ kind: "evaluation" as const, round: done, metrics: { accuracy: done / 10, ...(done === 3 ? { personal_accuracy: 0.9 } : {}) } })));
  const { evaluations } = series;
  const rounds = tallies([], held(cohort(0, { seconds: 5 }), cohort(1, { seconds: 7 }), cohort(2, { seconds: null })));
  it("is read by round, counted as the rounds' own events count: from 0", () => {
    expect(learnt(evaluations, "accuracy", rounds, false)).toEqual({ x: [0, 1, 2], global: [0.1, 0.2, 0.3], personal: [null, null, 0.9] });
  });
  it("is read by virtual time, which always grows", () => {
    expect(learnt(evaluations, "accuracy", rounds, true)).toEqual({ x: [5, 12], global: [0.1, 0.2], personal: [null, null] });
  });
});

describe("an evaluation filed at its round", () => {
  it("goes when its round is made again", () => {
    const series = new Series();
    series.filedBack = 1;
    series.add([point(0), point(1), { kind: "evaluation", round: 1, metrics: { loss: 1 } }, { kind: "evaluation", round: 2, metrics: { loss: 1 } }, point(1, {}, 2)]);
    expect(series.evaluations.map((each) => each.round)).toEqual([0]);
  });
});

describe("the map of clients", () => {
  it("is read from its event", () => {
    const map = clientMap({ clients: 1000, rows: 5000, names: ["a", "b", "c"], sizes: [4, 2, 9], labels: ["0", "1"], counts: [[4, 0], [1, 1], [3, 6]] })!;
    expect([map.count, map.rows, map.smallest, map.median, map.largest]).toEqual([1000, 5000, 2, 4, 9]);
    expect(skew(map)).toBeCloseTo((1 + 0.5 + 2 / 3) / 3);
  });
  it("needs no labels, and is none without names", () => {
    expect(skew(clientMap({ names: ["a"], sizes: [1] })!)).toBeNull();
    expect(clientMap({ message: "clients" })).toBeNull();
  });
});

describe("meetings", () => {
  it("add up with what they moved", () => {
    const series = new Series();
    series.add([1, 2, 3, 4].map((n) => point(n, { met: n % 2 ? 0 : 1 })));
    expect(meetings(series.buckets)).toEqual({ x: [1, 2, 3, 4], bytes: [100, 200, 300, 400], met: [0, 1, 1, 2], times: 2, last: 4, rounds: 4 });
  });
  it("are none where no strategy tells of them", () => {
    const series = new Series();
    series.add([point(1)]);
    expect(meetings(series.buckets)).toBeNull();
    expect(residuals(series.buckets)).toBeNull();
  });
  it("are kept where rounds are put together", () => {
    const series = new Series(100);
    series.add(Array.from({ length: 1000 }, (_, i) => point(i, { met: i % 10 === 0 ? 1 : 0, penalty: i })));
    expect(series.width).toBeGreaterThan(1);
    const found = meetings(series.buckets)!;
    expect([found.times, found.bytes.at(-1), found.rounds]).toEqual([100, 100_000, 1000]);
    expect(series.buckets.at(-1)!.told!["penalty"]).toBe(999); // of several rounds the newest
  });
});

describe("residuals", () => {
  it("say when both were below their thresholds, and leave out what a logarithm has no place for", () => {
    const series = new Series();
    const stops = { primal_stop: 0.1, dual_stop: 0.2, penalty: 5 };
    series.add([point(1), point(2, { primal: 3, dual: 0, ...stops }), point(3, { primal: 0.05, dual: 0.3, ...stops }), point(4, { primal: 0.05, dual: 0.1, ...stops })]);
    const found = residuals(series.buckets)!;
    expect(found.x).toEqual([2, 3, 4]);
    expect(found.dual).toEqual([null, 0.3, 0.1]);
    expect(found.reached).toBe(4);
  });
  it("reach nothing where there is no stop rule", () => {
    const series = new Series();
    series.add([point(1, { primal: 0, dual: 0 })]);
    expect(residuals(series.buckets)?.reached).toBeNull();
  });
});

describe("events", () => {
  it("fold runs of checkpoints, and nothing else", () => {
    const kinds = ["finished", "checkpoint", "checkpoint", "checkpoint", "warning", "warning", "checkpoint"];
    const lines = folded(kinds.map((kind, i) => event(kind, {}, kinds.length - i)));
    expect(lines.map((line) => [line.event.kind, line.event.seq, line.more])).toEqual(
      [["finished", 7, 0], ["checkpoint", 6, 2], ["warning", 3, 0], ["warning", 2, 0], ["checkpoint", 1, 0]]);
  });
});

describe("strategies that learn apart", () => {
  const whole = { name: "fed_avg", fraction: 0.5, local_epochs: 5, local_steps: null, batch_size: 10, rule: { name: "krum", f: 4 }, dropout: 0.5, min_replies: 1, evaluate_every: 1 };
  it("read as their papers spell them, without what goes without saying", () => {
    expect(inWords(whole)).toBe("FedAvg, 50% of the clients per round, 5 local epochs, batches of 10, krum(f=4), 50% drop out");
    expect(inWords("fedprox:mu=0.1,fraction=1.0")).toBe("FedProx, mu 0.1");
    expect(inWords("local_sgd:period=8")).toBe("Local SGD, averages every 8 rounds");
    expect(inWords({ name: "diloco", period: 1, compression: null, outer_lr: 0.7 })).toBe("DiLoCo, averages every round, outer lr 0.7");
    expect(label({ name: "admm" })).toBe("ADMM");
    expect(length({ workload: "w", strategy: whole, epochs: 30 })).toBe("30 rounds");
    expect(length({ workload: "w", strategy: "local_sgd", epochs: 1 })).toBe("1 epoch");
  });
  it("say whether clients are real, and what attackers do", () => {
    expect([hasRealClients("fedavg:clients=remote(least=3)"), hasRealClients({ name: "fedavg", clients: { name: "remote", least: 3 } })]).toEqual([true, true]);
    expect([hasRealClients({ name: "fedavg", clients: null }), hasRealClients(whole)]).toEqual([false, false]);
    expect([attack("fedavg:attack=sign_flip(clients=2,scale=5)"), attack({ name: "fedavg", attack: { name: "nan", clients: 1 } }), attack(whole)])
      .toEqual(["sign_flip(clients=2,scale=5)", "nan(clients=1)", null]);
  });
  it("have the cards of their kind", () => {
    expect([isFederated(whole), meetsNowAndThen(whole), isFederated("all_reduce")]).toEqual([true, false, false]);
    expect([meetsNowAndThen("local_sgd"), meetsNowAndThen("admm"), usesAdmm("admm")]).toEqual([true, false, true]);
    expect([hasStaleness("fedbuff"), hasStaleness("fedavg"), staleBound("fedbuff:max_staleness=7"), staleBound("fedbuff")]).toEqual([true, false, 7, null]);
  });
});
