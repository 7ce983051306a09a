/* Workers, shards and staleness of a job: who computes, who waits, who holds the others up. */
import { useEffect, useRef } from "preact/hooks";
import { color, painted } from "../clock";
import type { Feed, Snapshot } from "../feed";
import { bytes, count, duration, percent, plural, short } from "../lib/format";
import { ageBars, judge, median, type Verdict } from "../lib/worker";
import { staleUpdates } from "../lib/federated";
import { isFederated, staleBound } from "../lib/strategy";
import { ended } from "../lib/status";
import type { ShardRow, WorkerRow } from "../types";
import { Card, Empty } from "./bits";
import { WarnIcon } from "./icons";

export function WorkersCard({ feed }: { feed: Feed }) {
  void feed.version.value;
  const job = feed.job.value;
  const workers = job?.progress?.workers ?? [];
  const verdicts = judge(workers, steadyCosts(workers, feed.snapshots));
  const slow = verdicts.filter((verdict) => verdict.straggler);
  const over = job ? ended(job.status) : false;
  const paced = !isFederated(job?.spec.strategy); // their clients differ, so that a sample's time tells nothing of the worker
  return (
    <Card title="Workers" id="workers" note={workers.length ? plural(workers.length, "worker") : undefined}
      tools={<Key />}>
      {workers.length === 0 ? <Empty title={over ? "No workers were measured" : "No workers yet"}>
        {over ? null : "They appear here as soon as they are started."}</Empty> : <>
        {paced && slow.length > 0 && <p class="verdict"><WarnIcon /><span>{straggling(slow)}</span></p>}
        <div class="scroll-x">
          <table class="plain workers">
            <thead>
              <tr>
                <th class="num">Rank</th><th>Host</th><th>Status</th><th class="num">{paced ? "Round" : "Rounds"}</th><th class="num">Samples/s</th>
                <th class="col-shares">Time shares</th>
                {paced && <><th class="col-heat" title="Compute time per sample relative to the median worker, newest at the right">Pace{over ? "" : `, last ${windowWords(feed.snapshots)}`}</th>
                <th class="num" title="Compute time per sample relative to the median of the other workers">Own pace</th></>}
              </tr>
            </thead>
            <tbody>
              {workers.map((worker, i) => <WorkerLine key={worker.rank} worker={worker} verdict={verdicts[i]!} snapshots={feed.snapshots} version={feed.version.value} over={over} paced={paced} />)}
            </tbody>
          </table>
        </div>
      </>}
    </Card>
  );
}

function WorkerLine({ worker, verdict, snapshots, version, over, paced }: { worker: WorkerRow; verdict: Verdict; snapshots: Snapshot[]; version: number; over: boolean; paced: boolean }) {
  const state = worker.status ?? "running";
  return (
    <tr class={paced && verdict.straggler ? "is-slow" : ""}>
      <td class="num">{worker.rank}</td>
      <td>{worker.part && <>{worker.part} · </>}<span class="host">{worker.host ?? "–"}</span>{worker.pid != null && <span class="faint"> · {worker.pid}</span>}</td>
      <td><span class={`state state-${tone(over && state === "running" ? "ended" : state)}`}>{over && state === "running" ? "ended" : state}</span></td>
      <td class="num">{count(worker.round)}</td>
      <td class="num">{short(worker.samples_per_second || null)}</td>
      <td><SplitBar worker={worker} /></td>
      {paced && <><td><Heat rank={worker.rank} snapshots={snapshots} version={version} /></td>
      <td class="num">{verdict.ratio === null ? "–" : <span class={verdict.straggler ? "slow" : ""}>{verdict.straggler && <WarnIcon />}{verdict.ratio.toFixed(2)}×</span>}</td></>}
    </tr>
  );
}

/** The share of a bar from which its label has room in it, however narrow the bar is. */
const LABELLED = 0.3;

function SplitBar({ worker }: { worker: WorkerRow }) {
  const parts = { compute: worker.compute ?? 0, data: worker.data ?? 0, move: worker.move ?? 0, wait: worker.wait ?? 0 };
  const all = parts.compute + parts.data + parts.move + parts.wait;
  if (!(all > 0)) return <span class="faint">not measured</span>;
  const words = `compute ${percent(parts.compute / all, 0)}, data ${percent(parts.data / all, 0)}, move ${percent(parts.move / all, 0)}, wait ${percent(parts.wait / all, 0)}`;
  return (
    <div class="split" role="img" aria-label={words} title={words}>
      {(["compute", "data", "move", "wait"] as const).map((key) => (
        <span key={key} class={`split-${key}`} style={{ width: `${((parts[key] / all) * 100).toFixed(2)}%` }} />
      ))}
      {parts.compute / all >= LABELLED && <span class="split-text">{percent(parts.compute / all, 0)}</span>}
    </div>
  );
}

function Key() {
  return (
    <span class="key" aria-hidden="true">
      <span><i class="split-compute" />compute</span>
      <span title="Waiting for batches"><i class="split-data" />data</span>
      <span><i class="split-move" />move</span>
      <span><i class="split-wait" />wait</span>
    </span>
  );
}

const CELLS = 40;

/** A strip of cells, one for each look at the worker: the darker, the slower its own computing. */
function Heat({ rank, snapshots, version }: { rank: number; snapshots: Snapshot[]; version: number }) {
  const canvas = useRef<HTMLCanvasElement>(null);
  const recent = snapshots.slice(-CELLS);
  const ratios = recent.map((snapshot) => snapshot.ratio.get(rank)).filter((value): value is number => value !== undefined);
  const paint = painted.value;
  useEffect(() => {
    const element = canvas.current;
    const ctx = element?.getContext("2d");
    if (!element || !ctx) return;
    const ratio = devicePixelRatio || 1;
    element.width = element.clientWidth * ratio;
    element.height = element.clientHeight * ratio;
    const step = element.width / CELLS;
    const ramp = [0, 1, 2, 3, 4].map((i) => color(`--heat-${i}`));
    const empty = color("--heat-none");
    for (let i = 0; i < CELLS; i++) {
      const snapshot = recent[i - (CELLS - recent.length)];
      const value = snapshot?.ratio.get(rank);
      ctx.fillStyle = value === undefined ? empty : ramp[level(value)]!;
      ctx.fillRect(Math.round(i * step), 0, Math.max(1, Math.round(step) - ratio), element.height);
    }
  }, [version, paint]);
  const middle = median(ratios);
  const words = middle === null ? "not measured yet" : `${middle.toFixed(2)} times the median worker's compute time over ${plural(ratios.length, "poll")}`;
  return <canvas ref={canvas} class="heat" role="img" aria-label={words} title={words} />;
}

/** The step of the colour ramp for a pace: 1 = like the others, from 1.3 on it is a straggler's. */
function level(ratio: number): number {
  return ratio < 0.9 ? 0 : ratio < 1.1 ? 1 : ratio < 1.3 ? 2 : ratio < 1.7 ? 3 : 4;
}

export function ShardsCard({ feed }: { feed: Feed }) {
  void feed.version.value;
  const shards = feed.job.value?.progress?.shards ?? [];
  const total = Math.max(1, ...shards.map((shard) => shard.hi ?? 0));
  const size = shards.reduce((sum, shard) => sum + (shard.bytes ?? 0), 0);
  const aged = shards.some((shard) => ageBars(shard.ages) !== null);
  return (
    <Card title="Shards" id="shards" note={shards.length ? `${plural(shards.length, "shard")}, ${bytes(size)}` : undefined}>
      {shards.length === 0 ? <p class="card-foot">No shards now. They appear while a job trains with a parameter server.</p> : (
        <div class="scroll-x">
          <table class="plain">
            <thead><tr><th class="num">Shard</th><th>Host</th><th class="col-range">Range of parameters</th><th class="num">Version</th>{aged && <th title="Rounds between the parameters of a push and its application by this shard">Age of pushes</th>}<th class="num">Size</th></tr></thead>
            <tbody>{shards.map((shard) => <ShardLine key={shard.index} shard={shard} total={total} aged={aged} />)}</tbody>
          </table>
        </div>
      )}
    </Card>
  );
}

function ShardLine({ shard, total, aged }: { shard: ShardRow; total: number; aged: boolean }) {
  const { lo = 0, hi = 0 } = shard;
  return (
    <tr>
      <td class="num">{shard.index}</td>
      <td><span class="host">{shard.host ?? "–"}</span>{shard.pid != null && <span class="faint"> · {shard.pid}</span>}</td>
      <td>
        <div class="range" aria-hidden="true">
          <span style={{ left: `${(lo / total) * 100}%`, width: `${hi > lo ? Math.max(1, ((hi - lo) / total) * 100) : 0}%` }} />
        </div>
        <span class="range-text">{hi > lo ? `${count(lo)} – ${count(hi)}` : "not known yet"}</span>
      </td>
      <td class="num">{count(shard.version)}</td>
      {aged && <td><Ages ages={shard.ages} /></td>}
      <td class="num">{bytes(shard.bytes)}</td>
    </tr>
  );
}

/** The ages of a shard's pushes as a strip of bars, from 0 to the widest. */
function Ages({ ages }: { ages: Record<string, number> | undefined }) {
  const bars = ageBars(ages);
  if (!bars) return <span class="faint">–</span>;
  const words = bars.map((bar) => `${percent(bar.share, bar.share < 0.1 ? 1 : 0)} ${bar.age}${bar.more ? " or more" : ""} behind`).join(", ");
  const most = Math.max(...bars.map((bar) => bar.share));
  return <div class="ages" role="img" aria-label={words} title={words}>{bars.map((bar) => <span key={bar.age} style={{ height: `${Math.max(bar.share ? 6 : 0, (bar.share / most) * 100)}%` }} />)}</div>;
}

export function StalenessCard({ feed }: { feed: Feed }) {
  void feed.version.value;
  const job = feed.job.value;
  const federated = isFederated(job?.spec.strategy);
  const noun = federated ? "update" : "pull";
  const counts = federated && feed.series.staleness.size === 0 ? staleUpdates(feed.cohorts.rounds.values()) : feed.series.staleness;
  const histogram = [...counts]
    .map(([age, pulls]) => ({ age, pulls }))
    .filter((entry) => Number.isFinite(entry.age))
    .sort((a, b) => a.age - b.age);
  const all = histogram.reduce((sum, entry) => sum + entry.pulls, 0);
  const bound = staleBound(job?.spec.strategy);
  return (
    <Card title="Staleness" note={federated ? "updates, by versions behind" : "pulls, by rounds behind"} id="staleness">
      {all === 0 ? <Empty title="No measurements yet" /> : <Histogram histogram={histogram} all={all} bound={bound} noun={noun} />}
    </Card>
  );
}

const MOST_BARS = 12;

function Histogram({ histogram, all, bound, noun }: { histogram: { age: number; pulls: number }[]; all: number; bound: number | null; noun: string }) {
  const widest = histogram[histogram.length - 1]?.age ?? 0;
  const top = Math.min(MOST_BARS - 1, Math.max(widest, bound ?? 0));
  const bars = Array.from({ length: top + 1 }, (_, age) => ({ age, pulls: 0 }));
  for (const entry of histogram) bars[Math.min(entry.age, top)]!.pulls += entry.pulls;
  const most = Math.max(...bars.map((entry) => entry.pulls));
  const mean = histogram.reduce((sum, entry) => sum + entry.age * entry.pulls, 0) / all;
  return (
    <>
      <ul class="histogram" aria-label={`Staleness of ${plural(all, noun)}`}>
        {bars.map((entry) => (
          <li key={entry.age} title={`${plural(entry.pulls, noun)} (${percent(entry.pulls / all)}) at ${entry.age} behind`}>
            <span class="histogram-share" aria-hidden="true">{entry.pulls ? (entry.pulls / all < 0.005 ? "<1%" : percent(entry.pulls / all, 0)) : ""}</span>
            <span class="histogram-bar" aria-hidden="true" style={{ height: `${Math.max(entry.pulls ? 2 : 0, (entry.pulls / most) * 100)}%` }} />
            <span class="histogram-age">{entry.age}{entry.age === top && widest > top ? "+" : ""}<span class="sr">: {plural(entry.pulls, noun)}</span></span>
          </li>
        ))}
      </ul>
      <p class="card-foot">
        Mean {mean.toFixed(2)}, largest {count(widest)} over {plural(all, noun)}
        {bound === null ? "; no bound was set." : widest <= bound ? `; within the bound of ${bound}.` : `; above the bound of ${bound}.`}
      </p>
    </>
  );
}

/** Own computing time of each worker over its last looks (the median), so that one odd round marks nobody. */
function steadyCosts(workers: WorkerRow[], snapshots: Snapshot[]): (number | null)[] {
  const recent = snapshots.slice(-10);
  return workers.map((worker) => median(recent.map((snapshot) => snapshot.cost.get(worker.rank)).filter((value): value is number => value !== undefined)));
}

function straggling(slow: Verdict[]): string {
  const names = slow.map((verdict) => `Worker ${verdict.rank} needs ${verdict.ratio?.toFixed(1)} times`).join("; ");
  return `${names} the compute time per sample of the others, without waiting.`;
}

function windowWords(snapshots: Snapshot[]): string {
  const recent = snapshots.slice(-CELLS);
  const from = recent[0]?.time;
  const to = recent[recent.length - 1]?.time;
  return from !== undefined && to !== undefined && to > from ? duration(to - from) : "minute";
}

function tone(state: string): string {
  if (/run|ready|alive/i.test(state)) return "run";
  if (/lost|dead|fail/i.test(state)) return "bad";
  if (/restart|replac|start|recover/i.test(state)) return "warn";
  return "idle";
}
