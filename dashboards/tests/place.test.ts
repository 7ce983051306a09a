/* Where a job keeps what it learns, and which loss of it is shown. */
import { describe, expect, it } from "vitest";
import { describeJob, groupOf, shownLoss } from "../src/lib/place";
import type { Job } from "../src/types";

const job = (more: Partial<Job>): Job => ({
  id: "1", name: "j", status: "RUNNING", reason: null, attempt: 1, created_at: "", started_at: null, finished_at: null,
  progress: null, metrics: null, checkpoint: null, stop_requested: false, spec: { workload: "a:B" }, ...more,
});
const strategy = { name: "parameter_server", shards: 1, staleness: 3, replicas: 0 };

describe("a job on a group", () => {
  it("has the group's servers, not its strategy's", () => {
    const spec = { workload: "a:B", strategy, server_group: "shared" };
    const servers = ["alive", "alive", "dead"].map((state, i) => ({ name: `server-${i}`, state }));
    const on = job({ spec, progress: { server_group: { name: "shared", replicas: 1, servers } } });
    expect([describeJob(on), groupOf(on)]).toEqual(["Parameter server, staleness ≤ 3", "shared (2 servers, 1 backup)"]);
    expect(groupOf(job({ spec }))).toBe("shared");
    expect([describeJob(job({ spec: { workload: "a:B", strategy } })), groupOf(job({}))]).toEqual(["Parameter server, staleness ≤ 3, 1 shard", ""]);
  });
});

describe("the loss", () => {
  it("is the evaluation's where there is one, else the last batch's", () => {
    expect(shownLoss(job({ progress: { loss: 0.5 } }))).toEqual({ value: 0.5, of: "last batch" });
    expect(shownLoss(job({ progress: { loss: 0.5, metrics: { loss: 0.4 } } }))).toEqual({ value: 0.4, of: "evaluation" });
    expect(shownLoss(job({ progress: { loss: 0.5, metrics: { loss: 0.4 } }, metrics: { loss: 0.3 } }))).toEqual({ value: 0.3, of: "evaluation" });
  });
});
