/* Calls of the service's REST interface. Addresses are relative to the page, so a path prefix needs no setting. */
import { parse } from "./lib/json";
import type { Filter } from "./list";
import type { ClusterState, Comparison, Group, GroupRow, Job, JobCode, JobList, LogLine, Problem } from "./types";

const base = new URL("api/v1/", document.baseURI);

/** The service refused or could not be reached. `status` 0 = not reached. */
export class ApiError extends Error {
  constructor(readonly status: number, message: string, readonly problem: Problem | null = null) {
    super(message);
    this.name = "ApiError";
  }
}

export function address(path: string, query: Record<string, string | number | readonly string[] | null | undefined> = {}): string {
  const url = new URL(path, base);
  for (const [key, value] of Object.entries(query)) {
    if (Array.isArray(value)) for (const each of value) url.searchParams.append(key, each);
    else if (value !== null && value !== undefined && value !== "") url.searchParams.set(key, String(value));
  }
  return url.href;
}

async function call(method: string, url: string, body?: unknown, headers: Record<string, string> = {}): Promise<unknown> {
  let answer: Response;
  try {
    answer = await fetch(url, {
      method,
      credentials: "same-origin",
      headers: body === undefined ? headers : { "content-type": "application/json", ...headers },
      body: body === undefined ? null : JSON.stringify(body),
    });
  } catch {
    throw new ApiError(0, "The service cannot be reached.");
  }
  const text = await answer.text();
  const data = text ? safeParse(text) : null;
  if (!answer.ok) {
    const problem = typeof data === "object" ? (data as Problem | null) : null;
    throw new ApiError(answer.status, problem?.detail || problem?.title || `The service answered ${answer.status}.`, problem);
  }
  return data;
}

function safeParse(text: string): unknown {
  try {
    return parse(text);
  } catch {
    return null;
  }
}

/** Exchange a one-time code for the session cookie. */
export async function login(code: string): Promise<void> {
  await call("POST", address("session"), { code });
}

/** Ask for the session cookie with the service's own token. */
export async function loginByToken(token: string): Promise<void> {
  await call("POST", address("session"), { token }, { authorization: `Bearer ${token}` });
}

export async function cluster(): Promise<ClusterState> {
  return (await call("GET", address("cluster"))) as ClusterState;
}

export async function jobs(filter: Filter, cursor: string | null, limit: number): Promise<JobList> {
  return (await call("GET", address("jobs", { ...filter, limit, cursor }))) as JobList;
}

export async function job(id: string): Promise<Job> {
  return (await call("GET", address(`jobs/${encodeURIComponent(id)}`))) as Job;
}

export async function code(id: string): Promise<JobCode> {
  return (await call("GET", address(`jobs/${encodeURIComponent(id)}/code`))) as JobCode;
}

export async function stop(id: string): Promise<Job> {
  return (await call("POST", address(`jobs/${encodeURIComponent(id)}/stop`))) as Job;
}

/** Set the most workers that an elastic job should have. */
export async function scaleJob(id: string, workers: number): Promise<Job> {
  return (await call("PATCH", address(`jobs/${encodeURIComponent(id)}`), { workers })) as Job;
}

export async function logTail(id: string, tail: number): Promise<{ lines: LogLine[]; cursor: number }> {
  return (await call("GET", address(`jobs/${encodeURIComponent(id)}/logs`, { tail }))) as { lines: LogLine[]; cursor: number };
}

export async function logPage(id: string, cursor: number, limit = 1000): Promise<{ lines: LogLine[]; cursor: number }> {
  const url = address(`jobs/${encodeURIComponent(id)}/logs`, { cursor, limit });
  return (await call("GET", url)) as { lines: LogLine[]; cursor: number };
}

export async function comparison(query: { sweep: string } | { job: string[] }): Promise<Comparison> {
  const url = new URL(address("comparison"));
  if ("sweep" in query) url.searchParams.set("sweep", query.sweep);
  else for (const id of query.job) url.searchParams.append("job", id);
  return (await call("GET", url.href)) as Comparison;
}

export async function stopSweep(name: string): Promise<void> {
  await call("POST", address(`sweeps/${encodeURIComponent(name)}/stop`));
}

const groupPath = (name: string) => `server-groups/${encodeURIComponent(name)}`;

export async function groups(): Promise<GroupRow[]> {
  return ((await call("GET", address("server-groups"))) as { groups: GroupRow[] }).groups;
}

export async function group(name: string): Promise<Group> {
  return (await call("GET", address(groupPath(name)))) as Group;
}

export async function startGroup(name: string, servers: number, replicas: number): Promise<Group> {
  return (await call("POST", address("server-groups"), { name, servers, replicas })) as Group;
}

export async function resizeGroup(name: string, servers: number): Promise<Group> {
  return (await call("PATCH", address(groupPath(name)), { servers })) as Group;
}

export async function drainServer(name: string, server: string): Promise<Group> {
  return (await call("POST", address(`${groupPath(name)}/drain`), { server })) as Group;
}

export async function stopGroup(name: string): Promise<Group> {
  return (await call("DELETE", address(groupPath(name)))) as Group;
}
