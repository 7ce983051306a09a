/* Workers that learn apart: when they met and what that moved; for ADMM, how far they still disagree. */
import { useSignal } from "@preact/signals";
import { useMemo } from "preact/hooks";
import uPlot from "uplot";
import { color } from "../clock";
import type { Feed } from "../feed";
import { meetings, residuals, type Meetings, type Residuals } from "../lib/apart";
import { bytes, count, plural } from "../lib/format";
import { Card } from "./bits";
import { axis, Chart, cursor } from "./chart";
import { lastKnown, Readout, tick } from "./curves";

/** Meetings of local SGD and its kin, and the bytes that they moved. */
export function MeetingsCard({ feed }: { feed: Feed }) {
  const version = feed.version.value;
  const index = useSignal<number | null>(null);
  const found = useMemo(() => meetings(feed.series.buckets), [version]);
  const data = useMemo(() => (found ? [found.x, found.bytes] : [[], []]) as uPlot.AlignedData, [found]);
  const latest = useMemo<{ found: Meetings | null }>(() => ({ found: null }), []);
  latest.found = found;
  if (!found) return null;
  const at = index.value !== null && index.value < found.x.length ? index.value : found.x.length - 1;
  const total = found.bytes[found.bytes.length - 1] ?? 0;
  return (
    <Card title="Averages" id="meetings" note={`${plural(found.times, "average")} in ${plural(found.rounds, "round")}`}>
      <Readout items={[
        { name: "round", value: count(found.x[at]) },
        { swatch: "met", name: "averages so far", value: count(found.met[at]) },
        { swatch: "smooth", name: "sent so far", value: bytes(found.bytes[at]) },
      ]} />
      <Chart height={170} data={data} variant="meetings" onIndex={(i) => (index.value = i)}
        summary={`Bytes sent by round: ${bytes(total)} over ${plural(found.times, "average")} in ${plural(found.rounds, "round")}.`}
        options={() => meetingOptions(feed.id, () => latest.found)} />
      <p class="card-foot">{foot(found, total)}</p>
    </Card>
  );
}

function foot(found: Meetings, total: number): string {
  if (found.times === 0) return "The workers have not averaged yet: each has separate parameters.";
  const each = Math.round(total / found.times);
  const ratio = found.rounds / found.times;
  const rarer = ratio >= 1.5 ? `; an average in every round would have sent ${ratio >= 10 ? Math.round(ratio) : ratio.toFixed(1)} times as much` : "";
  return `${bytes(each)} per average${rarer}. The last one was in round ${count(found.last)}.`;
}

/** Steps of an axis of bytes: whole in binary units. */
const SIZES = [0, 1, 2, 3, 4].flatMap((unit) => [1, 2, 4, 8, 16, 32, 64, 128, 256, 512].map((n) => n * 1024 ** unit));

function meetingOptions(key: string, found: () => Meetings | null): Omit<uPlot.Options, "width" | "height"> {
  return {
    cursor: cursor(key),
    scales: { x: { time: false }, y: { range: (_u, _lo, hi) => [0, hi > 0 ? hi * 1.08 : 1] } },
    axes: [axis({ size: 30, values: whole }), axis({ size: 66, incrs: SIZES, values: (_u, ticks) => ticks.map((v) => bytes(Math.round(v))) })],
    series: [{}, { scale: "y", stroke: color("--accent"), width: 1.8, points: { show: false }, paths: uPlot.paths.stepped!({ align: 1 }) }],
    hooks: { drawClear: [(u) => drawMeetings(u, found())] },
  };
}

/** A line at each meeting; where they stand closer than lines can, the ground is tinted. */
function drawMeetings(u: uPlot, found: Meetings | null): void {
  if (!found) return;
  const { ctx, bbox } = u;
  ctx.save();
  ctx.fillStyle = color("--met");
  let before = 0;
  let drawn = -Infinity;
  for (let i = 0; i < found.x.length; i += 1) {
    const times = found.met[i]!;
    if (times === before) continue;
    before = times;
    const x = Math.round(u.valToPos(found.x[i]!, "x", true));
    if (x === drawn || x < bbox.left || x > bbox.left + bbox.width) continue;
    drawn = x;
    ctx.fillRect(x, bbox.top, devicePixelRatio || 1, bbox.height);
  }
  ctx.restore();
}

/** ADMM's residuals beside the thresholds at which it stops, and its penalty. */
export function ResidualsCard({ feed }: { feed: Feed }) {
  const version = feed.version.value;
  const index = useSignal<number | null>(null);
  const found = useMemo(() => residuals(feed.series.buckets), [version]);
  const data = useMemo(() => (found ? [found.x, found.primal, found.dual, found.primalStop, found.dualStop, found.penalty] : [[], [], [], [], [], []]) as uPlot.AlignedData, [found]);
  if (!found) return null;
  const at = index.value !== null && index.value < found.x.length ? index.value : lastKnown(found.primal);
  return (
    <Card title="Residuals" id="residuals" note={found.reached === null ? "of the consensus; training stops when both are below their thresholds" : `both below their thresholds in round ${count(found.reached)}`}>
      <Readout items={[
        { name: "round", value: count(found.x[at]) },
        { swatch: "smooth", name: "primal", value: small(found.primal[at]) },
        { swatch: "primal-stop", name: "primal stop", value: small(found.primalStop[at]) },
        { swatch: "dual", name: "dual", value: small(found.dual[at]) },
        { swatch: "dual-stop", name: "dual stop", value: small(found.dualStop[at]) },
        { swatch: "penalty", name: "penalty", value: small(found.penalty[at]) },
      ]} />
      <Chart height={240} data={data} variant="residuals" summary={residualSummary(found)} onIndex={(i) => (index.value = i)} options={() => residualOptions(feed.id)} />
    </Card>
  );
}

function residualOptions(key: string): Omit<uPlot.Options, "width" | "height"> {
  const line = (tint: string, extra: Partial<uPlot.Series> = {}): uPlot.Series => ({ scale: "y", stroke: color(tint), width: 1.8, points: { show: false }, spanGaps: true, ...extra });
  return {
    cursor: cursor(key),
    scales: { x: { time: false }, y: { distr: 3 }, penalty: { distr: 3 } },
    axes: [
      axis({ size: 30, values: whole }),
      axis({ size: 58, grid: { stroke: color("--grid"), width: 1, filter: tens }, filter: tens, values: (_u, ticks) => ticks.map((v) => (v === null ? "" : `1e${Math.round(Math.log10(v))}`)) }),
      axis({ size: 52, side: 1, scale: "penalty", grid: { show: false }, values: (_u, ticks) => ticks.map((v) => (v === null ? "" : tick(v))) }),
    ],
    series: [
      {}, line("--accent"), line("--evaluation"), line("--accent", { width: 1, dash: [5, 4] }), line("--evaluation", { width: 1, dash: [5, 4] }),
      line("--muted", { scale: "penalty", width: 1.2, paths: uPlot.paths.stepped!({ align: 1 }) }),
    ],
  };
}

function residualSummary(found: Residuals): string {
  const at = lastKnown(found.primal);
  const end = found.reached === null ? "not yet below their thresholds" : `both below their thresholds in round ${found.reached}`;
  return `Primal and dual residual by round on a logarithmic axis: ${small(found.primal[at])} and ${small(found.dual[at])}, ${end}.`;
}

function small(value: number | null | undefined): string {
  return value === null || value === undefined ? "–" : value < 1e-2 || value >= 1e4 ? value.toExponential(2) : value.toPrecision(3);
}

/** Of a logarithmic axis only the powers of ten are drawn. */
function tens(_u: uPlot, ticks: number[]): (number | null)[] {
  return ticks.map((v) => (Math.abs(Math.log10(v) - Math.round(Math.log10(v))) < 1e-9 ? v : null));
}

function whole(_u: uPlot, ticks: number[]): string[] {
  return ticks.map((v) => (Number.isInteger(v) ? count(v) : ""));
}
