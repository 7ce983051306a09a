"""A stand-in for the job service: the REST interface the dashboard reads, with jobs that are made up. For work on the
page and for the browser tests that need a fault on demand; not part of the package, and it trains nothing.

    python dashboards/dev/fake_service.py --port 8420        # then open the address it prints
"""

from __future__ import annotations

import argparse
import collections
import json
import sys
import time
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from fake_apart import apart_jobs
from fake_jobs import ENDS, FakeJob, World, sample_jobs
from fake_servers import FakeGroup, sample_groups

DIST = Path(__file__).resolve().parents[1] / "dist"
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}


class Server(ThreadingHTTPServer):
    """A server to which a reader that goes away is no news."""

    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say only what is not a closed connection."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    """The routes."""

    protocol_version = "HTTP/1.1"
    world: World
    groups: dict[str, FakeGroup]
    code: str

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing for each request."""

    def do_GET(self) -> None:
        """Reads."""
        url = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(url.query))
        if url.path == "/fake/offline":
            self.world.offline_until = time.time() + float(query.get("seconds", "3"))
            return self.reply(204)
        if url.path == "/fake/kill":
            self.groups[query["group"]].kill(query["server"])
            return self.reply(204)
        if self.world.offline():
            self.close_connection = True
            return None
        if not url.path.startswith("/api/"):
            return self.file(url.path)
        if "rayps_session=ok" not in self.headers.get("Cookie", ""):
            return self.problem(401, "No session", "Sign in first.")
        return self.api(url.path.removeprefix("/api/v1/").split("/"), query)

    def do_POST(self) -> None:
        """Session and stop."""
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.world.offline():
            self.close_connection = True
            return None
        parts = urllib.parse.urlsplit(self.path).path.removeprefix("/api/v1/").split("/")
        if parts == ["session"]:
            given = json.loads(body or b"{}")
            if given.get("code") != self.code and given.get("token") != "rps_fake":
                return self.problem(401, "Wrong code", "The code was used before or is too old.")
            return self.reply(204, headers={"Set-Cookie": "rayps_session=ok; HttpOnly; SameSite=Strict; Path=/"})
        if parts[0] == "server-groups":
            return self.change_group(parts, json.loads(body or b"{}"))
        job = self.world.jobs.get(parts[1]) if len(parts) == 3 and parts[2] == "stop" else None
        if job is None:
            return self.problem(404, "Not found", "There is nothing here.")
        if job.status in ENDS:
            return self.problem(409, "Ended", "The job has ended.")
        job.stop_requested, job.status = True, "STOPPING" if job.started else "STOPPED"
        job.version += 1
        return self.reply(202, job.to_json())

    do_PATCH = do_DELETE = do_POST

    def change_group(self, parts: list[str], body: dict[str, Any]) -> None:
        """Start, resize, drain or stop a server group."""
        if len(parts) == 1:
            self.groups[body["name"]] = FakeGroup(body["name"], body["servers"], body["replicas"], [], time.time())
            return self.reply(201, self.groups[body["name"]].to_json())
        group = self.groups.get(parts[1])
        if group is None:
            return self.problem(404, "Not found", f"there is no server group {parts[1]!r}")
        refused = None
        if self.command == "DELETE":
            group.stopping = True
            self.groups.pop(group.name)
        elif self.command == "PATCH":
            refused = group.resize(body["servers"])
        else:
            refused = group.drain(body["server"])
        return self.problem(409, "Conflict", refused) if refused else self.reply(202, self.group_json(group))

    def group_json(self, group: FakeGroup) -> dict[str, Any]:
        """A group with the jobs whose spaces it holds."""
        jobs = [self.world.jobs[space["name"]] for space in group.spaces if space["name"] in self.world.jobs]
        return group.to_json() | {"jobs": [{"id": job.id, "name": job.name, "status": job.status,
                                            "workers": job.spec["workers"]} for job in jobs]}

    def api(self, parts: list[str], query: dict[str, str]) -> None:
        """The read routes below /api/v1."""
        world = self.world
        if parts == ["cluster"]:
            return self.reply(200, {"ready": True, "address": "127.0.0.1:6379", "owned": True, "cores": 2, "reason": None,
                                    "total": {"cpu": 16, "gpu": 0}, "free": {"cpu": 12, "gpu": 0},
                                    "warm": None})
        if parts == ["jobs"]:
            found = self.listed(query.get("text", ""))
            jobs = [job for job in found if not self.statuses() or job["status"] in self.statuses()]
            at = next((i + 1 for i, job in enumerate(jobs) if job["id"] == query.get("cursor")), 0)
            page = jobs[at : at + int(query.get("limit", 50))]
            more = page[-1]["id"] if at + len(page) < len(jobs) else None
            return self.reply(200, {"jobs": page, "next_cursor": more, "counts": counts(found)})
        if parts == ["stream"]:
            return self.stream(query)
        if parts == ["server-groups"]:
            return self.reply(200, {"groups": [group.row() for group in self.groups.values()]})
        if parts[0] == "server-groups":
            group = self.groups.get(parts[1])
            return self.reply(200, self.group_json(group)) if group else self.problem(404, "Not found", "no such group")
        job = world.jobs.get(parts[1]) if len(parts) > 1 else None
        if job is None:
            return self.problem(404, "Not found", "There is no such job.")
        if len(parts) == 2:
            with world.lock:
                return self.reply(200, job.to_json())
        lists = {"metrics": ("points", job.metrics), "logs": ("lines", job.logs), "events": ("events", job.events)}
        name, items = lists[parts[2]]
        at = int(query.get("cursor", 0))
        if "tail" in query:
            at = max(0, len(items) - int(query["tail"]))
        page = items[at : at + int(query.get("limit", 1000))]
        return self.reply(200, {name: page, "cursor": at + len(page)})

    def statuses(self) -> list[str]:
        """The statuses that a request for the list asks for; none: all."""
        return urllib.parse.parse_qs(urllib.parse.urlsplit(self.path).query).get("status", [])

    def listed(self, text: str) -> list[dict[str, Any]]:
        """The jobs that hold each word of a text, the newest first."""
        with self.world.lock:
            jobs = [job.to_json() for job in sorted(self.world.jobs.values(), key=lambda job: -job.created)]
        return [job for job in jobs if all(word in json.dumps(job).lower() for word in text.lower().split())]

    def stream(self, query: dict[str, str]) -> None:
        """Server-sent events until the reader goes, the job ends, or the service plays dead."""
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Cache-Control", "no-cache")
        self.end_headers()
        self.close_connection = True
        try:
            if "group" in query:
                self.follow_groups(query["group"])
            elif "job" in query:
                self.follow(self.world.jobs[query["job"]], query.get("cursor", ""))
            else:
                self.follow_all(query.get("text", ""))
        except (BrokenPipeError, ConnectionResetError):
            return

    def follow_all(self, text: str) -> None:
        """Every job that changed, about twice a second."""
        seen: dict[str, int] = {}
        first = True
        while not self.world.offline():
            with self.world.lock:
                changed = [job for job in self.world.jobs.values() if seen.get(job.id) != job.version]
                seen |= {job.id: job.version for job in changed}
                data = [job.to_json() for job in changed]
            if data:
                found = self.listed(text)
                ids = {job["id"] for job in found}
                known = [job for job in data if job["id"] in ids]
                self.send("jobs", {"jobs": known, "gone": [], "counts": counts(found), "whole": first}, "")
                first = False
            time.sleep(0.5)

    def follow_groups(self, name: str) -> None:
        """A server group four times a second, or the list of them."""
        while not self.world.offline():
            group = self.groups.get(name)
            if group is not None:
                group.step()
            if name == "*":
                self.send("groups", {"groups": [group.row() for group in self.groups.values()]}, "")
            elif group is None:
                return self.send("end", {"reason": "gone"}, "")
            else:
                self.send("group", self.group_json(group), "")
            time.sleep(0.25)

    def follow(self, job: FakeJob, cursor: str) -> None:
        """One job from the cursor on."""
        at = {"m": 0, "l": 0, "e": 0} | {part[0]: int(part[1:]) for part in cursor.split(".") if part}
        while not self.world.offline():
            with self.world.lock:
                news = {"m": job.metrics[at["m"]: at["m"] + 500], "l": job.logs[at["l"]:], "e": job.events[at["e"]:]}
                state, over = job.to_json(), job.status in ENDS
            for key, event, name in (("m", "metrics", "points"), ("l", "logs", "lines"), ("e", "events", "events")):
                at[key] += len(news[key])
                if news[key]:
                    more = {"cursor": at["m"], "size": len(job.metrics)} if key == "m" else {}
                    self.send(event, {name: news[key], **more}, f"m{at['m']}.l{at['l']}.e{at['e']}")
            self.send("job", state, f"m{at['m']}.l{at['l']}.e{at['e']}")
            if over and not any(news.values()):
                return self.send("end", {"status": job.status}, "")
            time.sleep(0.02 if len(news["m"]) == 500 else 0.5)

    def send(self, event: str, data: Any, cursor: str) -> None:
        """One server-sent event."""
        name = f"id: {cursor}\n" if cursor else ""
        self.wfile.write(f"{name}event: {event}\ndata: {json.dumps(data)}\n\n".encode())
        self.wfile.flush()

    def file(self, path: str) -> None:
        """A file of the built dashboard, under the policy that the real service sets."""
        name = path.lstrip("/") or "index.html"
        target = (DIST / name).resolve()
        if not target.is_relative_to(DIST) or not target.is_file():
            return self.problem(404, "Not found", "There is no such file.")
        self.reply(200, target.read_bytes(), {"Content-Type": TYPES.get(target.suffix, "application/octet-stream"),
                                              "Content-Security-Policy": "default-src 'self'"})

    def problem(self, status: int, title: str, detail: str) -> None:
        """An error in the service's form."""
        self.reply(status, {"type": "about:blank", "title": title, "status": status, "detail": detail},
                   {"Content-Type": "application/problem+json"})

    def reply(self, status: int, body: Any = None, headers: dict[str, str] | None = None) -> None:
        """A whole answer."""
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        self.send_response(status)
        for name, value in ({"Content-Type": "application/json"} | (headers or {})).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def counts(jobs: list[dict[str, Any]]) -> dict[str, int]:
    """How many jobs there are in each status."""
    return dict(collections.Counter(job["status"] for job in jobs))


def serve(port: int = 0, empty: bool = False, speed: float = 12.0, code: str = "letmein") -> ThreadingHTTPServer:
    """A server on loopback that is ready to be run; port 0 takes a free one."""
    world = World([] if empty else [*sample_jobs(speed), *apart_jobs()])
    groups = {} if empty else sample_groups()
    handler = type("BoundHandler", (Handler,), {"world": world, "groups": groups, "code": code})
    server = Server(("127.0.0.1", port), handler)
    return server


def main() -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(description="A stand-in for the rayps service.")
    parser.add_argument("--port", type=int, default=8420)
    parser.add_argument("--empty", action="store_true", help="no jobs at all")
    parser.add_argument("--speed", type=float, default=12.0, help="rounds a second of the running job")
    given = parser.parse_args()
    server = serve(given.port, given.empty, given.speed)
    print(f"http://127.0.0.1:{server.server_address[1]}/#code=letmein", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        server.server_close()


if __name__ == "__main__":
    main()
