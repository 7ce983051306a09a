/* The hash ring of a group: a segment for each arc, coloured by its primary; its copies on the rings inside. */
import { useSignal, type Signal } from "@preact/signals";
import { bytes, count, plural, short } from "../lib/format";
import { arcs, inOrder, placed, sector, segmentName, spaceName, tint, type Placed } from "../lib/servers";
import type { Group, GroupMove } from "../types";
import { Card, Empty } from "./bits";

const OUTER = 150;
const THICK = 34;
const COPY = 13;
const GAP = 3;
const RINGS = 3; // of copies; more are in the table

/** What the pages highlight together: one server's holdings. */
export type Marked = Signal<string | null>;

export function RingCard({ group, space, marked, onSpace }: { group: Group; space: string; marked: Marked; onSpace: (space: string) => void }) {
  const segments = placed(group.spaces, space);
  return (
    <Card title="Ring" id="ring" note={segments.length ? "primaries outside, backups inside" : undefined}
      tools={group.spaces.length > 1 && <SpaceChoice group={group} space={space} onSpace={onSpace} />}>
      {segments.length === 0 ? <Empty title="No segments yet">Segments appear as soon as a job with <code>server_group: {group.name}</code> starts.</Empty> : <>
        <Ring group={group} segments={segments} marked={marked} />
        <Legend group={group} marked={marked} />
        <SegmentTable group={group} segments={segments} />
      </>}
    </Card>
  );
}

export function SpaceChoice({ group, space, onSpace }: { group: Group; space: string; onSpace: (space: string) => void }) {
  return (
    <select aria-label="Which job's segments" value={space} onChange={(event) => onSpace(event.currentTarget.value)}>
      <option value="">All jobs</option>
      {group.spaces.map((each) => <option key={each.name} value={each.name}>{spaceName(each.name, group.jobs)}</option>)}
    </select>
  );
}

function Ring({ group, segments, marked }: { group: Group; segments: Placed[]; marked: Marked }) {
  const at = useSignal<number | null>(null);
  const cut = arcs(segments);
  const names = group.servers.map((server) => server.name);
  const moves = new Map(group.moves.map((move) => [`${move.space}/${move.segment}`, move]));
  const rings = Math.min(RINGS, Math.max(group.replicas, ...segments.map((segment) => segment.copies.length)));
  const active = at.value === null ? null : segments[Math.min(at.value, segments.length - 1)] ?? null;
  const walk = (event: KeyboardEvent) => {
    const step = event.key === "ArrowRight" || event.key === "ArrowDown" ? 1 : event.key === "ArrowLeft" || event.key === "ArrowUp" ? -1 : 0;
    if (event.key === "Escape") at.value = null;
    if (!step) return;
    event.preventDefault();
    at.value = ((at.value ?? (step > 0 ? -1 : 0)) + step + segments.length) % segments.length;
  };
  const paint = (server: string | null | undefined) => (server ? `srv-${tint(server, names)}${marked.value && marked.value !== server ? " is-dim" : ""}` : "srv-none");
  return (
    <div class="ring-host" tabIndex={0} role="group" aria-label={`Ring of ${plural(segments.length, "segment")} on ${plural(group.servers.length, "server")}; arrow keys move through them`}
      onKeyDown={walk} onBlur={() => (at.value = null)}>
      <svg class="ring" viewBox="-160 -160 320 320" role="img" aria-label={summary(group, segments)} onMouseLeave={() => (at.value = null)}>
        {segments.map((segment, i) => {
          const arc = cut[i]!;
          const move = moves.get(`${segment.space}/${segment.index}`);
          return (
            <g key={`${segment.space}/${segment.index}`} class={`arc${i === at.value ? " is-at" : ""}${segments.length > 240 ? " is-fine" : ""}`} onMouseEnter={() => (at.value = i)}>
              <path class={`${paint(segment.primary)}${segment.state === "lost" ? " is-lost" : ""}`} d={sector(arc, OUTER - THICK, OUTER)} />
              {Array.from({ length: rings }, (_, k) => {
                const outer = OUTER - THICK - GAP - k * (COPY + GAP);
                return <path key={k} class={`copy ${paint(segment.copies[k])}`} d={sector(arc, outer - COPY, outer)} />;
              })}
              {move && <path class={`rim ${paint(move.to)}`} d={sector(arc, OUTER + 2, OUTER + 8)} />}
            </g>
          );
        })}
      </svg>
      <div class="ring-centre">{active ? <About segment={active} group={group} move={moves.get(`${active.space}/${active.index}`)} /> : <Overview group={group} segments={segments} />}</div>
      <p class="sr" role="status">{active ? spoken(active, group) : ""}</p>
    </div>
  );
}

function Overview({ group, segments }: { group: Group; segments: Placed[] }) {
  return (
    <>
      <b>{count(segments.length)}</b>
      <span>segments</span>
      <span class="faint">{bytes(segments.reduce((sum, segment) => sum + (segment.bytes ?? 0), 0))}</span>
      <span class="faint">{group.replicas === 0 ? "no backups" : group.replicas === 1 ? "1 backup each" : `${group.replicas} backups each`}</span>
    </>
  );
}

function About({ segment, group, move }: { segment: Placed; group: Group; move: GroupMove | undefined }) {
  return (
    <>
      <b class="ring-name">{segmentName(segment)}</b>
      <span class="faint">{spaceName(segment.space, group.jobs)}</span>
      <span>{move ? `${move.from ?? "new"} → ${move.to}` : segment.primary ?? "no server"}</span>
      <span class="faint">{segment.copies.length ? `backup on ${segment.copies.join(", ")}` : "no copy"}</span>
      <span class="faint">{short(segment.operations_s)} op/s, {bytes(segment.bytes)}</span>
    </>
  );
}

function Legend({ group, marked }: { group: Group; marked: Marked }) {
  const names = group.servers.map((server) => server.name);
  return (
    <ul class="ring-legend" aria-label="Servers">
      {inOrder(group.servers).map((server) => (
        <li key={server.name}>
          <button type="button" class={`legend${marked.value === server.name ? " is-on" : ""}`} aria-pressed={marked.value === server.name}
            title={`Show only the segments of ${server.name}`} onClick={() => (marked.value = marked.value === server.name ? null : server.name)}>
            <i class={`server-mark srv-${tint(server.name, names)}`} />{server.name}{server.state !== "alive" && <span class="faint"> {server.state}</span>}
          </button>
        </li>
      ))}
    </ul>
  );
}

function SegmentTable({ group, segments }: { group: Group; segments: Placed[] }) {
  const open = useSignal(false);
  return (
    <details class="as-table" onToggle={(event) => (open.value = event.currentTarget.open)}>
      <summary>As a table</summary>
      {open.value && <div class="scroll-x segment-table" tabIndex={0} aria-label="Segments">
        <table class="plain">
          <thead><tr><th>Job</th><th>Segment</th><th>Primary</th><th>Copies</th><th class="num">Generation</th><th>State</th><th class="num" title="Pushes and pulls of a dense segment, rows of a table's">Operations/s</th><th class="num">Size</th></tr></thead>
          <tbody>{segments.map((segment) => (
            <tr key={`${segment.space}/${segment.index}`}>
              <td>{spaceName(segment.space, group.jobs)}</td><td>{segmentName(segment)}</td><td>{segment.primary ?? "none"}</td><td>{segment.copies.join(", ") || "none"}</td>
              <td class="num">{segment.generation}</td><td>{segment.state}</td><td class="num">{short(segment.operations_s)}</td><td class="num">{bytes(segment.bytes)}</td>
            </tr>
          ))}</tbody>
        </table>
      </div>}
    </details>
  );
}

function summary(group: Group, segments: Placed[]): string {
  const held = inOrder(group.servers).map((server) => `${server.name} ${segments.filter((segment) => segment.primary === server.name).length}`);
  return `Segments by primary: ${held.join(", ")}`;
}

function spoken(segment: Placed, group: Group): string {
  return `${segmentName(segment)} of ${spaceName(segment.space, group.jobs)}: ${segment.primary ?? "no server"}, ${segment.copies.length ? `backup on ${segment.copies.join(", ")}` : "no copy"}, ${short(segment.operations_s)} operations a second, ${segment.state}`;
}
