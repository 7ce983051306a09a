/* Numbers, times and sizes as people read them. Pure functions; every one takes null for "not known yet". */

const NONE = "–";
const grouped = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

/** A whole number with thousands separators: 12,345. */
export function count(value: number | null | undefined): string {
  return known(value) ? grouped.format(Math.round(value)) : NONE;
}

/** A rate or size of any scale in at most four figures: 0.734, 12.4, 1,234, 1.23M. */
export function short(value: number | null | undefined): string {
  if (!known(value)) return NONE;
  const size = Math.abs(value);
  if (size >= 1e9) return `${(value / 1e9).toFixed(2)}G`;
  if (size >= 1e6) return `${(value / 1e6).toFixed(2)}M`;
  if (size >= 100) return grouped.format(value);
  if (size >= 10) return value.toFixed(1);
  return value.toFixed(2);
}

/** A loss: four significant figures, exponent only where it is needed. */
export function loss(value: number | null | undefined): string {
  if (!known(value)) return NONE;
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size < 1e-3 || size >= 1e5) return value.toExponential(2);
  return value.toPrecision(4);
}

/** A share of one as a percentage: 97.3%. */
export function percent(value: number | null | undefined, digits = 1): string {
  return known(value) ? `${(value * 100).toFixed(digits)}%` : NONE;
}

/** A metric by its name: accuracies are shares, the rest are plain numbers. */
export function metric(name: string, value: number | null | undefined): string {
  if (!known(value)) return NONE;
  const isShare = /acc|precision|recall|f1|auc/i.test(name) && value >= 0 && value <= 1;
  return isShare ? percent(value, 2) : loss(value);
}

/** Seconds as a short duration: 0.4 s, 12 s, 3 min 05 s, 2 h 04 min, 3 d 2 h. */
export function duration(seconds: number | null | undefined): string {
  if (!known(seconds) || seconds < 0) return NONE;
  if (seconds < 1) return `${(Math.floor(seconds * 10) / 10).toFixed(1)} s`;
  const s = Math.floor(seconds);
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${pad(s % 60)} s`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${pad(Math.floor((s % 3600) / 60))} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
}

/** How long ago, in one unit: just now, 12 s ago, 3 min ago, 2 h ago, 5 d ago. */
export function ago(seconds: number): string {
  if (seconds < 5) return "just now";
  if (seconds < 60) return `${Math.floor(seconds)} s ago`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ago`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ago`;
  return `${Math.floor(seconds / 86400)} d ago`;
}

/** Bytes in binary units: 512 B, 1.5 KiB, 12.0 MiB. */
export function bytes(value: number | null | undefined): string {
  if (!known(value)) return NONE;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let rest = value;
  let unit = 0;
  while (Math.abs(rest) >= 1024 && unit < units.length - 1) {
    rest /= 1024;
    unit += 1;
  }
  return unit === 0 ? `${rest} B` : `${rest.toFixed(1)} ${units[unit]}`;
}

/** Unix seconds or an ISO time as the reader's clock: 14:03:21. */
export function clock(time: number | string | null | undefined): string {
  const date = toDate(time);
  return date ? date.toLocaleTimeString("en-GB") : NONE;
}

/** Unix seconds or an ISO time as a full local date and time, for titles. */
export function stamp(time: number | string | null | undefined): string {
  const date = toDate(time);
  return date ? date.toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "medium" }) : NONE;
}

/** `1 worker`, `3 workers`. */
export function plural(n: number, noun: string, many = `${noun}s`): string {
  return `${count(n)} ${n === 1 ? noun : many}`;
}

/** Unix seconds of an ISO time; null where there is none. */
export function seconds(iso: string | null | undefined): number | null {
  const at = iso ? Date.parse(iso) : NaN;
  return Number.isNaN(at) ? null : at / 1000;
}

function toDate(time: number | string | null | undefined): Date | null {
  if (time === null || time === undefined) return null;
  const date = new Date(typeof time === "number" ? time * 1000 : time);
  return Number.isNaN(date.getTime()) ? null : date;
}

function known(value: number | null | undefined): value is number {
  return typeof value === "number" && Number.isFinite(value);
}

function pad(n: number): string {
  return String(n).padStart(2, "0");
}
