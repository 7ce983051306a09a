/* The statuses of a job as groups and words. Pure. */
import type { Job, Status } from "../types";

export type Tone = "run" | "ok" | "bad" | "warn" | "idle";

export const TONES: Record<Status, Tone> = {
  QUEUED: "idle", STARTING: "run", RUNNING: "run", RECOVERING: "warn", STOPPING: "warn", UNKNOWN: "warn",
  SUCCEEDED: "ok", FAILED: "bad", STOPPED: "idle",
};

export const WORDS: Record<Status, string> = {
  QUEUED: "Queued", STARTING: "Starting", RUNNING: "Running", RECOVERING: "Recovering", STOPPING: "Stopping",
  UNKNOWN: "Unknown", SUCCEEDED: "Succeeded", FAILED: "Failed", STOPPED: "Stopped",
};

/** The filter groups of the list, in order. */
export const GROUPS: { key: string; name: string; holds: Status[] }[] = [
  { key: "queued", name: "Queued", holds: ["QUEUED"] },
  { key: "running", name: "Running", holds: ["STARTING", "RUNNING", "RECOVERING", "STOPPING", "UNKNOWN"] },
  { key: "succeeded", name: "Succeeded", holds: ["SUCCEEDED"] },
  { key: "failed", name: "Failed", holds: ["FAILED"] },
  { key: "stopped", name: "Stopped", holds: ["STOPPED"] },
];

/** Whether a job in this status has ended. */
export function ended(status: Status): boolean {
  return status === "SUCCEEDED" || status === "FAILED" || status === "STOPPED";
}

/** How far a job is, from 0 to 1; null while that is not known. */
export function share(job: Job): number | null {
  if (job.status === "SUCCEEDED") return 1;
  const { round, rounds } = job.progress ?? {};
  if (typeof round !== "number" || !rounds) return null;
  return Math.min(1, Math.max(0, round / rounds));
}
