/* The elastic servers of one job, on its page: its own, or a group that it shares. */
import type { Feed } from "../feed";
import { bytes, count, percent, plural, short } from "../lib/format";
import { tint } from "../lib/servers";
import { href } from "../route";
import { Card } from "./bits";

export function ElasticCard({ feed }: { feed: Feed }) {
  void feed.version.value;
  const job = feed.job.value;
  const group = job?.progress?.server_group;
  if (!group) return null;
  const servers = group.servers ?? [];
  const names = servers.map((server) => server.name);
  const moves = typeof group.moves === "number" ? group.moves : group.moves?.length ?? 0;
  const most = Math.max(1, ...servers.map((server) => server.segments ?? 0));
  const parts = [group.segments ? plural(group.segments, "segment") : "", group.replicas ? plural(group.replicas, "backup", "backups") : "no backups",
    group.bytes ? bytes(group.bytes) : "", group.rows ? `${short(group.rows)} rows` : "", moves ? `${count(moves)} moving` : "", group.branch_of ? `branch of ${group.branch_of}` : "",
    group.operations_s != null ? `${short(group.operations_s)} operations/s${group.quota?.operations ? ` of ${short(group.quota.operations)} allowed` : ""}` : ""];
  return (
    <Card title={group.own ? "Servers" : "Server group"} id="elastic" note={parts.filter(Boolean).join(", ")}
      tools={!group.own && <a class="button" href={href(["servers", group.name], new URLSearchParams({ job: group.space ?? job?.id ?? "" }))}>Open {group.name}</a>}>
      <div class="scroll-x" tabIndex={0} aria-label="Servers, a table that scrolls">
        <table class="plain servers">
          <thead><tr><th>Server</th><th>State</th><th>Host</th><th class="col-load">Segments</th><th class="num">Size</th><th class="num">Operations/s</th><th class="num" title="Share of one core">CPU</th></tr></thead>
          <tbody>{servers.map((server) => (
            <tr key={server.name}>
              <td><span class="server-name"><i class={`server-mark srv-${tint(server.name, names)}`} />{server.name}</span></td>
              <td><span class={`state state-${server.state === "alive" ? "run" : server.state === "dead" ? "bad" : "warn"}`}>{server.state ?? "unknown"}</span></td>
              <td><span class="host">{server.host ?? "–"}</span></td>
              <td><span class="load"><span class="load-bar" style={{ width: `${((server.segments ?? 0) / most) * 100}%` }} /><span class="load-text">{count(server.segments)}</span></span></td>
              <td class="num">{bytes(server.bytes)}</td>
              <td class="num">{short(server.operations_s)}</td>
              <td class="num">{percent(server.cpu, 0)}</td>
            </tr>
          ))}</tbody>
        </table>
      </div>
    </Card>
  );
}
