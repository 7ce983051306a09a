/* The list of server groups. */
import { useEffect } from "preact/hooks";
import { failure, rows, watch } from "../groups";
import { bytes, count, plural, seconds, short } from "../lib/format";
import { Ago, Command, Empty } from "../parts/bits";
import { GroupBadge } from "../parts/icons";
import { go, href } from "../route";
import type { GroupRow } from "../types";

export function ServersPage() {
  useEffect(() => {
    document.title = "Server groups – rayps";
    return watch();
  }, []);
  const found = rows.value;
  if (found?.length === 0) return <FirstGroup />;
  return (
    <main class="page">
      <div class="page-head"><h1>Server groups</h1></div>
      {found === null && (failure.value ? <Empty title="The list could not be loaded">{failure.value} It is tried again when the service answers.</Empty>
        : <div class="skeleton" role="status" aria-label="Loading server groups"><span /><span /></div>)}
      {found && <ul class="groups">{found.map((group) => <Row key={group.name} group={group} />)}</ul>}
    </main>
  );
}

function Row({ group }: { group: GroupRow }) {
  const open = (event: MouseEvent) => {
    if ((event.target as Element).closest("a") || window.getSelection()?.toString()) return;
    go(["servers", group.name]);
  };
  return (
    <li class="group-row" onClick={open} data-group={group.name}>
      <div class="group-name">
        <a href={href(["servers", group.name])} data-row>{group.name}</a>
        <GroupBadge status={group.status} />
        <span class="sub">{group.reason ?? <>started <Ago at={seconds(group.created_at)} /></>}</span>
      </div>
      <dl class="group-facts">
        <div><dt>Servers</dt><dd>{count(group.alive)} of {count(group.wanted)}</dd></div>
        <div><dt>Copies</dt><dd>{group.replicas ? count(group.replicas) : "none"}</dd></div>
        <div><dt>Jobs</dt><dd>{count(Math.max(group.jobs, group.spaces))}</dd></div>
        <div><dt>Held</dt><dd>{bytes(group.bytes)}</dd></div>
        <div><dt>Operations/s</dt><dd>{short(group.operations_s)}</dd></div>
        <div><dt>Moves</dt><dd>{group.moves ? plural(group.moves, "segment") : "none"}</dd></div>
      </dl>
    </li>
  );
}

function FirstGroup() {
  return (
    <main class="page first">
      <h1>Start a first server group</h1>
      <p class="lead">A server group holds the parameters of several jobs. It lives as long as the cluster, grows and shrinks while they train, and survives the loss of a server.</p>
      <div class="first-commands">
        <Command label="From the command line" text={"rayps servers start shared --servers 3 --replicas 1 --wait\n\n# two jobs on it\nrayps submit one.yaml --server-group shared\nrayps submit two.yaml --server-group shared"} />
        <Command label="From Python" text={'client = rayps.Client()\nclient.start_servers("shared", servers=3, replicas=1).wait()\n\nclient.submit("digits:Digits", workers=4,\n    strategy="parameter_server:staleness=3",\n    server_group="shared", working_dir="examples")'} />
      </div>
    </main>
  );
}
