/* The jobs that the list page shows: pages of the list, kept fresh by the stream. */
import { computed, signal } from "@preact/signals";
import * as api from "./api";
import { close, open, session } from "./stream";
import type { Job } from "./types";

/** Rows kept in memory; older ones can be found by narrowing the list. */
const MOST = 2000;

const byId = signal<ReadonlyMap<string, Job>>(new Map());

export const jobs = computed(() => [...byId.value.values()].sort((a, b) => b.created_at.localeCompare(a.created_at) || b.id.localeCompare(a.id)));
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

function take(list: readonly Job[]): void {
  const next = new Map(byId.value);
  for (const job of list) {
    if (next.has(job.id) || next.size < MOST) next.set(job.id, job);
  }
  byId.value = next;
}

async function first(): Promise<void> {
  try {
    const page = await api.jobs(null);
    take(page.jobs);
    nextCursor.value = page.next_cursor;
    state.value = "ready";
  } catch (error) {
    if (error instanceof api.ApiError && error.status === 401) session.value = false;
    failure.value = (error as Error).message;
    if (byId.value.size === 0) state.value = "error";
  }
}

/** The next page of older jobs. */
export async function more(): Promise<void> {
  if (!nextCursor.value || loadingMore.value) return;
  loadingMore.value = true;
  try {
    const page = await api.jobs(nextCursor.value);
    take(page.jobs);
    nextCursor.value = page.next_cursor;
  } catch (error) {
    failure.value = (error as Error).message;
  } finally {
    loadingMore.value = false;
  }
}

/** Load the list and keep it fresh until the returned function is called. */
export function watch(): () => void {
  if (byId.value.size === 0) state.value = "loading";
  void first();
  const stream = open({
    query: {},
    on: {
      jobs: (data) => {
        take((data as { jobs: Job[] }).jobs ?? []);
        if (state.value !== "ready") void first();
      },
    },
  });
  return () => close(stream);
}

/** Put a job's newest state into the list, from wherever it came. */
export function put(job: Job): void {
  if (byId.value.has(job.id)) take([job]);
}
