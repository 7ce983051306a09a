/* The number of workers of an elastic job: the button and its question. */
import { useSignal } from "@preact/signals";
import { scaleJob } from "../api";
import type { Feed } from "../feed";
import { count } from "../lib/format";
import { scaleText } from "../lib/workers";
import type { Job } from "../types";
import { Confirm } from "./confirm";

export function ScaleButton({ job, feed }: { job: Job; feed: Feed }) {
  const asking = useSignal(false);
  const wanted = useSignal(1);
  const counts = job.elastic;
  if (!counts) return null;
  const { least, most } = counts;
  const limit = counts.requested ?? most;
  const bound = (value: number) => Math.max(least, Math.min(most, value));
  return (
    <>
      <button type="button" class="button" disabled={job.stop_requested} onClick={() => { wanted.value = limit; asking.value = true; }}>Scale</button>
      <Confirm title={`Scale ${job.name}`} open={asking.value} onClose={() => (asking.value = false)} word={`At most ${count(wanted.value)}`} back="Cancel" ready={wanted.value !== limit} plain
        act={async () => feed.take(await scaleJob(job.id, wanted.value))}>
        <div class="stepper">
          <button type="button" class="button" aria-label="One worker less" disabled={wanted.value <= least} onClick={() => (wanted.value = bound(wanted.value - 1))}>−</button>
          <input type="number" aria-label="Workers" min={least} max={most} value={wanted.value} onInput={(event) => { const value = Math.round(event.currentTarget.valueAsNumber); if (value >= 1) wanted.value = bound(value); }} />
          <button type="button" class="button" aria-label="One worker more" disabled={wanted.value >= most} onClick={() => (wanted.value = bound(wanted.value + 1))}>+</button>
          <span class="faint">{count(counts.now)} now</span>
        </div>
        <p>{scaleText(counts, wanted.value)}</p>
      </Confirm>
    </>
  );
}
