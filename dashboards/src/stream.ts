/*
 * One server-sent-event connection with a memory of how far it got. The browser's EventSource reconnects by itself, but
 * gives up for good on an HTTP error and cannot say when it tries next; so each loss is handled here: wait, and connect
 * again from the last `id:` seen. Nothing is lost and nothing comes twice.
 */
import { signal } from "@preact/signals";
import { ApiError, address, cluster } from "./api";
import { backoff } from "./lib/cursor";
import { parse } from "./lib/json";

export type Link =
  | { state: "idle" | "connecting" | "open" | "ended" }
  | { state: "lost"; retryAt: number; since: number };

/** The state of the page's one connection; the banner reads it. */
export const link = signal<Link>({ state: "idle" });
/** False until the session is known to be good; null while it is being asked for. */
export const session = signal<boolean | null>(null);

export interface StreamOptions {
  query: Record<string, string | string[]>;
  cursor?: string;
  on: Record<string, (data: unknown) => void>;
}

/** How long (ms) a connection may take to open. */
const CONNECT_LIMIT = 20_000;

export class Stream {
  private source: EventSource | null = null;
  private timer = 0;
  private attempt = 0;
  private closed = false;
  private lostSince = 0;
  cursor: string;

  constructor(private readonly options: StreamOptions) {
    this.cursor = options.cursor ?? "";
    this.connect();
    window.addEventListener("online", this.retry);
  }

  /** Connect now instead of waiting for the next attempt. */
  readonly retry = (): void => {
    if (this.closed || link.value.state !== "lost") return;
    window.clearTimeout(this.timer);
    this.connect();
  };

  close(): void {
    this.closed = true;
    this.drop();
    window.clearTimeout(this.timer);
    window.removeEventListener("online", this.retry);
    if (link.value.state !== "ended") link.value = { state: "idle" };
  }

  private connect(): void {
    if (link.value.state !== "lost") link.value = { state: "connecting" };
    const source = new EventSource(address("stream", { ...this.options.query, cursor: this.cursor }));
    this.source = source;
    this.timer = window.setTimeout(() => this.lost(), CONNECT_LIMIT);
    source.onopen = () => {
      window.clearTimeout(this.timer);
      this.attempt = 0;
      this.lostSince = 0;
      link.value = { state: "open" };
    };
    source.onerror = () => this.lost();
    for (const [name, handler] of Object.entries(this.options.on)) {
      source.addEventListener(name, (event) => this.take(event as MessageEvent<string>, handler));
    }
    source.addEventListener("end", () => {
      link.value = { state: "ended" };
      this.close();
    });
  }

  private take(event: MessageEvent<string>, handler: (data: unknown) => void): void {
    handler(parse(event.data));
    if (event.lastEventId) this.cursor = event.lastEventId;
  }

  private drop(): void {
    if (!this.source) return;
    this.source.onerror = null;
    this.source.close();
    this.source = null;
  }

  private lost(): void {
    if (this.closed) return;
    this.drop();
    window.clearTimeout(this.timer);
    const wait = backoff(this.attempt);
    this.attempt += 1;
    if (!this.lostSince) this.lostSince = Date.now();
    // A service that restarts, or ends a stream after an hour, is back at once: only a second failure is news.
    link.value = this.attempt > 1 ? { state: "lost", retryAt: Date.now() + wait, since: this.lostSince } : { state: "connecting" };
    this.timer = window.setTimeout(() => this.connect(), wait);
    void this.checkSession();
  }

  /** A stream that ends by 401 looks like any other loss: ask once, and go to the login page if so. */
  private async checkSession(): Promise<void> {
    try {
      await cluster();
    } catch (error) {
      if (error instanceof ApiError && error.status === 401) session.value = false;
    }
  }
}

let page: Stream | null = null;

/** Open the page's one stream; an earlier one is closed. */
export function open(options: StreamOptions): Stream {
  page?.close();
  page = new Stream(options);
  return page;
}

/** Close `stream` if it still is the page's. */
export function close(stream: Stream): void {
  stream.close();
  if (page === stream) page = null;
}

/** Try again now (the banner's button). */
export function retryNow(): void {
  page?.retry();
}
