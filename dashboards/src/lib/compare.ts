/* A comparison of jobs: rows in order, and curves on one axis. Pure. */
import type { Comparison, ComparedRow, Curve } from "../types";

export type X = "round" | "epoch" | "seconds";
export const XS: X[] = ["round", "epoch", "seconds"];

/** A column of the table: how it is called in the address, its heading, and a row's value in it. */
export interface Column {
  key: string;
  kind: string; // where a row has the value: a fact of the job, a value in which the jobs differ, the last or best of a metric
  head: string;
  title?: string;
  numeric: boolean;
  value: (row: ComparedRow) => unknown;
}

const HEADS: Record<string, string> = { name: "Job", status: "Status", rounds: "Rounds", seconds: "Time" };

/** The columns of a comparison, as the service names them: without the ids, and without best values where it is not known which is the best. */
export function columns(found: Comparison): Column[] {
  return found.columns
    .filter(({ kind, of }) => !(kind === "fact" && of === "id") && !(kind === "best" && (found.lowest[of] ?? null) === null))
    .map(({ name, kind, of }): Column => {
      if (kind === "fact") return { key: name, kind, head: HEADS[of] ?? name, numeric: of === "rounds" || of === "seconds", value: (row) => row[of as keyof ComparedRow] };
      if (kind === "value") return { key: name, kind, head: name, numeric: found.rows.every((row) => row.values[of] == null || typeof row.values[of] === "number"), value: (row) => row.values[of] };
      if (kind === "last") return { key: name, kind, head: name, title: `The last value of ${of}`, numeric: true, value: (row) => row.metrics[of]?.last };
      return { key: name, kind, head: found.lowest[of] ? "lowest" : "highest", title: `The best value of ${of}`, numeric: true, value: (row) => row.metrics[of]?.best };
    });
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
