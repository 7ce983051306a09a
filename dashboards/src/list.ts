/* The jobs that the list page shows: what the filter chooses, page by page, kept fresh by the stream. The service filters and counts. */
import { computed, signal } from "@preact/signals";
import * as api from "./api";
import { close, open, session, type Stream } from "./stream";
import type { Job, JobList, Status } from "./types";

/** Rows kept in memory; older ones can be found by narrowing the list. */
const MOST = 2000;
const PAGE = 100;

const byId = signal<ReadonlyMap<string, Job>>(new Map());

export const jobs = computed(() => [...byId.value.values()].sort((a, b) => b.created_at.localeCompare(a.created_at) || b.id.localeCompare(a.id)));
/** How many jobs there are in each status, of all that match the text: those that are not loaded too. */
export const counts = signal<Partial<Record<Status, number>>>({});
/** The ids of the jobs that are selected in the list, to be compared. */
export const selected = signal<ReadonlySet<string>>(new Set());

/** Select a job, or take it out of the selection. */
export function toggle(id: string): void {
  const next = new Set(selected.value);
  if (!next.delete(id)) next.add(id);
  selected.value = next;
}

export const state = signal<"loading" | "ready" | "error">("loading");
export const failure = signal("");
export const nextCursor = signal<string | null>(null);
export const loadingMore = signal(false);

/** Which jobs the list has: those of these statuses (none: all) that hold each word of the text. */
export interface Filter {
  status: readonly Status[];
  text: string;
}

let chosen: Filter = { status: [], text: "" };
let active = false; // whether the page of the list is shown
let stream: Stream | null = null;
let streamed = 0; // rows that the stream watches

function take(list: readonly Job[], gone: readonly string[] = []): void {
  const next = new Map(byId.value);
  for (const job of list) {
    if (next.has(job.id) || next.size < MOST) next.set(job.id, job);
  }
  for (const id of gone) next.delete(id);
  byId.value = next;
}

async function first(replace: boolean): Promise<void> {
  const filter = chosen;
  try {
    const page = await api.jobs(filter, null, PAGE);
    if (filter !== chosen || !active) return; // another filter or page was chosen meanwhile
    if (replace) byId.value = new Map();
    if (replace || byId.value.size <= PAGE) nextCursor.value = page.next_cursor;
    take(page.jobs);
    counts.value = page.counts;
    state.value = "ready";
    follow();
  } catch (error) {
    if (filter !== chosen || !active) return;
    if (error instanceof api.ApiError && error.status === 401) session.value = false;
    failure.value = (error as Error).message;
    if (replace || byId.value.size === 0) state.value = "error";
    follow();
  }
}

/** The next page of older jobs. */
export async function more(): Promise<void> {
  if (!nextCursor.value || loadingMore.value) return;
  const filter = chosen;
  loadingMore.value = true;
  try {
    const page = await api.jobs(filter, nextCursor.value, PAGE);
    if (filter !== chosen || !active) return;
    take(page.jobs);
    nextCursor.value = page.next_cursor;
    follow();
  } catch (error) {
    failure.value = (error as Error).message;
  } finally {
    loadingMore.value = false;
  }
}

/** Watch all rows that are loaded, and some that will come. */
function follow(): void {
  if (stream && byId.value.size <= streamed) return;
  streamed = Math.min(MOST, byId.value.size + PAGE);
  stream = open({
    query: { status: [...chosen.status], text: chosen.text, rows: String(streamed) },
    on: {
      jobs: (data) => {
        const { jobs: changed, gone, counts: counted, whole } = data as Partial<JobList>;
        if (state.value !== "ready") return void first(true);
        const oldest = nextCursor.value ?? ""; // of the rows that are loaded
        const fresh = (changed ?? []).filter((job) => job.id >= oldest || byId.value.has(job.id));
        if (whole) byId.value = new Map(); // what is not in it was deleted, or does not match any more
        take(fresh, gone ?? []);
        if (counted) counts.value = counted;
        if (byId.value.size > streamed && streamed < MOST) follow();
      },
    },
  });
}

/** Load the jobs that a filter chooses and keep them fresh until the returned function is called. */
export function watch(filter: Filter): () => void {
  const same = filter.text === chosen.text && filter.status.join() === chosen.status.join();
  [chosen, active] = [filter, true];
  if (byId.value.size === 0) state.value = "loading";
  void first(!same);
  return () => {
    active = false;
    if (stream) close(stream);
    stream = null;
  };
}

/** Put a job's newest state into the list, from wherever it came. */
export function put(job: Job): void {
  if (byId.value.has(job.id)) take([job]);
}
