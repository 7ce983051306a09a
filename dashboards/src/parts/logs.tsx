/* The log: the newest lines in memory, only those in view in the page, the whole file by download. */
import { useComputed, useSignal } from "@preact/signals";
import { useEffect, useLayoutEffect, useRef } from "preact/hooks";
import { type Feed, MOST_LINES } from "../feed";
import { count } from "../lib/format";
import * as api from "../api";
import { ended } from "../lib/status";
import { put, route } from "../route";
import type { LogLine } from "../types";
import { Card, Empty } from "./bits";
import { download } from "./download";
import { DownIcon, SearchIcon } from "./icons";

const ROW = 20; // px; the style sheet's --log-row
const SPARE = 12; // rows drawn above and below the view

export function LogsCard({ feed }: { feed: Feed }) {
  const box = useRef<HTMLDivElement>(null);
  const top = useSignal(0);
  const height = useSignal(320);
  const follow = useSignal(true);
  const fetching = useSignal("");
  const query = route.value.query.get("log") ?? "";
  const source = route.value.query.get("from") ?? "";
  const version = feed.logVersion.value;

  const sources = useComputed(() => (void feed.logVersion.value, [...new Set(feed.lines.map((line) => line.source))].sort(natural)));
  const rows = filterLines(feed.lines, query, source);

  useLayoutEffect(() => {
    const element = box.current;
    if (element && follow.value) element.scrollTop = element.scrollHeight;
  }, [version, follow.value, query, source]);

  useEffect(() => {
    const element = box.current;
    if (!element) return;
    const watch = new ResizeObserver(() => (height.value = element.clientHeight));
    watch.observe(element);
    return () => watch.disconnect();
  }, []);

  const scrolled = () => {
    const element = box.current;
    if (!element) return;
    const up = element.scrollTop < top.peek() - 1; // only the reader scrolls up; new lines push down
    top.value = element.scrollTop;
    if (element.scrollHeight - element.scrollTop - element.clientHeight < ROW * 1.5) follow.value = true;
    else if (up) follow.value = false;
  };

  const first = Math.max(0, Math.floor(top.value / ROW) - SPARE);
  const shown = rows.slice(first, first + Math.ceil(height.value / ROW) + 2 * SPARE);
  const live = feed.job.value ? !ended(feed.job.value.status) : false;

  const save = async () => {
    fetching.value = "…";
    try {
      const blob = await wholeLog(feed.id, (lines) => (fetching.value = count(lines)));
      download(`${feed.id}.log`, blob);
      fetching.value = "";
    } catch (error) {
      fetching.value = (error as Error).message;
    }
  };

  return (
    <Card title="Logs" id="logs" class="logs-card"
      note={query || source ? `${count(rows.length)} of ${count(feed.lines.length)} lines` : `${count(feed.lines.length)} lines${feed.droppedLines ? ", the newest" : ""}`}
      tools={<>
        {sources.value.length > 1 && (
          <select aria-label="Lines from" value={source} onChange={(event) => put({ from: event.currentTarget.value || null })}>
            <option value="">all sources</option>
            {sources.value.map((name) => <option key={name} value={name}>{name}</option>)}
          </select>
        )}
        <label class="search search-small">
          <SearchIcon />
          <input type="search" placeholder="Search" data-focus="filter" aria-label="Search the lines shown here" value={query}
            onInput={(event) => put({ log: event.currentTarget.value || null })} />
        </label>
        <button type="button" class="button toggle" aria-pressed={follow.value}
          onClick={() => (follow.value = !follow.value)} title="Keep the newest line in view">Follow</button>
        <button type="button" class="button log-save" onClick={save} disabled={fetching.value === "…"} title="Download the whole log"><DownIcon /><span>{fetching.value || "Download"}</span></button>
      </>}>
      <div class="log" ref={box} onScroll={scrolled} tabIndex={0} role="log" aria-label="Log lines" aria-live="off">
        {rows.length === 0 ? (
          <Empty title={query || source ? "No line matches" : live ? "No lines yet" : "No lines"}>
            {query || source ? `Among the newest ${count(Math.min(MOST_LINES, feed.lines.length))} lines; the download has all lines.` : live ? "Output and log records of the workers appear here." : null}
          </Empty>
        ) : (
          <div class="log-sizer" style={{ height: `${rows.length * ROW}px` }}>
            <ol style={{ transform: `translateY(${first * ROW}px)` }}>
              {shown.map((line, i) => <Line key={first + i} line={line} query={query} />)}
            </ol>
          </div>
        )}
      </div>
    </Card>
  );
}

function Line({ line, query }: { line: LogLine; query: string }) {
  return (
    <li class={/\b(error|traceback|exception)\b/i.test(line.text) ? "log-bad" : /\bwarn(ing)?\b/i.test(line.text) ? "log-warn" : ""}>
      <time>{line.time.slice(11, 19)}</time>
      <span class="log-source">{line.source}</span>
      <span class="log-text">{query ? highlighted(line.text, query) : line.text}</span>
    </li>
  );
}

function highlighted(text: string, query: string) {
  const at = text.toLowerCase().indexOf(query.toLowerCase());
  if (at < 0) return text;
  return <>{text.slice(0, at)}<mark>{text.slice(at, at + query.length)}</mark>{text.slice(at + query.length)}</>;
}

function filterLines(lines: LogLine[], query: string, source: string): LogLine[] {
  if (!query && !source) return lines;
  const low = query.toLowerCase();
  return lines.filter((line) => (!source || line.source === source) && (!low || line.text.toLowerCase().includes(low)));
}

/** The whole log by pages, as one file; parts become blobs on the way, so that memory stays flat. */
async function wholeLog(id: string, progress: (lines: number) => void): Promise<Blob> {
  const parts: Blob[] = [];
  let cursor = 0;
  let lines = 0;
  for (;;) {
    const page = await api.logPage(id, cursor);
    if (page.lines.length === 0) break;
    parts.push(new Blob([page.lines.map((line) => `${line.time} ${line.source} ${line.text}\n`).join("")]));
    lines += page.lines.length;
    progress(lines);
    if (page.cursor <= cursor) break;
    cursor = page.cursor;
  }
  return new Blob(parts, { type: "text/plain" });
}

function natural(a: string, b: string): number {
  return a.localeCompare(b, "en", { numeric: true });
}
