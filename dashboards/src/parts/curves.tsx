/* The loss and throughput charts of a job: bands for phases, marks for resumes and for losses that are not numbers. */
import { useSignal } from "@preact/signals";
import { useMemo } from "preact/hooks";
import uPlot from "uplot";
import { color } from "../clock";
import type { Feed } from "../feed";
import { count, loss, metric, percent, plural, short } from "../lib/format";
import { csv, lossData, mainMetric, rateData, roundColumns, sampled } from "../lib/plot";
import { type Band, mean, type Series } from "../lib/series";
import { label, phases } from "../lib/strategy";
import { put, route } from "../route";
import type { StrategySpec, StrategyWire } from "../types";
import { Card, Empty } from "./bits";
import { axis, Chart, cursor } from "./chart";
import { download } from "./download";
import { DownIcon } from "./icons";

const DEFAULT_SMOOTH = 0.9;

export function LossCard({ feed }: { feed: Feed }) {
  const version = feed.version.value;
  const { query } = route.value;
  const smooth = clampSmooth(query.get("smooth"));
  const log = query.get("scale") === "log";
  const index = useSignal<number | null>(null);
  const { series } = feed;
  const name = feed.job.value?.spec.run && !series.evaluations.length ? null : mainMetric(series.evaluations, feed.job.value);
  const arrays = useMemo(() => lossData(series, smooth, name, log), [version, smooth, name, log]);
  const banded = series.width > 1;
  const many = series.evaluations.length > 120;
  const data = useMemo(
    () => [arrays.x, arrays.high, arrays.low, arrays.raw, arrays.smooth, arrays.evaluationLoss, arrays.evaluation] as uPlot.AlignedData,
    [arrays],
  );
  const at = index.value !== null && index.value < arrays.x.length ? index.value : lastKnown(arrays.smooth);
  const spec = feed.job.value?.spec.strategy;
  const marks = { series, spec };
  const latest = useMemo(() => ({ marks }), []);
  latest.marks = marks;

  return (
    <Card title="Loss" class="loss-card" id="loss" note={<Loading feed={feed} />}
      tools={<>
        <label class="slider" title="Debiased exponential moving average over every round">
          <span>Smoothing</span>
          <input type="range" min="0" max="0.99" step="0.01" value={smooth} aria-label="Smoothing"
            aria-valuetext={smooth ? smooth.toFixed(2) : "off"}
            onInput={(event) => {
              const value = Number(event.currentTarget.value);
              put({ smooth: value === DEFAULT_SMOOTH ? null : String(value) });
            }} />
          <output>{smooth.toFixed(2)}</output>
        </label>
        <button type="button" class="button toggle" aria-pressed={log} onClick={() => put({ scale: log ? null : "log" })}>Log</button>
        <button type="button" class="button-icon" title="Download the rounds as CSV" aria-label="Download the rounds as CSV" disabled={feed.loading.value !== null}
          onClick={() => download(`${feed.id}-rounds.csv`, csv(series), "text/csv")}><DownIcon /></button>
      </>}>
      {arrays.x.length === 0 ? (feed.loading.value !== null ? <Empty title="Loading the rounds" /> : <Empty title="No rounds yet">The curve starts with the first round.</Empty>) : <>
        <Readout items={[
          { name: "round", value: count(arrays.x[at] ?? null) },
          { swatch: "raw", name: banded ? `mean of ${series.width}` : "loss", value: loss(arrays.raw[at]) },
          ...(smooth > 0 ? [{ swatch: "smooth", name: "smoothed", value: loss(arrays.smooth[at]) }] : []),
          ...(name ? [{ swatch: "evaluation", name, value: metric(name, before(arrays.evaluation, at)) }] : []),
          ...(arrays.evaluationLoss.some((value) => value !== null)
            ? [{ swatch: "evaluation-loss", name: "evaluation loss", value: loss(before(arrays.evaluationLoss, at)) }] : []),
        ]} />
        <Chart height={300} data={data} variant={`${log}/${smooth > 0}/${name}/${banded}/${many}`} onIndex={(i) => (index.value = i)}
          summary={lossSummary(series, name)} options={() => lossOptions({ key: feed.id, log, smoothed: smooth > 0, name, banded, many, marks: () => latest.marks })} />
        {series.badRounds > 0 && (
          <p class="chart-warning" role="status">
            <span class="swatch swatch-nan" /> The loss was not a number in {plural(series.badRounds, "round")}, first in round {count(series.firstBad)}.
          </p>
        )}
        {series.voidRounds > 0 && <p class="card-foot" role="status">{plural(series.voidRounds, "round")} {series.voidRounds === 1 ? "was" : "were"} void: the clients' updates had no sum.</p>}
        <Table series={series} name={name} />
      </>}
    </Card>
  );
}

/** Says that a chart is not complete, and how much of the run it has, until all rounds so far are loaded. */
export function Loading({ feed }: { feed: Feed }) {
  const share = feed.loading.value;
  if (share === null) return null;
  return <span class="loading-rounds" role="status" aria-live="off">{feed.series.total ? `loading: ${plural(feed.series.total, "round")}, ${percent(share)}` : "loading"}</span>;
}

/** `hidden`: the job reports no number of samples, because it would tell who took part in a round. */
export function RateCard({ feed, height, hidden }: { feed: Feed; height: number; hidden: boolean }) {
  const version = feed.version.value;
  const index = useSignal<number | null>(null);
  const arrays = useMemo(() => rateData(feed.series), [version]);
  const data = useMemo(() => [arrays.x, arrays.raw, arrays.smooth] as uPlot.AlignedData, [arrays]);
  const at = index.value !== null && index.value < arrays.x.length ? index.value : lastKnown(arrays.smooth);
  const summary = `Throughput in samples per second by round; ${short(arrays.smooth[arrays.smooth.length - 1])} at the end.`;
  return (
    <Card title="Throughput" note={<>samples/s<Loading feed={feed} /></>} id="throughput">
      {hidden ? <Empty title="Not reported under privacy" /> : arrays.x.length === 0 ? <Empty title={feed.loading.value === null ? "No measurements yet" : "Loading the rounds"} /> : <>
        <Readout items={[
          { name: "round", value: count(arrays.x[at] ?? null) },
          { swatch: "smooth", name: "samples/s", value: short(arrays.smooth[at]) },
          ...(arrays.data.some((share) => share) ? [{ name: "waiting for data", value: percent(arrays.data[at]) }] : []),
        ]} />
        <Chart height={height} data={data} variant="rate" summary={summary} onIndex={(i) => (index.value = i)}
          options={() => rateOptions(feed.id, () => feed.series)} />
      </>}
    </Card>
  );
}

export interface Read { swatch?: string; name: string; value: string }

/** The chart's legend: what each line is, and its value under the cursor (at the end of the run without one). */
export function Readout({ items }: { items: Read[] }) {
  return (
    <dl class="readout">
      {items.map((item) => (
        <div key={item.name}>
          <dt>{item.swatch && <span class={`swatch swatch-${item.swatch}`} />}{item.name}</dt>
          <dd>{item.value}</dd>
        </div>
      ))}
    </dl>
  );
}

function Table({ series, name }: { series: Series; name: string | null }) {
  const open = useSignal(false);
  const columns = open.value ? roundColumns(series) : [];
  return (
    <details class="as-table" onToggle={(event) => (open.value = event.currentTarget.open)}>
      <summary>As a table</summary>
      {open.value && (
        <div class="scroll-x">
          <table class="plain">
            <thead><tr>{columns.map(({ head }) => <th key={head} class="num">{head}</th>)}</tr></thead>
            <tbody>
              {sampled(series.buckets, 12).map((bucket) => (
                <tr key={bucket.round}>{columns.map(({ head, cell }) => <td key={head} class="num">{cell(bucket)}</td>)}</tr>
              ))}
            </tbody>
          </table>
          {series.evaluations.length > 0 && name && (
            <table class="plain">
              <thead><tr><th class="num">Evaluated after round</th><th class="num">{name}</th></tr></thead>
              <tbody>
                {sampled(series.evaluations, 12).map((point) => (
                  <tr key={point.round}><td class="num">{count(point.round)}</td><td class="num">{metric(name, point.metrics[name])}</td></tr>
                ))}
              </tbody>
            </table>
          )}
        </div>
      )}
    </details>
  );
}

/** Steps of the metric axis: 1, 2, 5 of every power of ten, so that percentages are whole. */
export const ROUND_STEPS = [-6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6].flatMap((power) => [1, 2, 5].map((step) => Number(`${step}e${power}`)));

type Marks = () => { series: Series; spec: StrategySpec | undefined };

interface LossLooks {
  key: string;
  log: boolean;
  smoothed: boolean;
  name: string | null;
  banded: boolean;
  many: boolean; // evaluations: too many for points
  marks: Marks;
}

function lossOptions({ key, log, smoothed, name, banded, many, marks }: LossLooks): Omit<uPlot.Options, "width" | "height"> {
  const line = color("--accent");
  const faint = smoothed ? color("--accent-faint") : line;
  const none = { show: false } as const;
  return {
    cursor: cursor(key),
    scales: { x: { time: false }, y: { distr: log ? 3 : 1 }, pct: { range: (_u, lo, hi) => pctRange(lo, hi) } },
    axes: [
      axis({ size: 30, values: (_u, ticks) => ticks.map((v) => (Number.isInteger(v) ? count(v) : "")) }),
      axis({ size: 52, values: (_u, ticks) => ticks.map((v) => (v === null ? "" : tick(v))) }),
      ...(name ? [axis({ side: 1, scale: "pct", size: 52, grid: none, incrs: ROUND_STEPS, values: (_u: uPlot, ticks: number[]) => ticks.map((v) => metricTick(name, v)) })] : []),
    ],
    bands: banded ? [{ series: [1, 2], fill: color("--accent-band") }] : [],
    series: [
      {},
      { scale: "y", show: banded, stroke: "transparent", points: none },
      { scale: "y", show: banded, stroke: "transparent", points: none },
      { scale: "y", stroke: faint, width: 1, points: none },
      { scale: "y", show: smoothed, stroke: line, width: 2, points: none },
      { scale: "y", stroke: color("--evaluation-loss"), width: 1, spanGaps: true, ...(many ? {} : { paths: () => null }), points: { show: !many, size: 7, width: 1.6, stroke: color("--evaluation-loss"), fill: color("--surface") } },
      { scale: "pct", show: name !== null, stroke: color("--evaluation"), width: 1.4, ...(many ? {} : { dash: [3, 3] }), spanGaps: true, points: { show: !many, size: 7, width: 0, fill: color("--evaluation") } },
    ],
    hooks: {
      drawClear: [(u) => drawBands(u, marks().series.bands())],
      draw: [(u) => { drawNames(u, marks().series.bands(), marks().spec); drawMarks(u, marks().series); }],
    },
  };
}

function rateOptions(key: string, series: () => Series): Omit<uPlot.Options, "width" | "height"> {
  const none = { show: false } as const;
  return {
    cursor: cursor(key),
    scales: { x: { time: false }, y: { range: (_u, _lo, hi) => [0, hi > 0 ? hi * 1.08 : 1] } },
    axes: [
      axis({ size: 30, values: (_u, ticks) => ticks.map((v) => (Number.isInteger(v) ? count(v) : "")) }),
      axis({ size: 46, values: (_u, ticks) => ticks.map((v) => compact(v)) }),
    ],
    series: [
      {},
      { scale: "y", stroke: color("--accent-faint"), width: 1, points: none },
      { scale: "y", stroke: color("--accent"), width: 2, points: none },
    ],
    hooks: { drawClear: [(u) => drawBands(u, series().bands())] },
  };
}

/** Phases as bands: every second one is shaded. One phase needs no band. */
function drawBands(u: uPlot, bands: Band[]): void {
  if (bands.length < 2) return;
  const { ctx, bbox } = u;
  ctx.save();
  clip(u);
  bands.forEach((band, i) => {
    if (i % 2 === 0) return;
    const left = u.valToPos(band.from - 0.5, "x", true);
    const right = u.valToPos(band.to + 0.5, "x", true);
    ctx.fillStyle = color("--phase");
    ctx.fillRect(left, bbox.top, right - left, bbox.height);
    ctx.fillStyle = color("--phase-line");
    ctx.fillRect(left, bbox.top, devicePixelRatio || 1, bbox.height);
  });
  ctx.restore();
}

/** The names of the phases at their tops, above lines and grid. */
function drawNames(u: uPlot, bands: Band[], spec: StrategySpec | undefined): void {
  if (bands.length < 2) return;
  const { ctx, bbox } = u;
  const ratio = devicePixelRatio || 1;
  ctx.save();
  clip(u);
  ctx.font = `600 ${11 * ratio}px ${getComputedStyle(document.body).fontFamily}`;
  ctx.textBaseline = "top";
  ctx.lineWidth = 5 * ratio;
  ctx.lineJoin = "round";
  ctx.strokeStyle = color("--surface");
  ctx.fillStyle = color("--muted");
  bands.forEach((band, i) => {
    const from = Math.max(u.valToPos(band.from - 0.5, "x", true), bbox.left) + 8 * ratio;
    const to = Math.min(u.valToPos(band.to + 0.5, "x", true), bbox.left + bbox.width);
    const text = label(bandStrategy(band, i, bands.length, spec));
    if (ctx.measureText(text).width > to - from) return;
    ctx.strokeText(text, from, bbox.top + 5 * ratio);
    ctx.fillText(text, from, bbox.top + 5 * ratio);
  });
  ctx.restore();
}

function clip(u: uPlot): void {
  u.ctx.beginPath();
  u.ctx.rect(u.bbox.left, u.bbox.top, u.bbox.width, u.bbox.height);
  u.ctx.clip();
}

/** The strategy of a band. Rounds may carry only its name: the job's own phases then fill in the options. */
function bandStrategy(band: Band, i: number, bands: number, spec: StrategySpec | undefined): StrategyWire {
  const own = phases(band.strategy.startsWith("{") ? (JSON.parse(band.strategy) as StrategyWire) : band.strategy)[0]!.strategy;
  const planned = phases(spec);
  const match = planned.length === bands ? planned[i]?.strategy : planned.find((phase) => phase.strategy.name === own.name)?.strategy;
  return Object.keys(own).length === 1 && match?.name === own.name ? match : own;
}

function drawMarks(u: uPlot, series: Series): void {
  const { ctx, bbox } = u;
  const ratio = devicePixelRatio || 1;
  const marks = [...series.resumes, ...series.nanMarks()];
  if (marks.length === 0) return;
  ctx.save();
  ctx.lineWidth = 1.4 * ratio;
  for (const mark of marks) {
    const x = u.valToPos(mark.round, "x", true);
    if (x < bbox.left || x > bbox.left + bbox.width) continue;
    const tint = color(mark.kind === "nan" ? "--bad" : "--warn");
    ctx.strokeStyle = tint;
    ctx.fillStyle = tint;
    ctx.setLineDash([4 * ratio, 4 * ratio]);
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    ctx.setLineDash([]);
    const y = bbox.top + bbox.height - 8 * ratio;
    const r = 4.5 * ratio;
    ctx.beginPath();
    if (mark.kind === "nan") {
      ctx.moveTo(x - r, y - r); ctx.lineTo(x + r, y + r);
      ctx.moveTo(x + r, y - r); ctx.lineTo(x - r, y + r);
      ctx.lineWidth = 2 * ratio;
      ctx.stroke();
    } else {
      ctx.moveTo(x, y - r); ctx.lineTo(x + r, y + r); ctx.lineTo(x - r, y + r); ctx.closePath();
      ctx.fill();
    }
  }
  ctx.restore();
}

function lossSummary(series: Series, name: string | null): string {
  const first = series.buckets[0];
  const last = series.buckets[series.buckets.length - 1];
  if (!first || !last) return "Loss by round; no rounds yet.";
  const evaluated = series.evaluations[series.evaluations.length - 1];
  const also = name && evaluated ? ` Last ${name}: ${metric(name, evaluated.metrics[name])}.` : "";
  return `Loss by round, from ${loss(mean(first))} in round ${first.round} to ${loss(mean(last))} in round ${last.end}.${also}`;
}

export function pctRange(lo: number | null, hi: number | null): [number, number] {
  if (lo === null || hi === null) return [0, 1];
  if (lo >= 0 && hi <= 1) return [Math.max(0, Math.floor((lo - 0.05) * 10) / 10), 1];
  const pad = (hi - lo || Math.abs(hi) || 1) * 0.1;
  return [lo - pad, hi + pad];
}

export function tick(value: number): string {
  if (value === 0) return "0";
  const size = Math.abs(value);
  return size < 1e-3 || size >= 1e5 ? value.toExponential(0) : String(Number(value.toPrecision(4)));
}

export function metricTick(name: string, value: number): string {
  return /acc|precision|recall|f1|auc/i.test(name) && value <= 1.0001 ? `${Number((value * 100).toFixed(2))}%` : tick(value);
}

function compact(value: number): string {
  return value >= 1e6 ? `${value / 1e6}M` : value >= 1e4 ? `${value / 1e3}k` : count(value);
}

function clampSmooth(text: string | null): number {
  const value = text === null ? DEFAULT_SMOOTH : Number(text);
  return Number.isFinite(value) ? Math.min(0.99, Math.max(0, value)) : DEFAULT_SMOOTH;
}

export function lastKnown(values: readonly (number | null)[]): number {
  for (let i = values.length - 1; i >= 0; i--) if (values[i] !== null) return i;
  return Math.max(0, values.length - 1);
}

export function before(values: readonly (number | null)[], index: number): number | null {
  for (let i = Math.min(index, values.length - 1); i >= 0; i--) if (values[i] !== null) return values[i] ?? null;
  return null;
}
