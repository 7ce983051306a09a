/* What happened to a job (its events), and what was asked for (its spec). */
import type { Feed } from "../feed";
import { asCli, asCurl, slim } from "../lib/commands";
import { folded } from "../lib/events";
import { bytes, clock, metric, plural, stamp } from "../lib/format";
import { describeJob } from "../lib/place";
import { length, target } from "../lib/strategy";
import type { Job, JobEvent } from "../types";
import { Card, Copy, Empty } from "./bits";

const TONE: Record<string, string> = {
  failed: "bad", worker_lost: "bad", shard_lost: "bad", driver_lost: "bad", server_lost: "bad", segment_lost: "bad", restored: "warn", resized: "run", allowed: "run", scale_requested: "run", notice: "warn", driver_moves: "warn", driver_moved: "ok", warning: "warn", restarted: "warn", replaced: "warn",
  clients: "run", privacy: "run", attack: "warn", rejected: "warn", met: "ok",
  finished: "ok", succeeded: "ok", checkpoint: "idle", phase: "run", started: "run",
};

export function EventsCard({ feed }: { feed: Feed }) {
  void feed.version.value;
  const events = [...feed.events].sort((a, b) => b.time - a.time || b.seq - a.seq); // those of servers come late
  const lines = folded(events);
  return (
    <Card title="Events" id="events" class="events-card" note={events.length ? String(events.length) : undefined}>
      {events.length === 0 ? <Empty title="No events yet" /> : (
        <ol class="events" tabIndex={0} aria-label="Events, newest first">
          {lines.map((line) => <EventLine key={line.event.seq} event={line.event} more={line.more} />)}
        </ol>
      )}
    </Card>
  );
}

function EventLine({ event, more }: { event: JobEvent; more: number }) {
  return (
    <li class={`event tone-${TONE[event.kind] ?? "idle"}`}>
      <span class="event-dot" aria-hidden="true" />
      <div>
        <p class="event-head"><span class="event-kind">{event.kind.replaceAll("_", " ")}</span><time title={stamp(event.time)}>{clock(event.time)}</time></p>
        {event.message.toLowerCase() !== event.kind && <p class="event-text">{event.message}{more > 0 && <span class="faint"> (and {plural(more, "earlier one", "earlier ones")})</span>}</p>}
      </div>
    </li>
  );
}

export function SpecCard({ job }: { job: Job }) {
  const { spec } = job;
  const origin = new URL(".", document.baseURI).href.replace(/\/$/, "");
  const rest = Object.entries(slim(spec)).filter(([key]) => !["workload", "run", "code", "strategy", "workers", "epochs", "steps", "name", "resources", "params"].includes(key));
  return (
    <Card title="Specification" id="spec" tools={<>
      <Copy text={() => asCli(spec)} title="Copy as commands that submit this job again">CLI</Copy>
      <Copy text={() => asCurl(spec, origin)} title="Copy as a curl command; the token is read from RAYPS_TOKEN">curl</Copy>
    </>}>
      <dl class="facts">
        <Fact name={spec.run ? "Function" : "Workload"}><code>{target(spec)}</code></Fact>
        <Fact name="Strategy">{describeJob(job)}</Fact>
        <Fact name="Workers">{job.elastic ? `${job.elastic.least} to ${job.elastic.most}` : spec.workers ?? 1}</Fact>
        <Fact name="Length">{length(spec) || (spec.run ? "the loop's own" : "the workload's own")}</Fact>
        <Fact name="Per worker">{resources(spec.resources)}</Fact>
        {rest.map(([key, value]) => <Fact key={key} name={key.replaceAll("_", " ")}>{typeof value === "string" ? <code>{value}</code> : typeof value === "number" ? value : JSON.stringify(value)}</Fact>)}
      </dl>
    </Card>
  );
}

/** The parameters of the workload or function: all values after the start, and which of them were given with the job. */
export function ParamsCard({ job }: { job: Job }) {
  const given = (job.spec["params"] ?? {}) as Record<string, unknown>;
  const all = Object.entries(job.params ?? given).sort(([a], [b]) => Number(b in given) - Number(a in given));
  if (all.length === 0) return null;
  return (
    <Card title="Parameters" id="params" note={paramsNote(Object.keys(given).length, all.length)}>
      <dl class="facts facts-names">
        {all.map(([name, value]) => (
          <Fact key={name} name={name}><code class={name in given ? "" : "faint"}>{typeof value === "string" ? value : JSON.stringify(value)}</code></Fact>
        ))}
      </dl>
    </Card>
  );
}

function paramsNote(given: number, all: number): string {
  return given === 0 ? "all are defaults" : given < all ? `${given} given, the others are defaults` : "all are given";
}

export function ResultCard({ job }: { job: Job }) {
  const metrics = Object.entries(job.metrics ?? {});
  const paths = Object.entries({ checkpoint: job.checkpoint, "best checkpoint": job.progress?.best });
  if (metrics.length === 0 && !paths.some(([, path]) => path)) return null;
  return (
    <Card title="Result" id="result">
      <dl class="facts">
        {metrics.map(([name, value]) => <Fact key={name} name={name}>{metric(name, value)}</Fact>)}
        {paths.map(([name, path]) => path && (
          <Fact key={name} name={name}><span class="path"><code>{path}</code><Copy text={() => path} title={`Copy the ${name}'s path`} small /></span></Fact>
        ))}
      </dl>
    </Card>
  );
}

export function Fact({ name, children }: { name: string; children: preact.ComponentChildren }) {
  return <div><dt>{name}</dt><dd>{children}</dd></div>;
}

function resources(wanted: Record<string, number> | undefined): string {
  const entries = Object.entries(wanted ?? { cpu: 1 });
  return entries.map(([key, amount]) => (key === "memory" ? `${bytes(amount)} memory` : `${amount} ${key.toUpperCase()}`)).join(", ") || "nothing reserved";
}
