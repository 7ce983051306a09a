/*
 * The composite cursor of the event stream ("m123.l456.e7": byte offsets of metrics and logs, number of the next event)
 * and the delays between attempts to connect again. Pure.
 */

export interface Cursor {
  m?: number;
  l?: number;
  e?: number;
}

/** The parts of a cursor; an unknown or malformed part is left out. */
export function read(text: string | null | undefined): Cursor {
  const out: Cursor = {};
  for (const part of (text ?? "").split(".")) {
    const match = /^([mle])(\d+)$/.exec(part);
    if (match) out[match[1] as keyof Cursor] = Number(match[2]);
  }
  return out;
}

/** A cursor as text; parts that are not known are left out, and the service then starts them at their beginning. */
export function write(cursor: Cursor): string {
  return (["m", "l", "e"] as const)
    .filter((key) => cursor[key] !== undefined)
    .map((key) => `${key}${cursor[key]}`)
    .join(".");
}

/** Milliseconds to wait before attempt n (0, 1, ...): doubling from half a second to 15 s, with jitter `random` in [0, 1). */
export function backoff(attempt: number, random = Math.random()): number {
  const full = Math.min(15_000, 500 * 2 ** attempt);
  return Math.round(full * (0.75 + 0.5 * random));
}
