/* One server group, live: who holds what, how busy it is, what moves, and whose it is. */
import { useSignal } from "@preact/signals";
import { useEffect, useMemo } from "preact/hooks";
import { drainServer, resizeGroup, stopGroup } from "../api";
import { GroupFeed } from "../groups";
import { bytes, count, plural, seconds, short } from "../lib/format";
import { GROUP_TONES, skew } from "../lib/servers";
import { Ago, Tile } from "../parts/bits";
import { Confirm } from "../parts/confirm";
import { GroupEventsCard, MovesCard, ReplicationCard, ServersCard, SpacesCard } from "../parts/holding";
import { GroupBadge, StopIcon } from "../parts/icons";
import { HeatCard, HotCard } from "../parts/load";
import { Missing } from "../parts/missing";
import { RingCard, type Marked } from "../parts/ring";
import { href, put, route } from "../route";
import type { Group, GroupServer } from "../types";

export function GroupPage({ name }: { name: string }) {
  const feed = useMemo(() => new GroupFeed(name), [name]);
  useEffect(() => () => feed.stop(), [feed]);
  const marked: Marked = useSignal<string | null>(null);
  const leaving = useSignal<GroupServer | null>(null);
  const group = feed.group.value;
  const problem = feed.problem.value;
  const chosen = route.value.query.get("job") ?? "";
  useEffect(() => {
    document.title = `${name} – rayps`;
  }, [name]);
  if (problem && !group) return (
    <Missing
      what="server group" status={problem.status} text={problem.text} onRetry={() => void feed.start()}
      gone={<>No group is called <code>{name}</code>. It may have been stopped.</>}
      all={{ href: href(["servers"]), text: "All server groups" }}
    />
  );
  if (!group) return <main class="page"><div class="skeleton" role="status" aria-label="Loading the server group"><span /><span /><span /></div></main>;
  const space = group.spaces.some((each) => each.name === chosen) ? chosen : "";
  return (
    <main class="page group">
      <Head group={group} feed={feed} />
      <Tiles group={group} />
      <div class="grid group-grid">
        <RingCard group={group} space={space} marked={marked} onSpace={(value) => put({ job: value || null })} />
        <div class="stack"><ReplicationCard group={group} /><MovesCard group={group} /></div>
        <div class="wide"><HeatCard group={group} space={space} /></div>
        <div class="wide"><ServersCard group={group} marked={marked} onDrain={(server) => (leaving.value = server)} /></div>
        <div class="wide"><SpacesCard group={group} /></div>
        <HotCard group={group} space={space} />
        <GroupEventsCard group={group} />
      </div>
      <Confirm title={`Drain ${leaving.value?.name ?? ""}?`} open={leaving.value !== null} onClose={() => (leaving.value = null)} word="Drain the server" back="Keep it"
        act={async () => feed.take(await drainServer(group.name, leaving.value?.name ?? ""))}>
        <p>What it holds moves to the others while the jobs go on; then it leaves, and the group has {plural(group.wanted - 1, "server")}.</p>
      </Confirm>
    </main>
  );
}

function Head({ group, feed }: { group: Group; feed: GroupFeed }) {
  const asking = useSignal<"resize" | "stop" | null>(null);
  const wanted = useSignal(group.wanted);
  const over = feed.gone.value || group.status === "stopping";
  const least = group.replicas + 1;
  const change = wanted.value - group.wanted;
  return (
    <header class="job-head">
      <nav aria-label="Breadcrumb"><a href={href(["servers"])}>Server groups</a><span aria-hidden="true">/</span></nav>
      <div class="job-title">
        <h1>{group.name}</h1>
        <GroupBadge status={feed.gone.value ? "stopped" : group.status} large />
        {!over && <span class="group-actions">
          <button type="button" class="button" onClick={() => { wanted.value = group.wanted; asking.value = "resize"; }}>Resize</button>
          <button type="button" class="button button-danger" onClick={() => (asking.value = "stop")}><StopIcon /><span>Stop</span></button>
        </span>}
      </div>
      <p class="job-line">
        <span>{plural(group.wanted, "server")}</span>
        <span>{group.replicas === 0 ? "no backups" : plural(group.replicas, "backup")}</span>
        <span>{plural(group.spaces.length, "job space")}</span>
        <span>started&nbsp;<Ago at={seconds(group.created_at)} /></span>
      </p>
      {(group.reason || feed.gone.value) && <p class={`job-reason tone-${GROUP_TONES[group.status] ?? "warn"}`} role="status">{feed.gone.value ? "The group has ended. Its parameters are deleted." : group.reason}</p>}
      <Confirm title={`Resize ${group.name}`} open={asking.value === "resize"} onClose={() => (asking.value = null)} word={change === 0 ? "Resize" : `Resize to ${count(wanted.value)}`} back="Cancel" ready={change !== 0} plain
        act={async () => feed.take(await resizeGroup(group.name, wanted.value))}>
        <div class="stepper">
          <button type="button" class="button" aria-label="One server less" disabled={wanted.value <= least} onClick={() => (wanted.value -= 1)}>−</button>
          <input type="number" aria-label="Servers" min={least} max={1000} value={wanted.value} onInput={(event) => { const value = Math.round(event.currentTarget.valueAsNumber); if (value >= 1) wanted.value = Math.min(1000, value); }} />
          <button type="button" class="button" aria-label="One server more" onClick={() => (wanted.value += 1)}>+</button>
          <span class="faint">of {count(group.wanted)} now</span>
        </div>
        <p>{wanted.value < least ? `Each segment has a primary and ${plural(group.replicas, "backup", "backups")} on different servers: at least ${least} servers.`
          : change === 0 ? "Segments move while the jobs keep training."
          : change > 0 ? `${plural(change, "server")} ${change === 1 ? "is" : "are"} started and about ${percentOf(change, wanted.value)} of the data moves there. Jobs keep training.`
          : `${plural(-change, "server")} ${change === -1 ? "leaves" : "leave"}, after about ${percentOf(-change, group.wanted)} of the data has moved to the others.`}</p>
      </Confirm>
      <Confirm title={`Stop ${group.name}?`} open={asking.value === "stop"} onClose={() => (asking.value = null)} word="Stop the group" back="Keep it"
        act={async () => feed.take(await stopGroup(group.name))}>
        <p>The servers end, and the parameters and tables on them are gone; checkpoints of jobs are kept. This cannot be undone.</p>
      </Confirm>
    </header>
  );
}

function Tiles({ group }: { group: Group }) {
  const alive = group.servers.filter((server) => server.state === "alive").length;
  const load = group.spaces.reduce((sum, space) => sum + (space.operations_s ?? 0), 0);
  const rows = group.spaces.reduce((sum, space) => sum + (space.rows ?? 0), 0);
  const lean = skew(group.servers);
  const deaths = group.counts["deaths"] ?? 0;
  return (
    <dl class="tiles">
      <Tile name="Servers" value={`${count(alive)} of ${count(group.wanted)}`} note={group.moves.length ? `${plural(group.moves.length, "segment")} moving` : "alive"} tone={alive < group.wanted ? "warn" : ""} />
      <Tile name="Load" value={short(load)} unit="operations/s" note={lean === null ? "no load" : `${plural(group.spaces.length, "job")} on it`} />
      <Tile name="Busiest server" value={lean === null ? "–" : `${lean.toFixed(2)}×`} note="of the mean load" tone={lean !== null && lean >= 1.5 ? "warn" : ""} />
      <Tile name="Held" value={bytes(group.servers.reduce((sum, server) => sum + (server.bytes ?? 0), 0))} note={rows ? `${short(rows)} rows, backups included` : "backups included"} />
      <Tile name="Servers lost" value={count(deaths)} note={deaths ? `${plural(group.counts["promotions"] ?? 0, "promotion")}` : "none so far"} tone={deaths && group.status === "healing" ? "warn" : ""} />
    </dl>
  );
}

function percentOf(part: number, whole: number): string {
  return `${Math.round((part / whole) * 100)}%`;
}
