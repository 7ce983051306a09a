/* The address is the state: `#/jobs?status=RUNNING&q=digits`, `#/jobs/ID?smooth=0.9`. Hash routes need no server rule. */
import { signal } from "@preact/signals";

export interface Route {
  path: string[];
  query: URLSearchParams;
}

export const route = signal<Route>(read(location.hash));

/** A hash as path and query. */
export function read(hash: string): Route {
  const [path = "", query = ""] = hash.replace(/^#\/?/, "").split("?");
  return { path: path.split("/").filter(Boolean).map(decodeURIComponent), query: new URLSearchParams(query) };
}

/** The address of a page. */
export function href(path: string[], query: URLSearchParams = new URLSearchParams()): string {
  const text = query.toString();
  return `#/${path.map(encodeURIComponent).join("/")}${text ? `?${text}` : ""}`;
}

/** Go to a page. */
export function go(path: string[], query?: URLSearchParams): void {
  location.hash = href(path, query);
}

/** Change query values of this page without a step in the history; an empty value is removed. */
export function put(values: Record<string, string | null>): void {
  const query = new URLSearchParams(route.value.query);
  for (const [key, value] of Object.entries(values)) {
    if (value) query.set(key, value);
    else query.delete(key);
  }
  history.replaceState(null, "", href(route.value.path, query));
  route.value = { path: route.value.path, query };
}

/** The address of the page that this tab showed last; a login code in the address is no page. */
let shown = location.hash;

/** Whether a hash carries a login code and is no page. */
export function isCode(hash: string): boolean {
  return /[#&]code=/.test(hash);
}

/** The login code of an address such as `#code=XXXX`; the address bar then shows the page from before it, or all jobs. */
export function takeCode(): string | null {
  const code = new URLSearchParams(location.hash.replace(/^#/, "")).get("code");
  const page = isCode(shown) || shown.length < 2 ? "#/jobs" : shown;
  if (code) history.replaceState(null, "", `${location.pathname}${location.search}${page}`);
  route.value = read(location.hash);
  return code;
}

/** The code or token in what a person pasted: a whole address, `code=...`, or the bare code. */
export function pasted(text: string): { code?: string; token?: string } {
  const trimmed = text.trim();
  const match = /[#?&]?code=([^&\s]+)/.exec(trimmed);
  if (match) return { code: decodeURIComponent(match[1] ?? "") };
  return trimmed.startsWith("rps_") ? { token: trimmed } : { code: trimmed };
}

window.addEventListener("hashchange", () => {
  if (!isCode(location.hash)) shown = location.hash;
  route.value = read(location.hash);
});
