"""A real job service on a free port, in a thread, with a Ray that never comes up."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from pathlib import Path
from typing import Any

import httpx2
import uvicorn
from rayps_api.app import create_app
from rayps_api.connections import Limits, Server
from rayps_api.service import Service
from rayps_client.errors import ClusterError

from rayps.core.job.job_status import Status
from rayps.service.settings import Settings


class NoPlace:
    """A Ray that never comes up."""

    owned = True
    address = None

    def capacity(self) -> dict[str, float]:
        return {"cpu": 8.0}

    def cluster(self) -> Any:
        raise ClusterError("Ray is starting")

    def renew_lease(self) -> None:
        pass

    def disconnect(self, *, end: bool) -> None:
        pass


class Site:
    """A real server on a free port, in a thread."""

    def __init__(self, path: Path, port: int = 0, place: Any = None, limits: Limits | None = None, **more: Any) -> None:
        self.settings = Settings(state_dir=path, **more).prepare()
        self.token = ""
        self.code = ""
        self.service: Any = None
        self.loop: Any = None
        self.app = create_app(self.settings, place=place or NoPlace(), started=self._started)
        config = uvicorn.Config(self.app, log_level="warning", timeout_graceful_shutdown=1)
        self.server = Server(config, limits)
        self.socket = socket.create_server(("127.0.0.1", port))
        self.port = self.socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.thread = threading.Thread(target=self.server.run, args=([self.socket],))
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)
        self.http = httpx2.Client(base_url=self.url, headers={"Authorization": f"Bearer {self.token}"}, timeout=60)

    async def _started(self, service: Service) -> None:
        self.service = service
        self.loop = asyncio.get_running_loop()
        self.token, _ = await service.user_tokens.service_token()

    def store(self, method: str, *args: Any, **kwargs: Any) -> Any:
        work = getattr(self.service.store, method)(*args, **kwargs)
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)

    def add(self, **fields: Any) -> str:
        answer = self.http.post("/api/v1/jobs", json={"workload": "digits:Digits", **fields})
        assert answer.status_code == 201, answer.text
        return str(answer.json()["id"])

    def start(self, job: str) -> Path:
        self.store("change_status", job, Status.STARTING, message="", attempt=1, attempt_at=0.0, started_at=time.time())
        home = self.settings.jobs_dir / job
        home.mkdir(exist_ok=True)
        return home

    def close(self) -> None:
        self.http.close()
        self.service.closing.set()
        self.server.should_exit = True
        self.thread.join(60)
        self.socket.close()
