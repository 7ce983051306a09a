/* Written by scripts/write_job_fields.py from rayps/core/job/job_fields.py: change the table. */
import type { StrategySpec } from "./types";

/** The specification of a job, as answers have it; of `workload` and `run` one is null. */
export interface JobSpec {
  workload: string | null;
  run?: string | null;
  strategy?: StrategySpec;
  workers?: number;
  elastic?: Record<string, unknown> | null;
  epochs?: number | null;
  steps?: number | null;
  seed?: number;
  resources?: Record<string, number>;
  working_dir?: string | null;
  checkpoint_every?: number | null;
  evaluate_every?: number | null;
  keep_checkpoints?: number;
  max_failures?: number;
  timeout?: number;
  resume?: string | null;
  name?: string | null;
  server_group?: string | null;
  branch?: string | null;
  start_from?: string | Record<string, unknown> | null;
  profile?: boolean;
  quota?: Record<string, number> | null;
  params?: Record<string, unknown>;
  code?: string | null;
  requirements?: string[] | null;
  env?: string[] | null;
  statement?: string | null;
}
