/* A job's spec as commands that a person can paste into a shell. Pure. */
import type { JobSpec } from "../job";

/** The spec without fields that were left at nothing, ready to be sent again.

    The service tells the names of environment variables and no values: each becomes the service's own variable, and
    the service refuses the job if it has none. */
export function slim(spec: JobSpec): Record<string, unknown> {
  return Object.fromEntries(
    Object.entries(spec)
      .filter(([key, value]) => value !== null && value !== undefined && !(isEmpty(value) && key === "params"))
      .map(([key, value]) => [key, key === "env" && Array.isArray(value) ? Object.fromEntries(value.map((name) => [name, null])) : value]),
  );
}

function isEmpty(value: unknown): boolean {
  return typeof value === "object" && value !== null && Object.keys(value).length === 0;
}

/** `curl` that submits the spec; the token comes from the shell's RAYPS_TOKEN. */
export function asCurl(spec: JobSpec, origin: string): string {
  const fields = Object.entries(slim(spec)).map(([key, value]) => `  ${JSON.stringify(key)}: ${JSON.stringify(value)}`);
  const body = `{\n${fields.join(",\n")}\n}`;
  return [
    `curl -X POST ${origin}/api/v1/jobs \\`,
    `  -H "Authorization: Bearer $RAYPS_TOKEN" \\`,
    `  -H "Content-Type: application/json" \\`,
    `  -d ${quote(body)}`,
  ].join("\n");
}

/** A job file and the command that submits it and follows it. */
export function asCli(spec: JobSpec): string {
  return [`cat > job.yaml <<'YAML'`, yaml(slim(spec)), "YAML", "rayps submit job.yaml --follow"].join("\n");
}

/** JSON-ready data as YAML: block style above, flow style (plain JSON) for anything nested. */
export function yaml(data: Record<string, unknown>): string {
  return Object.entries(data).map(([key, value]) => `${key}: ${scalar(value)}`).join("\n");
}

function scalar(value: unknown): string {
  if (typeof value === "string") return /^[A-Za-z][\w./-]*(:[\w./-]+)?$/.test(value) && !RESERVED.test(value) ? value : JSON.stringify(value);
  return JSON.stringify(value);
}

const RESERVED = /^(true|false|null|yes|no|on|off|y|n)$/i;

function quote(text: string): string {
  return `'${text.replaceAll("'", `'\\''`)}'`;
}
