/* Who holds what in a group: its servers, the jobs on it, replication, and what is on its way. */
import { bytes, clock, count, duration, percent, plural, short, stamp } from "../lib/format";
import { inOrder, moved, movedSegment, placed, replication, risk, segmentName, spaceName, tint } from "../lib/servers";
import { href } from "../route";
import type { Group, GroupServer, GroupSpace } from "../types";
import { Badge, Bar, Card, Empty } from "./bits";
import type { Marked } from "./ring";

export function ReplicationCard({ group }: { group: Group }) {
  const state = replication(group);
  const { tone, text } = risk(group);
  const share = (part: number) => ({ width: `${state.all ? ((part / state.all) * 100).toFixed(2) : 0}%` });
  const words = `${count(state.whole)} complete, ${count(state.bare)} lacking a backup, ${count(state.lost)} lost`;
  return (
    <Card title="Replication" id="replication" note={group.replicas === 0 ? "no backups" : group.replicas === 1 ? "1 backup of each segment" : `${group.replicas} backups of each segment`}>
      {state.all === 0 ? <p class="card-foot">There are no segments yet.</p> : <>
        <div class="held" role="img" aria-label={words} title={words}>
          {(["whole", "bare", "lost"] as const).map((key) => state[key] > 0 && <span key={key} class={`held-${key}`} style={share(state[key])} />)}
        </div>
        <dl class="held-words">
          <div><dt><i class="held-whole" />complete</dt><dd>{count(state.whole)}</dd></div>
          <div><dt><i class="held-bare" />lack a backup</dt><dd>{count(state.bare)}</dd></div>
          <div><dt><i class="held-lost" />lost</dt><dd>{count(state.lost)}</dd></div>
        </dl>
        <p class={`held-risk tone-${tone}`}>{text}</p>
      </>}
    </Card>
  );
}

const MOST_MOVES = 5;

export function MovesCard({ group }: { group: Group }) {
  const shown = group.moves.slice(0, MOST_MOVES);
  const segments = placed(group.spaces);
  const names = group.servers.map((server) => server.name);
  return (
    <Card title="Moves" id="moves" class="moves-card" note={group.moves.length ? `${plural(group.moves.length, "segment")} moving` : `${count(group.counts["moves"] ?? 0)} so far, ${bytes(group.counts["moved_bytes"] ?? 0)}`}>
      {shown.length === 0 ? <Empty title="No segment moves">Segments move when servers join, leave, die or are overloaded. Jobs keep training.</Empty> : (
        <ul class="moves">
          {shown.map((move) => {
            const segment = movedSegment(move, segments);
            const share = moved(move, segment);
            const name = segment ? segmentName(segment) : `segment ${move.segment}`;
            return (
              <li key={`${move.space}/${move.segment}/${move.to}`}>
                <p class="move-head">
                  <span class="move-what">{name} <span class="faint">{spaceName(move.space, group.jobs)}</span></span>
                  <span class="faint">{move.phase === "handing" ? "handing over" : move.phase}{typeof move.seconds === "number" ? `, ${move.seconds.toFixed(1)} s` : ""}</span>
                </p>
                <div class="move-way">
                  <span class="move-end"><i class={`server-mark ${move.from ? `srv-${tint(move.from, names)}` : "srv-none"}`} />{move.from ?? "new"}</span>
                  <Bar share={share} tone={move.phase === "handing" ? "ok" : "run"} label={`${name} to ${move.to}`} />
                  <span class="move-end"><i class={`server-mark srv-${tint(move.to, names)}`} />{move.to}</span>
                </div>
              </li>
            );
          })}
          {group.moves.length > shown.length && <li class="faint">and {count(group.moves.length - shown.length)} more</li>}
        </ul>
      )}
    </Card>
  );
}

export function ServersCard({ group, marked, onDrain }: { group: Group; marked: Marked; onDrain: (server: GroupServer) => void }) {
  const servers = inOrder(group.servers);
  const segments = placed(group.spaces);
  const rows = (server: GroupServer) => segments.reduce((sum, segment) => sum + (segment.table && segment.primary === server.name ? segment.rows ?? 0 : 0), 0);
  const most = Math.max(1e-9, ...servers.map((server) => server.state === "dead" ? 0 : server.operations_s ?? 0));
  const alive = servers.filter((server) => server.state === "alive").length;
  return (
    <Card title="Servers" id="servers" note={`${count(alive)} of ${count(group.wanted)} alive`}>
      {servers.length === 0 ? <Empty title="No server yet">{group.reason ?? "They appear here as soon as they are started."}</Empty> : (
        <div class="scroll-x" tabIndex={0} aria-label="Servers, a table that scrolls">
          <table class="plain servers">
            <thead><tr><th>Server</th><th>State</th><th>Host</th><th class="num">Primaries</th><th class="num">Copies</th><th class="num">Size</th><th class="num" title="Rows of tables whose primary it is">Rows</th><th class="col-load" title="A push or pull counts once at each server that it reaches">Operations/s</th><th class="num" title="Share of one core">CPU</th><th class="num">Heard</th><th /></tr></thead>
            <tbody>{servers.map((server) => (
              <tr key={server.name} class={marked.value === server.name ? "is-marked" : ""}>
                <td><span class="server-name"><i class={`server-mark srv-${tint(server.name, servers.map((each) => each.name))}`} />{server.name}</span></td>
                <td><span class={`state state-${server.state === "alive" ? "run" : server.state === "dead" ? "bad" : "warn"}`}>{server.state}</span></td>
                <td><span class="host">{server.host ?? "–"}</span>{server.pid != null && <span class="faint"> · {server.pid}</span>}</td>
                <td class="num">{count(server.primaries)}</td>
                <td class="num">{count(server.copies)}</td>
                <td class="num">{bytes(server.bytes)}</td>
                <td class="num">{server.state !== "dead" && rows(server) ? count(rows(server)) : "–"}</td>
                <td>{server.operations_s == null ? "–" : <span class="load"><span class="load-bar" style={{ width: `${(server.operations_s / most) * 100}%` }} /><span class="load-text">{short(server.operations_s)}</span></span>}</td>
                <td class="num">{percent(server.cpu, 0)}</td>
                <td class="num">{typeof server.seen_s === "number" ? server.seen_s < 1 ? "now" : `${duration(server.seen_s)} ago` : "–"}</td>
                <td class="num"><button type="button" class="button button-small" disabled={server.state !== "alive"} aria-label={`Drain ${server.name}`} onClick={() => onDrain(server)}>Drain</button></td>
              </tr>
            ))}</tbody>
          </table>
        </div>
      )}
    </Card>
  );
}

export function SpacesCard({ group }: { group: Group }) {
  const waiting = group.jobs.filter((job) => !group.spaces.some((space) => space.name === job.id));
  return (
    <Card title="Jobs" id="spaces" note={group.spaces.length ? `${plural(group.spaces.length, "space")}` : undefined}>
      {group.spaces.length + waiting.length === 0 ? <Empty title="No job uses this group"><code>rayps submit job.yaml --server-group {group.name}</code></Empty> : (
        <div class="scroll-x" tabIndex={0} aria-label="Jobs, a table that scrolls">
          <table class="plain spaces">
            <thead><tr><th>Job</th><th class="num">Workers</th><th class="num">Segments</th><th>Tables</th><th class="num">Rows</th><th class="col-quota">Size</th><th class="col-quota" title="A push or pull counts once at each server that it reaches">Operations/s</th><th class="num" title="Operations delayed because the job reached its quota">Throttled</th></tr></thead>
            <tbody>
              {group.spaces.map((space) => <SpaceLine key={space.number} space={space} group={group} />)}
              {waiting.map((job) => (
                <tr key={job.id}><td><JobLink id={job.id} group={group} /></td><td class="num">{count(job.workers)}</td><td colSpan={6} class="faint">no segments yet</td></tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
    </Card>
  );
}

function SpaceLine({ space, group }: { space: GroupSpace; group: Group }) {
  const ready = space.segments.filter((segment) => segment.state === "ready").length;
  const held = space.throttled ?? space.rejected;
  return (
    <tr>
      <td><JobLink id={space.name} group={group} />{space.branch_of && <span class="sub">branch of {spaceName(space.branch_of, group.jobs)}</span>}</td>
      <td class="num">{count(space.workers)}</td>
      <td class="num">{ready === space.segments.length ? count(ready) : `${count(ready)} of ${count(space.segments.length)} ready`}</td>
      <td>{space.tables?.length ? space.tables.join(", ") : <span class="faint">none</span>}</td>
      <td class="num" title={space.evicted ? `${count(space.evicted)} rows were evicted` : undefined}>{space.rows ? short(space.rows) : "–"}</td>
      <td><Quota value={space.bytes ?? 0} limit={space.quota?.bytes} words={bytes} label="Size" /></td>
      <td><Quota value={space.operations_s ?? 0} limit={space.quota?.operations} words={short} label="Operations per second" /></td>
      <td class="num">{held ? <span class="slow">{count(held)}</span> : "0"}</td>
    </tr>
  );
}

function JobLink({ id, group }: { id: string; group: Group }) {
  const job = group.jobs.find((each) => each.id === id);
  if (!job) return <span class="mono space-name" title={id}>{spaceName(id, group.jobs)}</span>;
  return <span class="job-link"><a href={href(["jobs", id])}>{job.name}</a><Badge status={job.status} /></span>;
}

/** A value against its quota, as a bar; without a quota, the value alone. */
function Quota({ value, limit, words, label }: { value: number; limit: number | null | undefined; words: (value: number) => string; label: string }) {
  if (!limit) return <span>{words(value)}</span>;
  const share = Math.min(1, value / limit);
  return <>{<Bar share={share} tone={share > 0.9 ? "bad" : share > 0.7 ? "warn" : "run"} label={`${label} of its quota`} />}<span class="sub">{words(value)} of {words(limit)}</span></>;
}

const TONE: [string, string][] = [
  ["dead", "bad"], ["lost", "bad"], ["not_started", "bad"], ["nonsense", "bad"], ["promot", "warn"], ["leaving", "warn"], ["left", "warn"],
  ["back", "ok"], ["heal", "ok"], ["resized", "ok"], ["resiz", "run"], ["drain", "run"], ["start", "run"], ["joined", "run"], ["opened", "run"],
];

export function GroupEventsCard({ group }: { group: Group }) {
  const events = [...group.events].reverse();
  const tone = (kind: string) => TONE.find(([part]) => kind.includes(part))?.[1] ?? "idle";
  return (
    <Card title="Events" id="events" class="events-card" note={events.length ? String(events.length) : undefined}>
      {events.length === 0 ? <Empty title="No events yet" /> : (
        <ol class="events" tabIndex={0} aria-label="Events, newest first">
          {events.map((event, i) => (
            <li key={events.length - i} class={`event tone-${tone(event.kind)}`}>
              <span class="event-dot" aria-hidden="true" />
              <div>
                <p class="event-head"><span class="event-kind">{event.kind.replaceAll("_", " ")}</span><time title={stamp(event.time)}>{clock(event.time)}</time></p>
                {event.message && <p class="event-text">{event.message}</p>}
              </div>
            </li>
          ))}
        </ol>
      )}
    </Card>
  );
}
