/* Where a job keeps what it learns, and how well it learns, in words. Pure. */
import type { Job, StrategyWire } from "../types";
import { plural } from "./format";
import { describe, phases } from "./strategy";

/** A job's strategy; on a server group without what the strategy would have of its own: the group has the servers. */
export function strategyOf(job: Job): { epochs?: number | null; strategy: StrategyWire }[] {
  const all = phases(job.spec.run ? job.strategies?.[0] ?? job.spec.strategy : job.spec.strategy);
  if (typeof job.spec["server_group"] !== "string") return all;
  return all.map((phase) => ({ ...phase, strategy: { ...phase.strategy, shards: undefined, servers: undefined, replicas: undefined } }));
}

/** The whole strategy of a job in words; of a function those that it gave to rayps.wrap. */
export function describeJob(job: Job): string {
  const further = job.spec.run ? (job.strategies ?? []).slice(1) : [];
  return [describe(strategyOf(job)), ...further.map(describe)].join(" + ");
}

/** "shared (5 servers, 1 backup)": the group that a job is on, as far as it is known; "" where it is on none. */
export function groupOf(job: Job): string {
  const name = job.spec["server_group"];
  if (typeof name !== "string") return "";
  const group = job.progress?.server_group;
  if (!group?.servers?.length) return name;
  const alive = group.servers.filter((server) => server.state !== "dead").length;
  return `${name} (${plural(alive, "server")}, ${group.replicas ? plural(group.replicas, "backup") : "no backups"})`;
}

/** The loss that says most: of the evaluation where there is one, else of the last batch. */
export function shownLoss(job: Job): { value: number | null | undefined; of: "evaluation" | "last batch" | "last logged" } {
  const measured = job.metrics?.["loss"] ?? job.progress?.metrics?.["loss"];
  return typeof measured === "number" ? { value: measured, of: job.spec.run ? "last logged" : "evaluation" } : { value: job.progress?.loss, of: "last batch" };
}
