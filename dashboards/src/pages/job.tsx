/* One job, live: where it stands, how it learns, who does what, and what it says. */
import { useSignal } from "@preact/signals";
import { useEffect, useMemo } from "preact/hooks";
import { address, stop } from "../api";
import { now } from "../clock";
import { Feed } from "../feed";
import { count, duration, loss, metric, plural, seconds, short } from "../lib/format";
import { mainMetric } from "../lib/plot";
import { isPrivate } from "../lib/privacy";
import { ended, share, TONES, WORDS } from "../lib/status";
import { describeJob, groupOf, shownLoss } from "../lib/place";
import { current, hasStaleness, isFederated, length, meetsNowAndThen, phases, usesAdmm, target, usesPipeline, usesServer, words } from "../lib/strategy";
import { workersText } from "../lib/workers";
import { MeetingsCard, ResidualsCard } from "../parts/apart";
import { Ago, Badge, Bar, Copy, Dialog, Tile } from "../parts/bits";
import { ClientsCard } from "../parts/clients";
import { CodeCard } from "../parts/code";
import { LossCard, RateCard } from "../parts/curves";
import { ElasticCard } from "../parts/elastic";
import { EventsCard, ParamsCard, ResultCard, SpecCard } from "../parts/facts";
import { CohortsCard, LearntCard, VirtualCard } from "../parts/federated";
import { StopIcon } from "../parts/icons";
import { LogsCard } from "../parts/logs";
import { MetricsCard } from "../parts/metrics";
import { Missing } from "../parts/missing";
import { PrivacyCard } from "../parts/privacy";
import { ShardsCard, StalenessCard, WorkersCard } from "../parts/people";
import { CostsCard, ScheduleCard } from "../parts/schedule";
import { ScaleButton } from "../parts/scale";
import { TimeCard } from "../parts/time";
import { href } from "../route";
import { session } from "../stream";
import type { Job } from "../types";

export function JobPage({ id }: { id: string }) {
  const feed = useMemo(() => new Feed(id), [id]);
  useEffect(() => () => feed.stop(), [feed]);
  const job = feed.job.value;
  const problem = feed.problem.value;
  useEffect(() => {
    document.title = job ? `${titleMark(job)}${job.name} – rayps` : "Job – rayps";
  }, [job?.name, job?.status, job?.progress?.round]);
  if (problem && !job) return (
    <Missing
      what="job" status={problem.status} text={problem.text} onRetry={() => void feed.reload()}
      gone={<>No job has the id <code>{id}</code>. It may have been removed, or belongs to another service.</>}
      all={{ href: href(["jobs"]), text: "All jobs" }}
    />
  );
  if (!job) return <main class="page"><div class="skeleton" role="status" aria-label="Loading the job"><span /><span /><span /></div></main>;
  const { strategy } = job.spec;
  const server = usesServer(strategy);
  const stale = hasStaleness(strategy);
  return (
    <main class="page job">
      <Head job={job} feed={feed} />
      <Tiles job={job} feed={feed} />
      <div class="grid">
        <LossCard feed={feed} />
        <div class="stack">
          <RateCard feed={feed} height={stale ? 132 : 300} hidden={isPrivate(strategy)} />
          {stale && <StalenessCard feed={feed} />}
        </div>
        <MetricsCard feed={feed} />
        {isPrivate(strategy) ? <div class="wide"><PrivacyCard feed={feed} /></div> : isFederated(strategy) && <Federated feed={feed} />}
        {usesAdmm(strategy) && <div class="wide"><ResidualsCard feed={feed} /></div>}
        {meetsNowAndThen(strategy) && <div class="wide"><MeetingsCard feed={feed} /></div>}
        <div class="wide"><WorkersCard feed={feed} /></div>
        {job.progress?.account && <div class="wide"><TimeCard feed={feed} /></div>}
        {job.progress?.server_group ? <div class="wide"><ElasticCard feed={feed} /></div> : server && <div class="wide"><ShardsCard feed={feed} /></div>}
        {usesPipeline(strategy) && <div class="wide"><ScheduleCard feed={feed} /></div>}
        <CostsCard feed={feed} />
        <LogsCard feed={feed} />
        <EventsCard feed={feed} />
        <div class="wide pair"><ResultCard job={job} /><SpecCard job={job} /></div>
        <div class="wide"><ParamsCard job={job} /></div>
        {typeof job.spec["code"] === "string" && <div class="wide"><CodeCard id={job.id} code={job.spec["code"]} /></div>}
      </div>
    </main>
  );
}

/** What a federated job has beside any other: its rounds of clients, what came of them, and their data. */
function Federated({ feed }: { feed: Feed }) {
  return (
    <>
      <div class="wide"><CohortsCard feed={feed} /></div>
      <div class="wide pair"><LearntCard feed={feed} /><VirtualCard feed={feed} /></div>
      <div class="wide"><ClientsCard feed={feed} /></div>
    </>
  );
}

function Head({ job, feed }: { job: Job; feed: Feed }) {
  const over = ended(job.status);
  const created = seconds(job.created_at);
  const said = remark(job);
  return (
    <header class="job-head">
      <nav aria-label="Breadcrumb"><a href={href(["jobs"])}>Jobs</a><span aria-hidden="true">/</span></nav>
      <div class="job-title">
        <h1>{job.name}</h1>
        <Badge status={job.status} large />
        {!over && <span class="group-actions"><ScaleButton job={job} feed={feed} /><StopButton job={job} feed={feed} /></span>}
      </div>
      <p class="job-line">
        <span class="mono id">{job.id}<Copy text={() => job.id} title="Copy the job's id" small /></span>
        <span class="mono">{target(job.spec)}</span>
        <span>{describeJob(job)}</span>
        {job.sweep && <span>sweep&nbsp;<a href={href(["sweeps", job.sweep])}>{job.sweep}</a></span>}
        <span>{workersText(job)}</span>
        {length(job.spec) && <span>{length(job.spec)}</span>}
        {typeof job.spec["server_group"] === "string" && <span>on&nbsp;<a href={href(["servers", job.spec["server_group"]])}>{groupOf(job)}</a></span>}
        {typeof job.spec["code"] === "string" && <span>code&nbsp;<a class="mono" href={address(`code/${job.spec["code"]}`)} title="Download the packed files as a tar archive">{job.spec["code"].slice(0, 12)}</a></span>}
        <span>submitted&nbsp;<Ago at={created} /></span>
        {job.attempt > 1 && <span>attempt {job.attempt}</span>}
      </p>
      {said && <p class={`job-reason tone-${job.status === "RUNNING" ? "warn" : TONES[job.status] ?? "warn"}`} role="status">{said}</p>}
      <Advance job={job} />
    </header>
  );
}

/** What there is to say beside the status; a job that runs or succeeded needs no words. */
function remark(job: Job): string | null {
  if (job.status === "SUCCEEDED") return null;
  if (ended(job.status) || job.status === "QUEUED") return job.reason;
  return job.status === "RUNNING" ? job.reason : job.reason || job.progress?.message || null;
}

function Advance({ job }: { job: Job }) {
  const { progress } = job;
  if (job.status === "QUEUED") return null;
  const parts = [
    progress?.rounds && isFederated(job.spec.strategy) ? `${count(progress.round ?? 0)} of ${plural(progress.rounds, "round")}` : progress?.rounds ? `Round ${count(progress.round ?? 0)} of ${count(progress.rounds)}` : progress?.round ? `Round ${count(progress.round)}` : "",
    progress?.epochs && progress.epochs !== progress.rounds ? `epoch ${Math.min((progress.epoch ?? 0) + 1, progress.epochs)} of ${progress.epochs}` : "",
    phases(job.spec.strategy).length > 1 && !ended(job.status) ? `now ${words(current(progress?.strategy, job.spec.strategy)).toLowerCase()}` : "",
  ].filter(Boolean);
  const left = job.status === "RUNNING" && progress?.eta_seconds ? `${duration(progress.eta_seconds)} left` : "";
  return (
    <div class="job-progress">
      <Bar share={share(job) ?? (ended(job.status) ? 0 : null)} tone={TONES[job.status] ?? "idle"} label="Progress" />
      <p class="sub sub-split"><span>{parts.join(", ")}</span><span>{left}</span></p>
    </div>
  );
}

function StopButton({ job, feed }: { job: Job; feed: Feed }) {
  const asking = useSignal(false);
  const busy = useSignal(false);
  const error = useSignal("");
  const asked = job.stop_requested || job.status === "STOPPING";
  const confirm = async () => {
    busy.value = true;
    try {
      feed.take(await stop(job.id));
      asking.value = false;
    } catch (reason) {
      if ((reason as { status?: number }).status === 401) session.value = false;
      error.value = (reason as Error).message;
    } finally {
      busy.value = false;
    }
  };
  return (
    <>
      <button type="button" class="button button-danger job-stop" disabled={asked} onClick={() => { error.value = ""; asking.value = true; }}>
        <StopIcon /><span>{asked ? "Stopping" : "Stop"}</span>
      </button>
      <Dialog title={`Stop ${job.name}?`} open={asking.value} onClose={() => (asking.value = false)}>
        <p>The job ends with status Stopped. Checkpoints, metrics and logs are kept. This cannot be undone.</p>
        {error.value && <p class="form-error" role="alert">{error.value}</p>}
        <div class="dialog-actions">
          <button type="button" class="button" onClick={() => (asking.value = false)}>Keep it running</button>
          <button type="button" class="button button-danger-solid" disabled={busy.value} onClick={confirm}>{busy.value ? "Stopping" : "Stop the job"}</button>
        </div>
      </Dialog>
    </>
  );
}

function Tiles({ job, feed }: { job: Job; feed: Feed }) {
  void feed.version.value;
  const { progress } = job;
  const { evaluations } = feed.series;
  const loading = feed.loading.value !== null;
  const last = loading ? undefined : evaluations[evaluations.length - 1];
  const name = mainMetric(loading ? [] : evaluations, job);
  const value = name ? (job.metrics?.[name] ?? last?.metrics[name] ?? job.progress?.metrics?.[name]) : null;
  const started = seconds(job.started_at);
  const spent = started === null ? null : Math.max(0, (seconds(job.finished_at) ?? now.value) - started);
  const failures = progress?.failures ?? 0;
  const shown = last?.metrics["loss"] != null ? { value: last.metrics["loss"], of: "evaluation" } : shownLoss(job);
  const batch = shown.of === "evaluation" && !ended(job.status) ? `, last batch ${loss(progress?.loss)}` : "";
  return (
    <dl class="tiles">
      <Tile name="Loss" value={progress?.round && progress.loss === null && feed.series.badRounds > 0 ? "NaN" : loss(shown.value)} note={`${shown.of}${batch}`} />
      <Tile name={name ? name.charAt(0).toUpperCase() + name.slice(1) : "Accuracy"} value={name ? metric(name, value) : "–"} note={last ? `after round ${count(last.round)}` : job.spec.run && name ? "last logged" : "not evaluated yet"} />
      <Tile name="Throughput" value={short(ended(job.status) ? average(feed) : progress?.samples_per_second)} unit="samples/s" note={ended(job.status) ? (loading ? "mean of the rounds loaded" : "mean of the run") : "now"} />
      <Tile name="Time" value={duration(spent)} note={started === null ? "not started" : job.finished_at ? "in total" : progress?.eta_seconds ? `${duration(progress.eta_seconds)} left` : "so far"} />
      <Tile name="Failures" value={count(failures)} note={failures ? `generation ${progress?.generation ?? 1}, ${WORDS[job.status].toLowerCase()}` : "none so far"} tone={failures ? "warn" : ""} />
    </dl>
  );
}

function average(feed: Feed): number | null {
  let samples = 0;
  let time = 0;
  for (const bucket of feed.series.buckets) {
    samples += bucket.samples;
    time += bucket.seconds;
  }
  return time > 0 && samples > 0 ? samples / time : null;
}

function titleMark(job: Job): string {
  const done = share(job);
  if (job.status === "SUCCEEDED") return "✓ ";
  if (job.status === "FAILED") return "✕ ";
  return done !== null && !ended(job.status) ? `${Math.floor(done * 100)}% ` : "";
}
