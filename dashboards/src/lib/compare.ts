/* A comparison of jobs: rows in order, and curves on one axis. Pure. */
import type { Comparison, ComparedRow, Curve } from "../types";

export type X = "round" | "epoch" | "seconds";
export const XS: X[] = ["round", "epoch", "seconds"];

/** A column of the table: how it is called in the address, its heading, and a row's value in it. */
export interface Column {
  key: string;
  head: string;
  title?: string;
  numeric: boolean;
  value: (row: ComparedRow) => unknown;
}

/** The columns of a comparison: the values that differ, then rounds, seconds, and each metric's last and, if known, best value. */
export function columns(found: Comparison): Column[] {
  const differing = found.differing.map((name): Column => ({
    key: name, head: name, numeric: found.rows.every((row) => row.values[name] == null || typeof row.values[name] === "number"),
    value: (row) => row.values[name],
  }));
  const metrics = found.metrics.flatMap((name): Column[] => {
    const last: Column = { key: name, head: name, title: `The last value of ${name}`, numeric: true, value: (row) => row.metrics[name]?.last };
    const lowest = found.lowest[name] ?? null;
    if (lowest === null) return [last];
    return [last, { key: `best ${name}`, head: lowest ? "lowest" : "highest", title: `The best value of ${name}`, numeric: true, value: (row) => row.metrics[name]?.best }];
  });
  return [
    { key: "name", head: "Job", numeric: false, value: (row) => row.name },
    { key: "status", head: "Status", numeric: false, value: (row) => row.status },
    ...differing,
    { key: "rounds", head: "Rounds", numeric: true, value: (row) => row.rounds },
    { key: "seconds", head: "Time", numeric: true, value: (row) => row.seconds },
    ...metrics,
  ];
}

/** Rows by one column; rows without a value are last in either direction, and equal rows keep their order. */
export function sorted(rows: readonly ComparedRow[], column: Column | undefined, down: boolean): ComparedRow[] {
  if (!column) return [...rows];
  const sign = down ? -1 : 1;
  return [...rows].sort((a, b) => {
    const [one, two] = [column.value(a), column.value(b)];
    if (one == null || two == null) return one == null ? (two == null ? 0 : 1) : -1;
    if (typeof one === "number" && typeof two === "number") return sign * (one - two);
    return sign * text(one).localeCompare(text(two), "en", { numeric: true });
  });
}

/** A value of a cell as text: numbers as they are written, a strategy by its name and options. */
export function text(value: unknown): string {
  if (value === null || value === undefined) return "–";
  if (typeof value === "string") return value;
  if (typeof value === "object" && !Array.isArray(value) && "name" in (value as object)) {
    const { name, ...options } = value as Record<string, unknown>;
    const given = Object.entries(options).filter(([, option]) => option !== null);
    return given.length ? `${String(name)}: ${given.map(([key, option]) => `${key} ${text(option)}`).join(", ")}` : String(name);
  }
  return JSON.stringify(value);
}

/** The metric that the chart shows: the wanted one, or the first whose curves have several points. */
export function chosenMetric(found: Comparison, wanted: string | null): string | null {
  if (wanted !== null && found.metrics.includes(wanted)) return wanted;
  const curves = Object.values(found.curves);
  return found.metrics.find((name) => curves.some((each) => (each[name]?.value.length ?? 0) > 1)) ?? found.metrics[0] ?? null;
}

/** The axes that the jobs have: epochs only where every job's length is in epochs. */
export function axes(found: Comparison, metric: string): X[] {
  const curves = found.rows.map((row) => found.curves[row.id]?.[metric]).filter((curve): curve is Curve => curve !== undefined);
  return XS.filter((x) => x !== "epoch" || (curves.length > 0 && curves.every((curve) => curve.epoch !== null)));
}

/** The curves of a metric on one x axis: the sorted union of all x, and one array of values for each row. */
export function joined(found: Comparison, metric: string, x: X, log: boolean): { x: number[]; y: (number | null)[][] } {
  const curves = found.rows.map((row) => found.curves[row.id]?.[metric]);
  const all = [...new Set(curves.flatMap((curve) => curve?.[x] ?? []))].sort((a, b) => a - b);
  const places = new Map(all.map((at, index) => [at, index]));
  const y = curves.map((curve) => {
    const values: (number | null)[] = all.map(() => null);
    (curve?.[x] ?? []).forEach((at, index) => {
      const value = curve!.value[index] ?? null;
      values[places.get(at)!] = log && value !== null && value <= 0 ? null : value;
    });
    return values;
  });
  return { x: all, y };
}

/** What distinguishes a row from the others, as text: `lr 0.1, seed 0`. */
export function label(found: Comparison, row: ComparedRow): string {
  const parts = found.differing.filter((name) => name in row.values).map((name) => `${name} ${text(row.values[name])}`);
  return parts.join(", ") || row.name;
}

/** The last known value at or before a position of the axis. */
export function upTo(values: readonly (number | null)[], index: number): number | null {
  for (let at = Math.min(index, values.length - 1); at >= 0; at -= 1) if (values[at] != null) return values[at]!;
  return null;
}
