"""A cluster that is well, hangs or dies, as a file says: for `rayps.service.local_ray.ray_child` in place of Ray.

Its address is a folder. `folder/mode` holds one of the modes below; `folder/actors` remembers actors across processes.
"""

from __future__ import annotations

import ctypes
import json
import os
import time
from pathlib import Path
from typing import Any

from rayps_client.errors import ActorDied, ClusterError


class Hurt:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def join(cls, address: str) -> Hurt:
        found = cls(Path(address))
        found.suffer("join ")
        return found

    def suffer(self, prefix: str = "") -> None:
        mode = (self.folder / "mode").read_text() if (self.folder / "mode").exists() else ""
        match mode.removeprefix(prefix) if mode.startswith(prefix) else "":
            case "hang":
                time.sleep(3600)
            case "hang with the interpreter's lock":
                ctypes.PyDLL(None).sleep(3600)
            case "abort":
                os.abort()
            case "exit":
                os._exit(7)
            case "refuse":
                raise ClusterError("no route\nto there", address="there")

    def _names(self) -> list[str]:
        path = self.folder / "actors"
        return path.read_text().split() if path.exists() else []

    def spawn(self, target: str, *args: Any, name: str, **options: Any) -> None:
        self.suffer()
        if name in self._names():
            raise ClusterError(f"cannot start actor {name!r}: it lives")
        (self.folder / "actors").write_text(" ".join([*self._names(), name]))
        (self.folder / f"{name}.json").write_text(json.dumps([target, args, options]))

    def find(self, name: str) -> Actor | None:
        self.suffer()
        return Actor(name) if name in self._names() else None

    def kill(self, handle: Actor) -> None:
        self.suffer()
        (self.folder / "actors").write_text(" ".join(name for name in self._names() if name != handle.name))

    def free(self) -> dict[str, float]:
        self.suffer()
        return {"cpu": 4.0, "gpu": 0.0}

    total = free

    def notices(self) -> tuple[Any, ...]:
        return ()

    def hosts(self, free: bool = True) -> dict[str, dict[str, float]]:
        return {"here": self.free()}

    def close(self) -> None:
        self.suffer()


class Actor:
    def __init__(self, name: str) -> None:
        self.name = name

    def call(self, method: str, *args: Any, **named: Any) -> Answer:
        return Answer(method, args, named)


class Answer:
    def __init__(self, method: str, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        self.what = method, args, named

    def result(self, timeout: float) -> Any:
        method, args, named = self.what
        if method == "die":
            raise ActorDied("actor a died: oom", actor="a", reason="oom")
        if method == "odd":
            return lambda: None  # cannot be pickled
        if method == "hang":
            time.sleep(3600)
        return [method, list(args), named]
