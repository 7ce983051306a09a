/* Several jobs beside each other: one table and one chart. The jobs of a sweep, or those that were selected in the list. */
import { useSignal } from "@preact/signals";
import { useEffect, useMemo } from "preact/hooks";
import type uPlot from "uplot";
import * as api from "../api";
import { color } from "../clock";
import { axes, chosenMetric, type Column, columns, joined, label, sorted, text, upTo, type X } from "../lib/compare";
import { count, duration, loss, metric as shownMetric, plural } from "../lib/format";
import { ended } from "../lib/status";
import { Badge, Card, Dialog, Empty } from "../parts/bits";
import { axis, Chart, cursor } from "../parts/chart";
import { metricTick } from "../parts/curves";
import { StopIcon } from "../parts/icons";
import { Missing } from "../parts/missing";
import { href, put, route } from "../route";
import { session } from "../stream";
import type { ComparedRow, Comparison } from "../types";

const EVERY = 3_000; // while a job is running
const COLOURS = 8; // of the sheet: --srv-0 to --srv-7; further jobs have the same with dashes

export function SweepPage({ name }: { name: string }) {
  return <ComparePage title={name} query={{ sweep: name }} sweep={name} />;
}

export function ChosenPage() {
  const ids = (route.value.query.get("jobs") ?? "").split(",").filter(Boolean);
  if (ids.length === 0) return (
    <main class="page"><Empty title="No jobs to compare"><p>Select jobs in the list, and then Compare.</p><p class="empty-actions"><a class="button" href={href(["jobs"])}>All jobs</a></p></Empty></main>
  );
  return <ComparePage key={ids.join()} title={plural(ids.length, "job")} query={{ job: ids }} />;
}

function ComparePage({ title, query, sweep }: { title: string; query: { sweep: string } | { job: string[] }; sweep?: string }) {
  const found = useSignal<Comparison | null>(null);
  const problem = useSignal<{ status: number; text: string } | null>(null);
  const look = async () => {
    try {
      found.value = await api.comparison(query);
      problem.value = null;
    } catch (error) {
      const status = error instanceof api.ApiError ? error.status : 0;
      if (status === 401) session.value = false;
      problem.value = { status, text: (error as Error).message };
    }
  };
  const over = found.value?.rows.every((row) => ended(row.status)) ?? false;
  useEffect(() => {
    document.title = `${sweep ? `Sweep ${title}` : "Compare"} – rayps`;
    void look();
  }, []);
  useEffect(() => {
    if (over) return;
    const timer = window.setInterval(() => { if (!document.hidden) void look(); }, EVERY);
    return () => window.clearInterval(timer);
  }, [over]);
  if (problem.value && !found.value) return (
    <Missing what={sweep ? "sweep" : "job"} status={problem.value.status} text={problem.value.text} onRetry={() => void look()}
      gone={<>{problem.value.text}</>} all={{ href: href(["jobs"]), text: "All jobs" }} />
  );
  if (!found.value) return <main class="page"><div class="skeleton" role="status" aria-label="Loading the comparison"><span /><span /><span /></div></main>;
  const going = found.value.rows.filter((row) => !ended(row.status)).length;
  return (
    <main class="page compare">
      <header class="job-head">
        <nav aria-label="Breadcrumb"><a href={href(["jobs"])}>Jobs</a><span aria-hidden="true">/</span></nav>
        <div class="job-title">
          <h1>{sweep ? title : `Compare ${title}`}</h1>
          {sweep && going > 0 && <StopSweep name={sweep} going={going} onStopped={look} />}
        </div>
        <p class="job-line">
          {sweep && <span>Sweep of {plural(found.value.rows.length, "job")}</span>}
          <span>{going ? `${plural(going, "job")} not ended` : "all have ended"}</span>
          {found.value.differing.length > 0 && <span>differing in {found.value.differing.join(", ")}</span>}
        </p>
      </header>
      <div class="stack">
        <CurvesCard found={found.value} />
        <TableCard found={found.value} />
      </div>
    </main>
  );
}

function CurvesCard({ found }: { found: Comparison }) {
  const { query } = route.value;
  const log = query.get("scale") === "log";
  const name = chosenMetric(found, query.get("metric"));
  const choices = name ? axes(found, name) : [];
  const wanted = (query.get("x") ?? "round") as X;
  const x: X = choices.includes(wanted) ? wanted : "round";
  const index = useSignal<number | null>(null);
  const lines = useMemo(() => (name ? joined(found, name, x, log) : { x: [], y: [] }), [found, name, x, log]);
  const data = useMemo(() => [lines.x, ...lines.y] as uPlot.AlignedData, [lines]);
  const at = index.value ?? lines.x.length - 1;
  const several = lines.y.map((values) => values.filter((value) => value !== null).length > 1);
  return (
    <Card title="Curves" id="curves" tools={name && <>
      <label class="choice"><span>Metric</span>
        <select aria-label="Metric" value={name} onChange={(event) => put({ metric: event.currentTarget.value })}>
          {found.metrics.map((each) => <option key={each} value={each}>{each}</option>)}
        </select>
      </label>
      <label class="choice"><span>Over</span>
        <select aria-label="Horizontal axis" value={x} onChange={(event) => put({ x: event.currentTarget.value === "round" ? null : event.currentTarget.value })}>
          {choices.map((each) => <option key={each} value={each}>{each}</option>)}
        </select>
      </label>
      <button type="button" class="button toggle" aria-pressed={log} onClick={() => put({ scale: log ? null : "log" })}>Log</button>
    </>}>
      {!name || lines.x.length === 0 ? <Empty title="No values yet">The curves start with the first round.</Empty> : <>
        <dl class="readout readout-jobs">
          <div><dt>{x}</dt><dd>{x === "round" ? count(lines.x[at]) : loss(lines.x[at])}</dd></div>
          {found.rows.map((row, i) => (
            <div key={row.id}><dt><Swatch index={i} />{label(found, row)}</dt><dd>{shownMetric(name, upTo(lines.y[i] ?? [], at))}</dd></div>
          ))}
        </dl>
        <Chart height={320} data={data} variant={`${name}/${x}/${log}/${several.join()}`} onIndex={(i) => (index.value = i)}
          summary={`${name} over ${x} of ${plural(found.rows.length, "job")}.`} options={() => looks(found, name, x, log, several)} />
      </>}
    </Card>
  );
}

function looks(found: Comparison, name: string, x: X, log: boolean, several: boolean[]): Omit<uPlot.Options, "width" | "height"> {
  return {
    cursor: cursor("compare"),
    scales: { x: { time: false }, y: { distr: log ? 3 : 1 } },
    axes: [
      axis({ size: 30, values: (_u, ticks) => ticks.map((v) => (x !== "round" ? String(Number(v.toPrecision(6))) : Number.isInteger(v) ? count(v) : "")) }),
      axis({ size: 56, values: (_u, ticks) => ticks.map((v) => (v === null ? "" : metricTick(name, v))) }),
    ],
    series: [{}, ...found.rows.map((_, i) => ({
      scale: "y", stroke: color(`--srv-${i % COLOURS}`), width: 1.8, spanGaps: true, ...(i >= COLOURS ? { dash: [6, 3] } : {}),
      points: { show: !several[i], size: 7, fill: color(`--srv-${i % COLOURS}`) },
    }))],
  };
}

function Swatch({ index }: { index: number }) {
  return <span class={`swatch-job swatch-job-${index % COLOURS}${index >= COLOURS ? " is-dashed" : ""}`} aria-hidden="true" />;
}

function TableCard({ found }: { found: Comparison }) {
  const { query } = route.value;
  const all = columns(found);
  const [key, down] = order(query.get("sort"));
  const rows = sorted(found.rows, all.find((column) => column.key === key), down);
  const sort = (column: Column) => put({ sort: key !== column.key ? column.key : down ? null : `-${column.key}` });
  return (
    <Card title="Jobs" id="table">
      <div class="scroll-x">
        <table class="plain compared" aria-label={plural(rows.length, "job")}>
          <thead><tr>{all.map((column) => (
            <th key={column.key} class={column.numeric ? "num" : ""} aria-sort={key === column.key ? (down ? "descending" : "ascending") : "none"}>
              <button type="button" class="sort" title={column.title ?? `Sort by ${column.head}`} onClick={() => sort(column)}>
                {column.head}<span aria-hidden="true">{key === column.key ? (down ? " ↓" : " ↑") : ""}</span>
              </button>
            </th>
          ))}</tr></thead>
          <tbody>{rows.map((row) => (
            <tr key={row.id} data-job={row.id}>{all.map((column) => <td key={column.key} class={column.numeric ? "num" : ""}><Cell column={column} row={row} index={found.rows.indexOf(row)} /></td>)}</tr>
          ))}</tbody>
        </table>
      </div>
    </Card>
  );
}

function Cell({ column, row, index }: { column: Column; row: ComparedRow; index: number }) {
  if (column.kind === "fact" && column.key === "name") return <span class="compared-name"><Swatch index={index} /><a href={href(["jobs", row.id])} data-row>{row.name}</a></span>;
  if (column.kind === "fact" && column.key === "status") return <span title={row.reason ?? undefined}><Badge status={row.status} /></span>;
  if (column.kind === "fact" && column.key === "seconds") return <>{duration(row.seconds)}</>;
  if (column.kind === "fact" && column.key === "rounds") return <>{count(row.rounds)}</>;
  const value = column.value(row);
  if (column.kind === "last" || column.kind === "best") return <>{shownMetric(column.key, value as number | null)}</>;
  return <>{text(value)}</>;
}

/** The column and direction of `sort` in the address: `lr`, or `-lr` for the largest first. */
function order(sort: string | null): [string | null, boolean] {
  return sort?.startsWith("-") ? [sort.slice(1), true] : [sort, false];
}

function StopSweep({ name, going, onStopped }: { name: string; going: number; onStopped: () => Promise<void> }) {
  const asking = useSignal(false);
  const error = useSignal("");
  const confirm = async () => {
    try {
      await api.stopSweep(name);
      asking.value = false;
      await onStopped();
    } catch (reason) {
      error.value = (reason as Error).message;
    }
  };
  return (
    <>
      <button type="button" class="button button-danger job-stop" onClick={() => { error.value = ""; asking.value = true; }}><StopIcon /><span>Stop all</span></button>
      <Dialog title={`Stop the sweep ${name}?`} open={asking.value} onClose={() => (asking.value = false)}>
        <p>{plural(going, "job")} {going === 1 ? "ends" : "end"} with status Stopped. Checkpoints, metrics and logs are kept. This cannot be undone.</p>
        {error.value && <p class="form-error" role="alert">{error.value}</p>}
        <div class="dialog-actions">
          <button type="button" class="button" onClick={() => (asking.value = false)}>Keep them running</button>
          <button type="button" class="button button-danger-solid" onClick={confirm}>Stop the jobs</button>
        </div>
      </Dialog>
    </>
  );
}
