/* The list of jobs: filtered by the address, kept fresh by one stream, walked through with j and k. */
import { useEffect, useRef } from "preact/hooks";
import { now } from "../clock";
import { asCurl } from "../lib/commands";
import { count, duration, loss, metric, plural, seconds } from "../lib/format";
import { mainMetric } from "../lib/plot";
import { ended, GROUPS, share, TONES } from "../lib/status";
import { describeJob, groupOf, shownLoss, strategyOf } from "../lib/place";
import { brief, length, shardWords, target } from "../lib/strategy";
import { counts, failure, jobs, loadingMore, more, nextCursor, selected, state, toggle, watch } from "../list";
import { Ago, Badge, Bar, Command, Empty } from "../parts/bits";
import { SearchIcon } from "../parts/icons";
import { go, href, put, route } from "../route";
import type { JobSpec } from "../job";
import type { Job, Status } from "../types";

const SAMPLE: JobSpec = { workload: "digits.py:Digits", strategy: "all_reduce", workers: 4, epochs: 5 };

/** Stands for the shell's own directory: the service wants an absolute path beside a workload file. */
const HERE = "HERE";

const TYPING = 250; // ms in which further letters may follow

export function JobsPage() {
  const { query } = route.value;
  const status = query.get("status") ?? "";
  const text = query.get("q")?.trim() ?? "";
  const group = GROUPS.find((entry) => entry.key === status);
  const before = useRef(text);
  useEffect(() => {
    document.title = "Jobs – rayps";
  }, []);
  useEffect(() => {
    let stop = () => {};
    const timer = window.setTimeout(() => { stop = watch({ status: group?.holds ?? [], text }); }, text === before.current ? 0 : TYPING);
    before.current = text;
    return () => {
      window.clearTimeout(timer);
      stop();
    };
  }, [group?.key, text]);
  const shown = group ? jobs.value.filter((job) => group.holds.includes(job.status)) : jobs.value; // one may have left the status since
  const number = (holds: readonly Status[]) => holds.reduce((sum, each) => sum + (counts.value[each] ?? 0), 0);
  const all = number(GROUPS.flatMap((entry) => entry.holds));

  if (state.value === "ready" && all === 0 && !text) return <FirstJob />;
  return (
    <main class="page">
      <div class="page-head">
        <h1>Jobs</h1>
        <label class="search">
          <SearchIcon />
          <input type="search" data-focus="filter" placeholder="Filter by name, workload, strategy" aria-label="Filter jobs"
            aria-keyshortcuts="/" value={query.get("q") ?? ""} onInput={(event) => put({ q: event.currentTarget.value || null })} />
          <kbd aria-hidden="true">/</kbd>
        </label>
      </div>
      <div class="tabs" role="group" aria-label="Filter by status">
        <Tab name="All" active={!group} number={all} onClick={() => put({ status: null })} />
        {GROUPS.map((entry) => (
          <Tab key={entry.key} name={entry.name} active={group === entry} number={number(entry.holds)}
            onClick={() => put({ status: group === entry ? null : entry.key })} />
        ))}
      </div>
      {state.value === "loading" && <Skeleton />}
      {state.value === "error" && <Empty title="The list could not be loaded">{failure.value} It is tried again when the service answers.</Empty>}
      {state.value === "ready" && shown.length === 0 && (
        <Empty title="No job matches">
          <button type="button" class="button" onClick={() => put({ q: null, status: null })}>Show all jobs</button>
        </Empty>
      )}
      {selected.value.size > 0 && <Selection />}
      {shown.length > 0 && <JobTable shown={shown} />}
      {nextCursor.value && state.value === "ready" && (
        <p class="more"><button type="button" class="button" disabled={loadingMore.value} onClick={() => void more()}>{loadingMore.value ? "Loading" : `Load older jobs (${count(shown.length)} of ${count(group ? number(group.holds) : all)} are shown)`}</button></p>
      )}
    </main>
  );
}

/** What can be done with the selected jobs. */
function Selection() {
  const ids = [...selected.value];
  return (
    <p class="selection" role="status">
      <span>{plural(ids.length, "job")} selected{ids.length === 1 ? "; select another to compare" : ""}</span>
      {ids.length > 1 && <a class="button" href={href(["compare"], new URLSearchParams({ jobs: ids.join(",") }))}>Compare</a>}
      <button type="button" class="button" onClick={() => (selected.value = new Set())}>Clear</button>
    </p>
  );
}

function Tab({ name, number, active, onClick }: { name: string; number: number; active: boolean; onClick: () => void }) {
  const place = useRef<HTMLButtonElement>(null);
  useEffect(() => {
    if (active) place.current?.scrollIntoView({ block: "nearest", inline: "nearest" }); // on a narrow page the row of tabs scrolls
  }, [active]);
  return <button ref={place} type="button" class="tab" aria-pressed={active} onClick={onClick}>{name}<span class="tab-count">{number}</span></button>;
}

function JobTable({ shown }: { shown: Job[] }) {
  return (
    <table class="jobs" aria-label={plural(shown.length, "job")}>
      <thead>
        <tr><th class="cell-pick"><span class="sr">Select</span></th><th>Status</th><th>Job</th><th>Strategy</th><th class="col-progress">Progress</th><th class="num" title="Of the evaluation where there is one, else of the last batch">Loss</th><th class="num" title="Accuracy if there is one, else the first metric whose name says whether its highest or its lowest value is the best">Metric</th><th class="num">Submitted</th></tr>
      </thead>
      <tbody>{shown.map((job) => <JobRow key={job.id} job={job} />)}</tbody>
    </table>
  );
}

function JobRow({ job }: { job: Job }) {
  const open = (event: MouseEvent) => {
    if ((event.target as Element).closest("a, .cell-pick") || window.getSelection()?.toString()) return;
    go(["jobs", job.id]);
  };
  const created = seconds(job.created_at);
  const { value, of } = shownLoss(job);
  const metrics = job.metrics ?? job.progress?.metrics ?? {};
  const shown = mainMetric([], job);
  return (
    <tr onClick={open} data-job={job.id}>
      <td class="cell-pick"><label><input type="checkbox" checked={selected.value.has(job.id)} aria-label={`Select ${job.name} to compare`} onChange={() => toggle(job.id)} /></label></td>
      <td class="cell-status"><Badge status={job.status} /></td>
      <td class="cell-name">
        <a href={href(["jobs", job.id])} data-row>{job.name}</a>
        <span class="sub mono">{target(job.spec)}</span>
        {job.sweep && <span class="sub">sweep <a href={href(["sweeps", job.sweep])}>{job.sweep}</a></span>}
      </td>
      <td class="cell-strategy">
        <span title={[describeJob(job), groupOf(job) && `on ${groupOf(job)}`].filter(Boolean).join(", ")}>{brief(strategyOf(job))}</span>
        <span class="sub">{[plural(job.spec.workers ?? 1, "worker"), groupOf(job) ? `on ${job.spec["server_group"]}` : shardWords(job.spec.strategy), length(job.spec)].filter(Boolean).join(", ")}</span>
      </td>
      <td class="cell-progress"><Advance job={job} /></td>
      <td class={`num cell-loss${value == null ? " is-none" : ""}`} data-label="Loss">{loss(value)}{value != null && of === "last batch" && <span class="sub">{of}</span>}</td>
      <td class={`num cell-accuracy${shown === null ? " is-none" : ""}`} data-label={shown ?? "Metric"}>{shown === null ? "–" : <>{metric(shown, metrics[shown])}<span class="sub">{shown}</span></>}</td>
      <td class="num cell-age"><Ago at={created} /><span class="sub">{took(job)}</span></td>
    </tr>
  );
}

/** How far a job is; for one that waits or failed, why. */
function Advance({ job }: { job: Job }) {
  const { progress } = job;
  if (job.status === "QUEUED") return <span class="reason" title={job.reason ?? ""}>{job.reason ?? "Waiting in the queue"}</span>;
  const bar = <Bar share={share(job) ?? (ended(job.status) ? 0 : null)} tone={TONES[job.status] ?? "idle"} label={`Progress of ${job.name}`} />;
  if (job.status === "FAILED") return <>{bar}<span class="reason reason-bad" title={job.reason ?? ""}>{job.reason ?? "Failed"}</span></>;
  if (job.status === "RUNNING" || job.status === "STOPPING" || ended(job.status)) {
    const rounds = progress?.rounds ? `${count(progress.round ?? 0)} / ${count(progress.rounds)} rounds` : progress?.round ? plural(progress.round, "round") : "";
    const left = job.status === "RUNNING" && progress?.eta_seconds ? `${duration(progress.eta_seconds)} left` : "";
    const held = job.status === "RUNNING" ? job.progress?.server_group?.held_back : null;
    if (held) return <>{bar}<span class="reason" title={held}>{held}</span></>;
    return <>{bar}<span class="sub sub-split"><span>{rounds}</span><span>{left}</span></span></>;
  }
  return <>{bar}<span class="sub">{job.reason ?? progress?.message ?? "Getting ready"}</span></>;
}

function took(job: Job): string {
  const from = seconds(job.started_at);
  if (from === null) return "";
  return duration(Math.max(0, (seconds(job.finished_at) ?? now.value) - from));
}

function Skeleton() {
  return <div class="skeleton" role="status" aria-label="Loading jobs">{[0, 1, 2, 3].map((i) => <span key={i} />)}</div>;
}

function FirstJob() {
  const origin = new URL(".", document.baseURI).href.replace(/\/$/, "");
  return (
    <main class="page first">
      <h1>Submit a first job</h1>
      <p class="lead">A job names a workload and a strategy. It appears here as soon as it is submitted, and this page follows it live.</p>
      <div class="first-commands">
        <Command label="From the command line" text={`# digits.yaml names the workload, the strategy and the workers\nrayps submit examples/digits.yaml --follow\n\n# the same with another strategy\nrayps submit examples/digits.yaml --follow \\\n  --set strategy=parameter_server:staleness=3,shards=2`} />
        <Command label="By REST" text={asCurl({ ...SAMPLE, working_dir: HERE }, origin).replace(HERE, `'"$PWD/examples"'`)} />
      </div>
      <p class="faint">Run them in a source tree of rayps. <code>RAYPS_TOKEN</code> is the service's token: <code>rayps serve</code> prints it once and stores it in the file <code>token</code> of its state directory.</p>
    </main>
  );
}
