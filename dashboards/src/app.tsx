/* The frame around every page: head line, cluster, connection banner, help, keys. */
import { signal, useSignal } from "@preact/signals";
import { useEffect } from "preact/hooks";
import * as api from "./api";
import { now, theme, type Theme } from "./clock";
import { bytes, count } from "./lib/format";
import { Dialog, Empty } from "./parts/bits";
import { Mark, MoonIcon, PlugIcon, SunIcon, SystemIcon } from "./parts/icons";
import { ChosenPage, SweepPage } from "./pages/compare";
import { GroupPage } from "./pages/group";
import { JobPage } from "./pages/job";
import { JobsPage } from "./pages/jobs";
import { LoginPage } from "./pages/login";
import { ServersPage } from "./pages/servers";
import { go, href, route } from "./route";
import { link, retryNow, session } from "./stream";
import type { ClusterState } from "./types";

const CLUSTER_EVERY = 5_000;
const CLUSTER_WAITING = 2_000; // while Ray is starting
const help = signal(false);

export function App() {
  useEffect(() => {
    document.addEventListener("keydown", keys);
    return () => document.removeEventListener("keydown", keys);
  }, []);
  if (session.value === null) return <><Banner /><div class="boot" role="status" aria-label="Loading" /></>;
  if (session.value === false) return <LoginPage />;
  return (
    <>
      <a class="skip" href="#main" onClick={skip}>Skip to the content</a>
      <Header />
      <Banner />
      <div id="main" tabIndex={-1}>{shown(route.value.path)}</div>
      <Help />
    </>
  );
}

function shown(path: string[]) {
  const [page = "jobs", id] = path;
  if (page === "sweeps" && id && path.length === 2) return <SweepPage key={id} name={id} />;
  if (page === "compare" && path.length === 1) return <ChosenPage />;
  if (path.length > 2 || (page !== "jobs" && page !== "servers")) return <NoPage path={path} />;
  if (page === "servers") return id ? <GroupPage key={id} name={id} /> : <ServersPage />;
  return id ? <JobPage key={id} id={id} /> : <JobsPage />;
}

function NoPage({ path }: { path: string[] }) {
  return (
    <main class="page">
      <Empty title="There is no such page">
        <p>The dashboard has no page <code>{path.join("/")}</code>. It has the jobs and the server groups, a page for each of them, and one for each sweep (<code>sweeps/NAME</code>).</p>
        <p class="empty-actions"><a class="button" href={href(["jobs"])}>All jobs</a> <a class="button" href={href(["servers"])}>Server groups</a></p>
      </Empty>
    </main>
  );
}

const OF_JOBS = ["sweeps", "compare"]; // pages that are reached from the list of jobs
const PAGES: [string, string][] = [["jobs", "Jobs"], ["servers", "Servers"]];

function Header() {
  const page = route.value.path[0] ?? "jobs";
  const at = OF_JOBS.includes(page) ? "jobs" : page;
  return (
    <header class="top">
      <div class="top-in">
        <a class="brand" href={href(["jobs"])} aria-label="rayps, all jobs"><Mark /><span>rayps</span></a>
        <nav class="top-nav" aria-label="Pages">
          {PAGES.map(([key, name]) => <a key={key} href={href([key])} aria-current={at === key ? "page" : undefined}>{name}</a>)}
        </nav>
        <Cluster />
        <ThemeButton />
        <button type="button" class="button-icon" title="Keyboard help (?)" aria-label="Keyboard help" aria-keyshortcuts="?" onClick={() => (help.value = true)}><span class="question" aria-hidden="true">?</span></button>
      </div>
    </header>
  );
}

/** Free and total processors, or why the cluster is not ready. */
function Cluster() {
  const state = useSignal<ClusterState | null>(null);
  const gone = useSignal(false);
  useEffect(() => {
    let over = false;
    const look = async () => {
      if (document.hidden) return;
      try {
        const answer = await api.cluster();
        if (over) return;
        state.value = answer;
        gone.value = false;
      } catch (error) {
        if (error instanceof api.ApiError && error.status === 401) session.value = false;
        else if (!over) gone.value = true;
      }
    };
    void look();
    const timer = window.setInterval(look, state.value && !state.value.ready ? CLUSTER_WAITING : CLUSTER_EVERY);
    return () => {
      over = true;
      window.clearInterval(timer);
    };
  }, [link.value.state === "open", state.value?.ready]);
  const cluster = state.value;
  if (gone.value) return <span class="cluster tone-idle"><i class="dot" /><span class="cluster-text">Not connected</span></span>;
  if (!cluster) return <span class="cluster" />;
  if (!cluster.ready) {
    return <span class="cluster tone-warn" role="status" title={cluster.reason ?? ""}><i class="dot" /><span class="cluster-text">{cluster.reason ?? "Ray is not ready"}</span></span>;
  }
  const gpus = cluster.total["gpu"] ?? 0;
  return (
    <span class="cluster tone-ok" title={[cluster.address ? `Ray at ${cluster.address}${cluster.owned ? ", started by this service" : ""}.` : "", cluster.together ? `Jobs run side by side while their workers fit into this machine's ${count(cluster.together)} cores; a job that runs alone may reserve ${count(cluster.total["cpu"] ?? 0)} CPUs. rayps serve --cpus sets both.` : cluster.cores ? `Jobs may reserve ${count(cluster.total["cpu"] ?? 0)} CPUs in total (rayps serve --cpus), which share this machine's ${cluster.cores} cores.` : "", cluster.warm ? `${count(cluster.warm.ready)} of ${count(cluster.warm.wanted)} warm processes are ready (${bytes(cluster.warm.memory)}).` : ""].filter(Boolean).join(" ")}>
      <i class="dot" /><span class="cluster-word">Ray ready</span>
      <span class="cluster-text"><b>{count(cluster.free["cpu"] ?? 0)}</b> of {count(cluster.total["cpu"] ?? 0)} CPUs free{(cluster.cores ?? Infinity) < (cluster.total["cpu"] ?? 0) && <span class="faint"> on {count(cluster.cores)} cores</span>}{gpus > 0 && <>, <b>{count(cluster.free["gpu"] ?? 0)}</b> of {count(gpus)} GPUs</>}</span>
    </span>
  );
}

/** Says that the connection is gone, since when, and when it is tried again. Nothing when all is well. */
function Banner() {
  const state = link.value;
  if (state.state !== "lost") return null;
  const since = new Date(state.since).toLocaleTimeString("en-GB");
  const left = Math.max(0, Math.ceil(state.retryAt / 1000 - now.value));
  return (
    <div class="banner" role="status" aria-live="polite">
      <div class="banner-in">
        <PlugIcon />
        <span class="banner-text"><b>The service cannot be reached.</b> The page shows the state of {since} and updates when the service is back.</span>
        <span class="banner-next" aria-live="off">{left > 0 ? `Next try in ${left} s` : "Trying now"}</span>
        <button type="button" class="button" onClick={retryNow}>Try now</button>
      </div>
    </div>
  );
}

const THEMES: { key: Theme; next: Theme; name: string }[] = [
  { key: "system", next: "light", name: "as the system" },
  { key: "light", next: "dark", name: "light" },
  { key: "dark", next: "system", name: "dark" },
];

function ThemeButton() {
  const chosen = THEMES.find((entry) => entry.key === theme.value) ?? THEMES[0]!;
  const label = `Theme: ${chosen.name}. Change`;
  return (
    <button type="button" class="button-icon" title={label} aria-label={label} onClick={() => (theme.value = chosen.next)}>
      {chosen.key === "dark" ? <MoonIcon /> : chosen.key === "light" ? <SunIcon /> : <SystemIcon />}
    </button>
  );
}

const KEYS: [string[], string][] = [
  [["/"], "filter the jobs, or search a job's log"],
  [["j", "k"], "next and previous row"],
  [["Enter"], "open the row"],
  [["u"], "back to the list"],
  [["←", "→"], "move through a chart or ring in focus; drag to zoom, double-click to see all"],
  [["?"], "this help"],
  [["Esc"], "leave a field, close a dialog"],
];

function Help() {
  return (
    <Dialog title="Keys" open={help.value} onClose={() => (help.value = false)}>
      <dl class="keys">
        {KEYS.map(([names, text]) => <div key={text}><dt>{names.map((name) => <kbd key={name}>{name}</kbd>)}</dt><dd>{text}</dd></div>)}
      </dl>
      <div class="dialog-actions"><button type="button" class="button" onClick={() => (help.value = false)}>Close</button></div>
    </Dialog>
  );
}

function skip(event: Event): void {
  event.preventDefault();
  document.getElementById("main")?.focus();
}

function keys(event: KeyboardEvent): void {
  const target = event.target as HTMLElement;
  const typing = /^(INPUT|TEXTAREA|SELECT)$/.test(target.tagName) && (target as HTMLInputElement).type !== "range";
  if (event.key === "Escape" && typing) target.blur();
  if (typing || event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  if (event.key === "/") {
    const field = document.querySelector<HTMLInputElement>("[data-focus=filter]");
    if (!field) return;
    event.preventDefault();
    field.focus();
    field.select();
  } else if (event.key === "j" || event.key === "k") walk(event.key === "j" ? 1 : -1);
  else if (event.key === "u" && OF_JOBS.includes(route.value.path[0] ?? "")) go(["jobs"]);
  else if (event.key === "u" && route.value.path.length > 1) go(route.value.path.slice(0, 1));
  else if (event.key === "?") help.value = true;
}

/** Move the focus through the rows of the list. */
function walk(step: number): void {
  const rows = [...document.querySelectorAll<HTMLElement>("[data-row]")];
  if (rows.length === 0) return;
  const at = rows.indexOf(document.activeElement as HTMLElement);
  const next = rows[at < 0 ? (step > 0 ? 0 : rows.length - 1) : Math.min(rows.length - 1, Math.max(0, at + step))];
  next?.focus();
  next?.scrollIntoView({ block: "nearest" });
}
