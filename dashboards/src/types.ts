/* What the service sends. One declaration for each JSON form of the REST interface; nothing here runs. */
import type { JobSpec } from "./job";

export type Status =
  | "QUEUED" | "STARTING" | "RUNNING" | "RECOVERING" | "STOPPING" | "UNKNOWN"
  | "SUCCEEDED" | "FAILED" | "STOPPED";

/** A strategy in wire form: `{"name": ..., option: ...}`. */
export interface StrategyWire {
  name: string;
  [option: string]: unknown;
}

/** A phase of a run whose strategy changes; the last may leave `epochs` out. */
export interface PhaseWire {
  epochs?: number | null;
  strategy: StrategyWire;
}

export type StrategySpec = string | StrategyWire | PhaseWire[];

export interface WorkerRow {
  rank: number;
  part?: string; // of its replica: stage 1, tensor rank 0
  host?: string | null;
  pid?: number | null;
  status?: string;
  round?: number;
  samples_per_second?: number | null;
  compute?: number | null;
  data?: number | null; // share of its time in which it waited for batches
  wait?: number | null;
  move?: number | null;
}

export interface ShardRow {
  index: number;
  host?: string | null;
  pid?: number | null;
  lo?: number;
  hi?: number;
  version?: number;
  bytes?: number;
  ages?: Record<string, number>; // pushes by how many versions old they were when applied
}

export interface Progress {
  status?: Status;
  message?: string;
  time?: number;
  round?: number;
  rounds?: number | null;
  epoch?: number;
  epochs?: number | null;
  loss?: number | null;
  metrics?: Record<string, number | null> | null; // the last evaluation
  samples_per_second?: number | null;
  eta_seconds?: number | null;
  generation?: number;
  failures?: number;
  best?: string | null; // the checkpoint of the best evaluation
  strategy?: StrategySpec;
  staleness?: Record<string, number> | null;
  workers?: WorkerRow[];
  shards?: ShardRow[];
  server_group?: JobServers | null;
  account?: Account | null;
}

/** Where the time of a job's workers and servers went, in seconds by part. */
export interface Account {
  goodput: number | null; // the useful share of the workers' time
  seconds?: Record<string, number>; // of all workers
  members: Record<string, Record<string, number>>;
  verdict?: string; // what costs most of the time
  guilty?: string[]; // the members that cause it
}

/** The elastic servers of a job, as its driver sees them. */
export interface JobServers {
  name: string;
  own?: boolean; // of this job alone
  space?: string;
  status?: string;
  replicas?: number;
  segments?: number;
  servers?: { name: string; host?: string | null; state?: string; bytes?: number | null; operations_s?: number | null; cpu?: number | null; segments?: number }[];
  moves?: number | unknown[];
  bytes?: number | null;
  rows?: number | null;
  operations_s?: number | null;
  branch_of?: string | null;
  held_back?: string | null; // by its quota, in words
  quota?: { bytes?: number | null; operations?: number | null } | null;
}

/** The workers of an elastic job; `requested` is the most that the user wants now, null for as many as it may have. */
export interface WorkerCounts {
  least: number;
  most: number;
  now: number;
  allowed: number;
  requested: number | null;
}

export interface Job {
  id: string;
  name: string;
  status: Status;
  reason: string | null;
  spec: JobSpec;
  attempt: number;
  created_at: string;
  started_at: string | null;
  finished_at: string | null;
  progress: Progress | null;
  metrics: Record<string, number | null> | null;
  strategies?: StrategySpec[]; // of the job; of a function the different ones that it gave to rayps.wrap
  lowest?: Record<string, boolean | null>; // for each metric of the last evaluation, whether its lowest value is the best; null if unknown
  checkpoint: string | null;
  stop_requested: boolean;
  params?: Record<string, unknown>; // of the workload: all after the start, before only those that were given
  sweep?: string | null;
  elastic?: WorkerCounts | null; // null if the number of workers is fixed
}

/** A job's packed code: the SHA-256 of its archive, and where it comes from. */
export interface JobCode {
  code: string | null;
  origin: CodeOrigin | null;
}

export interface CodeOrigin {
  files?: number | null;
  bytes?: number | null;
  folder?: string | null;
  commit?: string | null;
  branch?: string | null;
  dirty?: boolean | null;
  untracked?: number | null; // packed files that Git does not track
  diff?: string | null;
  diff_cut?: boolean | null;
}

/** A metric of one job over the run. */
export interface Curve {
  value: (number | null)[];
  round: number[];
  epoch: number[] | null;
  seconds: number[];
}

export interface ComparedRow {
  id: string;
  name: string;
  status: Status;
  reason: string | null; // the first line of why it has its status
  values: Record<string, unknown>;
  rounds: number | null;
  seconds: number | null;
  metrics: Record<string, { last: number | null; best: number | null }>;
}

/** Jobs beside each other. `lowest`: whether a metric's best value is the lowest; null if its name does not say it. */
export interface Comparison {
  differing: string[];
  metrics: string[];
  columns: { name: string; kind: "fact" | "value" | "last" | "best" | string; of: string }[]; // names differ
  lowest: Record<string, boolean | null>;
  rows: ComparedRow[];
  curves: Record<string, Record<string, Curve>>; // by job id and metric
}

export interface RoundPoint {
  kind: "round";
  round: number;
  epoch?: number;
  time?: number;
  loss: number | null;
  samples?: number;
  seconds?: number;
  compute?: number;
  data?: number; // seconds until the batch was there
  wait?: number;
  move?: number;
  bytes?: number;
  staleness?: Record<string, number>;
  generation?: number;
  strategy?: StrategySpec;
}

export interface EvaluationPoint {
  kind: "evaluation";
  round: number;
  epoch?: number;
  time?: number;
  metrics: Record<string, number | null>;
}

/** The run returned to the state after `round` rounds: what was said of this round and of later ones does not count. */
export interface ReturnedPoint {
  kind: "returned";
  round: number;
  time?: number;
}

export type MetricPoint = RoundPoint | EvaluationPoint | ReturnedPoint;

/**
 * A page of jobs, or what has changed in the list: `gone` are ids of deleted jobs, `counts` the jobs by status on all pages,
 * and `whole` says that the message has all jobs of the stream's list.
 */
export interface JobList {
  jobs: Job[];
  next_cursor: string | null;
  counts: Partial<Record<Status, number>>;
  gone: string[];
  whole?: boolean;
}

export interface LogLine {
  time: string;
  source: string;
  text: string;
}

export interface JobEvent {
  seq: number;
  time: number;
  kind: string;
  message: string;
  [fact: string]: unknown;
}

export interface ClusterState {
  ready: boolean;
  address: string | null;
  owned: boolean;
  cores?: number | null; // of the machine, where the Ray is the service's own
  together?: number | null; // CPUs of jobs that run side by side, where these are fewer than all
  total: Record<string, number>;
  free: Record<string, number>;
  reason: string | null;
  warm?: { wanted: number; ready: number; starting: number; memory: number } | null; // processes that wait for a job
}

/** A server of a group. */
export interface GroupServer {
  name: string;
  address?: string | null;
  host?: string | null;
  pid?: number | null;
  state: "alive" | "leaving" | "dead" | string;
  bytes?: number | null;
  rows?: number | null;
  operations_s?: number | null;
  cpu?: number | null; // share of one core
  seen_s?: number | null;
  primaries?: number;
  copies?: number;
}

export interface GroupSegment {
  index: number;
  table: string | null;
  primary: string | null;
  copies: string[];
  generation: number;
  bytes?: number | null;
  rows?: number | null;
  operations_s?: number | null;
  state: "ready" | "copying" | "moving" | "lost" | string;
}

/** What one job keeps on a group. */
export interface GroupSpace {
  name: string;
  number: number;
  workers?: number;
  version?: number;
  bytes?: number | null;
  rows?: number | null;
  operations_s?: number | null;
  rejected?: number | null;
  evicted?: number | null; // rows that were made room for
  throttled?: number | null; // requests that waited for the quota
  quota?: { bytes?: number | null; operations?: number | null } | null;
  branch_of?: string | null;
  tables?: string[];
  segments: GroupSegment[];
}

export interface GroupMove {
  space: string;
  segment: number;
  from: string | null;
  to: string;
  phase: "copying" | "handing" | string;
  seconds?: number | null;
  bytes?: number | null;
}

export interface GroupEvent {
  time: number;
  kind: string;
  message: string;
  [fact: string]: unknown;
}

export interface GroupHead {
  name: string;
  status: string;
  reason: string | null;
  wanted: number;
  replicas: number;
  created_at: string;
  settled: boolean;
}

export interface Group extends GroupHead {
  servers: GroupServer[];
  spaces: GroupSpace[];
  moves: GroupMove[];
  counts: Record<string, number>;
  events: GroupEvent[];
  jobs: { id: string; name: string; status: Status; workers: number }[];
}

/** A group in the list. */
export interface GroupRow extends GroupHead {
  alive: number;
  bytes: number;
  operations_s: number;
  spaces: number;
  moves: number;
  jobs: number;
}

/** RFC 9457 problem details. */
export interface Problem {
  title?: string;
  status?: number;
  detail?: string;
  code?: string;
  errors?: { pointer?: string; message?: string }[];
  request_id?: string;
}
