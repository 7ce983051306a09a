/* The number of workers of a job, in words. Pure. */
import type { Job, WorkerCounts } from "../types";
import { plural } from "./format";

/** `4 workers`, and of an elastic job `4 of 2 to 8 workers`. */
export function workersText(job: Job): string {
  const counts = job.elastic;
  return counts ? `${counts.now} of ${counts.least} to ${counts.most} workers` : plural(job.spec.workers ?? 1, "worker");
}

/** What follows when the user asks for at most `wanted` workers. */
export function scaleText(counts: WorkerCounts, wanted: number): string {
  const range = `It was submitted with ${counts.least} to ${plural(counts.most, "worker")}.`;
  if (wanted < counts.now) return `${plural(counts.now - wanted, "worker")} ${counts.now - wanted === 1 ? "leaves" : "leave"}; the others continue from memory. ${range}`;
  if (wanted > counts.now) return `The job grows to ${plural(wanted, "worker")} as resources are free. ${range}`;
  return `The job keeps its ${plural(counts.now, "worker")}. ${range}`;
}
