/* What the pages of server groups show: the list, and one group, each kept fresh by the page's one stream. */
import { signal } from "@preact/signals";
import * as api from "./api";
import { calm } from "./lib/servers";
import { close, link, open, session, type Stream } from "./stream";
import type { Group, GroupRow } from "./types";

export const rows = signal<GroupRow[] | null>(null);
export const failure = signal("");

/** Load the list and keep it fresh until the returned function is called. */
export function watch(): () => void {
  void api.groups().then((found) => { rows.value = found; failure.value = ""; }, (error: Error) => {
    if (error instanceof api.ApiError && error.status === 401) session.value = false;
    failure.value = error.message;
  });
  const stream = open({ query: { group: "*" }, on: { groups: (data) => { rows.value = (data as { groups: GroupRow[] }).groups; failure.value = ""; } } });
  return () => close(stream);
}

/** One group, until `stop`. */
export class GroupFeed {
  readonly group = signal<Group | null>(null);
  readonly problem = signal<{ status: number; text: string } | null>(null);
  readonly gone = signal(false);
  private readonly rates = new Map<string, number>();
  private stream: Stream | null = null;
  private over = false;

  constructor(readonly name: string) {
    void this.start();
  }

  stop(): void {
    this.over = true;
    if (this.stream) close(this.stream);
  }

  take(group: Group): void {
    this.group.value = calm(group, this.rates);
  }

  async start(): Promise<void> {
    this.problem.value = null;
    try {
      this.take(await api.group(this.name));
    } catch (error) {
      const status = error instanceof api.ApiError ? error.status : 0;
      if (status === 401) session.value = false;
      this.problem.value = { status, text: (error as Error).message };
      return;
    }
    if (this.over) return;
    this.stream = open({
      query: { group: this.name },
      on: {
        group: (data) => this.take(data as Group),
        end: () => {
          link.value = { state: "ended" };
          this.gone.value = true;
        },
      },
    });
  }
}
