/* The events of a job as lines to read, the newest first. Pure. */
import type { JobEvent } from "../types";

/** What comes again and again, one like the other: of a run of these only the newest is a line. */
const ROUTINE = new Set(["checkpoint"]);

/** Events (the newest first) as lines, each with how many older ones of its kind it stands for. */
export function folded(events: readonly JobEvent[]): { event: JobEvent; more: number }[] {
  const lines: { event: JobEvent; more: number }[] = [];
  for (const event of events) {
    const last = lines[lines.length - 1];
    if (last && last.event.kind === event.kind && ROUTINE.has(event.kind)) last.more += 1;
    else lines.push({ event, more: 0 });
  }
  return lines;
}
