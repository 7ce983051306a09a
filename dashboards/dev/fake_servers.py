"""The made-up server groups of the stand-in service: facts as a manager gives them, that change while one looks."""

from __future__ import annotations

import math
import random
import time
from typing import Any

from fake_jobs import iso

CELLS = 48  # steps of a move
PAST = (
    (2100, "server_lost", "server-9 (node-b, pid 5121) died: its connection broke"),
    (2099.7, "promoted", "6 segments of 2 jobs have new primaries after 0.31 s"),
    (2096, "healed", "6 copies were made again, 3.1 MB"),
)
Segment = dict[str, Any]


class FakeGroup:
    """A group whose load is drawn from a seeded generator, and whose moves take some seconds."""

    def __init__(self, name: str, servers: int, replicas: int, spaces: list[tuple[str, list[tuple[str | None, int]]]],
                 begun: float | None = None) -> None:
        self.name, self.wanted, self.replicas = name, servers, replicas
        self.since = time.time() - 5400 if begun is None else begun
        self.rng = random.Random(11)
        self.servers: dict[str, str] = {f"server-{i}": "alive" for i in range(servers)}
        self.made = servers
        self.stopping = False
        self.pause = 0.0
        self.moves: list[dict[str, Any]] = []
        past = (14, 48_300_000, 6, 1, 6) if spaces else (0,) * 5
        self.counts = dict(zip(("moves", "moved_bytes", "promotions", "deaths", "copies_made"), past, strict=True))
        self.events: list[dict[str, Any]] = []
        self.spaces = [self._space(number + 1, job, cut) for number, (job, cut) in enumerate(spaces)]
        self.note("started", f"{servers} servers, copies of each segment: {replicas}", self.since)
        for ago, kind, message in PAST if spaces else ():
            self.note(kind, message, time.time() - ago)

    def note(self, kind: str, message: str, when: float | None = None) -> None:
        """One event."""
        self.events.append({"time": when or time.time(), "kind": kind, "message": message})

    def _space(self, number: int, job: str, cut: list[tuple[str | None, int]]) -> dict[str, Any]:
        segments: list[Segment] = []
        for table, count in cut:
            for i in range(count):
                hot = 1 / (1 + i) ** 1.1 * 9 if table == "users" else 1.0
                segments.append({"index": len(segments), "table": table, "weight": hot * self.rng.uniform(0.8, 1.2),
                                 "bytes": (2_400_000 if table else 96_000) * self.rng.uniform(0.9, 1.1), "generation": 1})
        names = list(self.servers)
        for segment in segments:
            at = self.rng.randrange(len(names))
            segment["primary"] = names[at]
            segment["copies"] = [names[(at + 1 + k) % len(names)] for k in range(min(self.replicas, len(names) - 1))]
            segment["state"] = "ready"
        tables = [table for table, _ in cut if table]
        return {"name": job, "number": number, "workers": 4, "version": 20 + number, "segments": segments, "tables": tables,
                "quota": {"bytes": 200_000_000, "operations": 4000} if tables else {"bytes": None, "operations": None},
                "branch_of": None, "rejected": 12 if tables else 0}

    def resize(self, servers: int) -> str | None:
        """Grow or shrink; gives why not."""
        if servers < self.replicas + 1:
            return f"servers is {servers} and replicas is {self.replicas}: give at least {self.replicas + 1} servers."
        if self.moves:
            return "The group is resizing already: wait until it is ready."
        living = [name for name, state in self.servers.items() if state == "alive"]
        for _ in range(servers - len(living)):
            self.servers[f"server-{self.made}"] = "alive"
            self.made += 1
        leaving = living[servers:]
        for name in leaving:
            self.servers[name] = "leaving"
        self.wanted = servers
        self._plan(leaving)
        self.note("resize", f"from {len(living)} to {servers} servers: {len(self.moves)} segments move")
        return None

    def drain(self, server: str) -> str | None:
        """Let one server go; gives why not."""
        if self.wanted - 1 < self.replicas + 1:
            return f"the group needs {self.replicas + 1} servers for its copies: start another before this one leaves."
        self.servers[server] = "leaving"
        self.wanted -= 1
        self._plan([server])
        self.note("drain", f"{server} leaves: {len(self.moves)} segments move")
        return None

    def kill(self, server: str) -> None:
        """A server dies: its segments are promoted, and lack copies for a while."""
        self.servers[server] = "dead"
        self.pause = time.time() + 1.5
        self.counts["deaths"] += 1
        self.note("server_lost", f"{server} (node-a) died: its connection broke")
        for space in self.spaces:
            for segment in space["segments"]:
                if segment["primary"] == server:
                    segment["primary"] = segment["copies"].pop(0) if segment["copies"] else None
                    segment["generation"] += 1
                elif server in segment["copies"]:
                    segment["copies"].remove(server)
                else:
                    continue
                segment["state"] = "copying" if segment["primary"] else "lost"

    def _plan(self, leaving: list[str]) -> None:
        living = [name for name, state in self.servers.items() if state == "alive"]
        share = sum(len(space["segments"]) for space in self.spaces) / max(1, len(living))
        load = dict.fromkeys(living, 0)
        for space in self.spaces:
            for segment in space["segments"]:
                if segment["primary"] in load:
                    load[segment["primary"]] += 1
        for space in self.spaces:
            for segment in space["segments"]:
                source, to = segment["primary"], min(load, key=lambda name: load[name])
                if source in leaving or (load.get(source, 0) > share + 1 and load[to] < share - 1):
                    load[to] += 1
                    if source in load:
                        load[source] -= 1
                    self.moves.append({"space": space["name"], "segment": segment["index"], "from": source, "to": to,
                                       "phase": "copying", "seconds": 0.0, "bytes": 0, "done": -3 * len(self.moves)})

    def _heal(self) -> None:
        """Three of the segments that lack a copy get one, from a server that is started for the dead one."""
        living = [name for name, state in self.servers.items() if state == "alive"]
        if len(living) < self.wanted:
            self.servers[f"server-{self.made}"] = "alive"
            self.made += 1
        bare = [s for space in self.spaces for s in space["segments"] if s["state"] == "copying"]
        for segment in bare[:3]:
            segment["copies"].append(self.rng.choice([name for name in living if name != segment["primary"]]))
            segment["state"] = "ready"
            self.counts["copies_made"] += 1
        if not bare:
            self.servers = {name: state for name, state in self.servers.items() if state != "dead"}
            self.note("healed", "every segment has its copies again")

    def step(self) -> None:
        """A quarter of a second passes."""
        if "dead" in self.servers.values() and time.time() > self.pause:
            self._heal()
        for move in list(self.moves):
            move["done"] += 4
            segment = next(space for space in self.spaces if space["name"] == move["space"])["segments"][move["segment"]]
            if move["done"] <= 0:
                continue
            segment["state"] = "moving"
            move["seconds"] = move["done"] / 16
            move["bytes"] = min(1.0, move["done"] / CELLS) * segment["bytes"]
            move["phase"] = "copying" if move["done"] < CELLS * 0.8 else "handing"
            if move["done"] >= CELLS:
                living = [name for name, state in self.servers.items() if state == "alive" and name != move["to"]]
                segment.update(primary=move["to"], state="ready", generation=segment["generation"] + 1,
                               copies=self.rng.sample(living, min(self.replicas, len(living))))
                self.moves.remove(move)
                self.counts["moves"] += 1
                self.counts["moved_bytes"] += int(segment["bytes"])
                if not self.moves:
                    self.servers = {name: state for name, state in self.servers.items() if state != "leaving"}
                    self.note("resized", f"{self.wanted} servers hold everything")

    def to_json(self) -> dict[str, Any]:
        """The group as the service sends it."""
        wave = 1 + 0.15 * math.sin(time.time() / 3)
        spaces = []
        for space in self.spaces:
            scale = 18.0 if space["tables"] else 40.0
            segments = [{"index": s["index"], "table": s["table"], "primary": s["primary"], "copies": s["copies"],
                         "generation": s["generation"], "bytes": int(s["bytes"]), "rows": int(s["bytes"] / 80) if s["table"] else 0,
                         "operations_s": round(scale * s["weight"] * wave * self.rng.uniform(0.95, 1.05), 1),
                         "state": s["state"]} for s in space["segments"]]
            spaces.append({**space, "segments": segments, "bytes": sum(s["bytes"] for s in segments),
                           "rows": sum(s["rows"] for s in segments),
                           "operations_s": round(sum(s["operations_s"] for s in segments), 1)})
        servers = [self._server(name, state, spaces) for name, state in self.servers.items()]
        lost = any(state == "dead" for state in self.servers.values())
        status = "stopping" if self.stopping else "resizing" if self.moves else "healing" if lost else "ready"
        return {"name": self.name, "status": status, "reason": None, "wanted": self.wanted, "replicas": self.replicas,
                "created_at": iso(self.since), "settled": status == "ready", "servers": servers, "spaces": spaces,
                "moves": [{k: v for k, v in move.items() if k != "done"} for move in self.moves if move["done"] > 0],
                "counts": self.counts, "events": self.events[-200:], "jobs": []}

    def _server(self, name: str, state: str, spaces: list[dict[str, Any]]) -> dict[str, Any]:
        own = [s for space in spaces for s in space["segments"] if s["primary"] == name]
        copies = [s for space in spaces for s in space["segments"] if name in s["copies"]]
        number = int(name.rpartition("-")[2])
        load = sum(s["operations_s"] for s in own)
        load = {"bytes": sum(s["bytes"] for s in own + copies), "rows": sum(s["rows"] for s in own),
                "operations_s": round(load, 1), "cpu": min(0.99, load / 2600)}
        return {"name": name, "address": f"tcp:10.0.0.{number + 4}:41{number:03}", "host": f"node-{'abc'[number % 3]}",
                "pid": 5101 + number, "state": state, **(dict.fromkeys(load) if state == "dead" else load),
                "seen_s": 0.05 if state != "dead" else 4.2, "primaries": len(own), "copies": len(copies)}

    def row(self) -> dict[str, Any]:
        """The group in short."""
        whole = self.to_json()
        short = {key: whole[key] for key in ("name", "status", "reason", "wanted", "replicas", "created_at", "settled")}
        return short | {"alive": sum(s["state"] == "alive" for s in whole["servers"]),
                        "bytes": sum(s["bytes"] or 0 for s in whole["servers"]),
                        "operations_s": sum(s["operations_s"] or 0 for s in whole["servers"]), "spaces": len(self.spaces),
                        "moves": len(whole["moves"]), "jobs": len(whole["spaces"])}


def sample_groups() -> dict[str, FakeGroup]:
    """One busy group and an idle one."""
    flights, phased = "01JD8Q0A4M6N8P0Q2R4S6T8UVW", "01JD8Q4V7M3K2X9A5T6B8C0DEF"
    busy = FakeGroup("shared", 3, 1, [(phased, [(None, 32)]), (flights, [(None, 16), ("users", 24), ("items", 16)])])
    idle = FakeGroup("spare", 1, 0, [], time.time() - 700)
    return {"shared": busy, "spare": idle}
