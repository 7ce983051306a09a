/* How busy the servers are: a heat map of servers by segments or by jobs, and the segments that are hot. */
import { useSignal } from "@preact/signals";
import { bytes, plural, short } from "../lib/format";
import { bySpace, HOT, hottest, inOrder, level, placed, segmentName, spaceName, tint, type Placed } from "../lib/servers";
import type { Group, GroupServer } from "../types";
import { Card, Empty } from "./bits";

const ROW = 22;
const MOST_COLUMNS = 400;

export function HeatCard({ group, space }: { group: Group; space: string }) {
  const jobs = useSignal(false);
  const segments = placed(group.spaces, space);
  const spaces = group.spaces.filter((each) => !space || each.name === space);
  const byJob = jobs.value || segments.length > MOST_COLUMNS;
  return (
    <Card title="Load" id="load" note="touches per second: a push or pull of a segment of parameters, a row of a table" tools={<>
      <Ramp />
      <button type="button" class="button toggle" aria-pressed={!byJob} disabled={segments.length > MOST_COLUMNS} onClick={() => (jobs.value = false)}>Segments</button>
      <button type="button" class="button toggle" aria-pressed={byJob} onClick={() => (jobs.value = true)}>Jobs</button>
    </>}>
      {segments.length === 0 ? <Empty title="No load yet" /> : byJob ? <ByJob group={group} spaces={spaces} /> : <BySegment group={group} segments={segments} />}
    </Card>
  );
}

function Ramp() {
  return (
    <span class="key ramp" aria-hidden="true">
      <span>idle</span>{[0, 1, 2, 3, 4].map((i) => <i key={i} class={`heat-${i}`} />)}<span>hot</span>
    </span>
  );
}

function BySegment({ group, segments }: { group: Group; segments: Placed[] }) {
  const at = useSignal("");
  const servers = inOrder(group.servers).filter((server) => server.state !== "dead");
  const mean = segments.reduce((sum, segment) => sum + (segment.operations_s ?? 0), 0) / segments.length;
  const sums = servers.map((server) => segments.reduce((sum, segment) => sum + (segment.primary === server.name ? segment.operations_s ?? 0 : 0), 0));
  const starts = segments.map((segment, i) => (segment.first ? i : -1)).filter((i) => i >= 0);
  const say = (segment: Placed, role: string) => `${segmentName(segment)} of ${spaceName(segment.space, group.jobs)}, ${role}: ${short(segment.operations_s)} touches/s, ${bytes(segment.bytes)}`;
  const inset = Math.min(0.12, segments.length / 600);
  return (
    <>
      <div class="heat-map">
        <ul class="heat-names" aria-hidden="true">{servers.map((server) => <Name key={server.name} server={server} group={group} />)}</ul>
        <svg class="heat-cells" viewBox={`0 0 ${segments.length} ${servers.length * ROW}`} preserveAspectRatio="none" height={servers.length * ROW}
          role="img" aria-label={loads(servers, sums)} onMouseLeave={() => (at.value = "")}>
          {servers.map((server, y) => <rect key={server.name} class="heat-row" x={0} y={y * ROW + 1} width={segments.length} height={ROW - 2} />)}
          {segments.flatMap((segment, x) => servers.map((server, y) => {
            const primary = segment.primary === server.name;
            if (!primary && !segment.copies.includes(server.name)) return null;
            const text = say(segment, primary ? `primary on ${server.name}` : `backup on ${server.name}`);
            return <rect key={`${x}/${server.name}`} class={primary ? `heat-${level(segment.operations_s ?? 0, mean)}` : "heat-copy"}
              x={x + inset / 2} width={1 - inset} y={y * ROW + (primary ? 1 : ROW / 2 - 2)} height={primary ? ROW - 2 : 4} onMouseEnter={() => (at.value = text)} />;
          }))}
          {starts.slice(1).map((x) => <line key={x} class="heat-cut" x1={x} x2={x} y1={0} y2={servers.length * ROW} />)}
        </svg>
        <ul class="heat-sums" aria-hidden="true">{servers.map((server, y) => <li key={server.name}>{short(sums[y])}</li>)}</ul>
      </div>
      <p class="card-foot heat-foot">{at.value || "A filled cell is a segment on its primary, a thin one a copy. Columns are segments, by job."}</p>
    </>
  );
}

function ByJob({ group, spaces }: { group: Group; spaces: Group["spaces"] }) {
  const servers = inOrder(group.servers).filter((server) => server.state !== "dead");
  const table = bySpace(servers, spaces);
  const cells = table.flat().filter((value) => value > 0);
  const mean = cells.length ? cells.reduce((sum, value) => sum + value, 0) / cells.length : 0;
  return (
    <div class="scroll-x heat-table">
      <table class="plain">
        <thead><tr><th>Server</th>{spaces.map((space) => <th key={space.name} class="num">{spaceName(space.name, group.jobs)}</th>)}<th class="num">In all</th></tr></thead>
        <tbody>{servers.map((server, y) => (
          <tr key={server.name}>
            <td><Name server={server} group={group} /></td>
            {spaces.map((space, x) => { const value = table[y]?.[x] ?? 0; return <td key={space.name} class="num"><span class={`heat-value heat-${level(value, mean)}`}>{short(value)}</span></td>; })}
            <td class="num">{short(table[y]?.reduce((sum, value) => sum + value, 0))}</td>
          </tr>
        ))}</tbody>
      </table>
    </div>
  );
}

function Name({ server, group }: { server: GroupServer; group: Group }) {
  return <li class="server-name"><i class={`server-mark srv-${tint(server.name, group.servers.map((each) => each.name))}`} />{server.name}</li>;
}

export function HotCard({ group, space }: { group: Group; space: string }) {
  const segments = placed(group.spaces, space);
  const busy = hottest(segments);
  const hot = busy.filter((entry) => entry.ratio >= HOT).length;
  const most = busy[0]?.ratio ?? 1;
  return (
    <Card title="Hot segments" id="hot" note={segments.length ? (hot ? `${hot} at ${HOT} times the mean or more` : "none above twice the mean") : undefined}>
      {busy.length === 0 ? <Empty title="No load yet" /> : (
        <ol class="hot-list">
          {busy.map(({ segment, ratio }) => (
            <li key={`${segment.space}/${segment.index}`}>
              <span class="hot-name"><b>{segmentName(segment)}</b> <span class="faint">{spaceName(segment.space, group.jobs)}</span></span>
              <span class="hot-where">{segment.primary ? <><i class={`server-mark srv-${tint(segment.primary, group.servers.map((each) => each.name))}`} />{segment.primary}</> : "no server"}</span>
              <span class="hot-load"><span class={`hot-bar heat-${ratio < 0.5 ? 0 : ratio < 1.25 ? 1 : ratio < HOT ? 2 : ratio < 4 ? 3 : 4}`} style={{ width: `${Math.max(2, (ratio / most) * 100)}%` }} /></span>
              <span class="hot-ratio" title={`${short(segment.operations_s)} touches a second`}>{ratio.toFixed(1)}×</span>
            </li>
          ))}
        </ol>
      )}
    </Card>
  );
}

function loads(servers: GroupServer[], sums: number[]): string {
  return `Operations per second of ${plural(servers.length, "server")}: ${servers.map((server, y) => `${server.name} ${short(sums[y])}`).join(", ")}`;
}
