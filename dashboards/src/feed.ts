/*
 * All that the job page shows, fed by one stream and bounded in memory. Arrays grow in place; `version` says that they
 * did, at most four times a second, and is what the page's parts depend on.
 */
import { signal } from "@preact/signals";
import * as api from "./api";
import { write } from "./lib/cursor";
import { Cohorts } from "./lib/federated";
import { Series } from "./lib/series";
import { isFederated } from "./lib/strategy";
import { cost, median } from "./lib/worker";
import * as list from "./list";
import { close, link, open, session, type Stream } from "./stream";
import type { Job, JobEvent, LogLine, MetricPoint } from "./types";

export const MOST_LINES = 5000;
const MOST_EVENTS = 500;
const MOST_SNAPSHOTS = 120;
const REFRESH = 250;

/** Relative own computing time of each worker at one moment: 1 = the median worker. */
export interface Snapshot {
  time: number;
  ratio: Map<number, number>;
  cost: Map<number, number>; // seconds of own computing for a sample
}

export class Feed {
  readonly job = signal<Job | null>(null);
  readonly problem = signal<{ status: number; text: string } | null>(null);
  readonly version = signal(0);
  readonly logVersion = signal(0);
  /** The part of the rounds that is here, from 0 to 1, while those of before this page was opened are loaded; then null. */
  readonly loading = signal<number | null>(0);
  readonly series = new Series();
  readonly events: JobEvent[] = [];
  readonly cohorts = new Cohorts(); // of a federated job; its rounds are no lines among the events
  private heard = -1; // the newest event's number
  readonly lines: LogLine[] = [];
  readonly snapshots: Snapshot[] = [];
  droppedLines = 0; // lines that came before the first one kept here (at least)
  private stream: Stream | null = null;
  private timer = 0;
  private logsDirty = false;
  private over = false;

  constructor(readonly id: string) {
    void this.start();
  }

  stop(): void {
    this.over = true;
    window.clearTimeout(this.timer);
    if (this.stream) close(this.stream);
  }

  /** Ask for the job again, for instance after a stop request. */
  take(job: Job): void {
    const before = this.job.value?.progress?.time;
    this.job.value = job;
    this.series.filedBack = isFederated(job.spec.strategy) ? 1 : 0; // few and long rounds: one round has one number on the page
    list.put(job);
    if (!job.progress?.round) this.loading.value = null; // there are no rounds yet
    if (job.progress && job.progress.time !== before) this.snap(job);
    this.touch();
  }

  async reload(): Promise<void> {
    this.problem.value = null;
    await this.start();
  }

  private async start(): Promise<void> {
    try {
      this.take(await api.job(this.id));
    } catch (error) {
      const status = error instanceof api.ApiError ? error.status : 0;
      if (status === 401) session.value = false;
      this.problem.value = { status, text: (error as Error).message };
      return;
    }
    const tail = await api.logTail(this.id, MOST_LINES / 5).catch(() => null);
    if (this.over) return;
    if (tail) this.addLines(tail.lines);
    this.stream = open({
      query: { job: this.id, topics: "job,metrics,logs,events" },
      cursor: write({ m: 0, l: tail?.cursor ?? 0, e: 0 }),
      on: {
        job: (data) => this.take(data as Job),
        metrics: (data) => {
          const { points, cursor, size } = data as { points: MetricPoint[]; cursor?: number; size?: number };
          this.series.add(points ?? []);
          if (this.loading.value !== null) this.loading.value = cursor !== undefined && size !== undefined && cursor < size ? cursor / size : null;
          this.touch();
        },
        logs: (data) => this.addLines((data as { lines: LogLine[] }).lines ?? []),
        events: (data) => {
          if (this.loading.value === 0) this.loading.value = null; // rounds are read before the events: there are none
          this.addEvents((data as { events: JobEvent[] }).events ?? []);
        },
        end: () => void this.last(),
      },
    });
    if (tail && tail.lines.length >= MOST_LINES / 5) this.droppedLines = Math.max(1, this.droppedLines);
  }

  /** The job's final state, once the stream has said that it ended. */
  private async last(): Promise<void> {
    link.value = { state: "ended" };
    this.loading.value = null;
    try {
      this.take(await api.job(this.id));
    } catch {
      // The stream's own last state stands.
    }
  }

  private addLines(lines: readonly LogLine[]): void {
    this.lines.push(...lines);
    const over = this.lines.length - MOST_LINES;
    if (over > 0) {
      this.lines.splice(0, over);
      this.droppedLines += over;
    }
    this.logsDirty = true;
    this.touch();
  }

  private addEvents(events: readonly JobEvent[]): void {
    for (const event of events) {
      if (event.seq <= this.heard) continue;
      this.heard = event.seq;
      if (!this.cohorts.take(event)) this.events.push(event);
    }
    if (this.events.length > MOST_EVENTS) this.events.splice(0, this.events.length - MOST_EVENTS);
    this.touch();
  }

  private snap(job: Job): void {
    const workers = job.progress?.workers ?? [];
    const costs = workers.map((worker) => ({ rank: worker.rank, cost: cost(worker) }));
    const middle = median(costs.map((entry) => entry.cost).filter((value): value is number => value !== null));
    if (!middle) return;
    const ratio = new Map<number, number>();
    const own = new Map<number, number>();
    for (const entry of costs) {
      if (entry.cost === null) continue;
      ratio.set(entry.rank, entry.cost / middle);
      own.set(entry.rank, entry.cost);
    }
    this.snapshots.push({ time: job.progress?.time ?? Date.now() / 1000, ratio, cost: own });
    if (this.snapshots.length > MOST_SNAPSHOTS) this.snapshots.shift();
  }

  private touch(): void {
    if (this.timer) return;
    this.timer = window.setTimeout(() => {
      this.timer = 0;
      this.version.value += 1;
      if (this.logsDirty) this.logVersion.value += 1;
      this.logsDirty = false;
    }, REFRESH);
  }
}
