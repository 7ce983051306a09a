"""A real job service whose drivers and workers are threads, and real clients for it: threads, or processes."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx2
import torch
from fake_manager import ThreadPlace
from folders import PYTHONPATH
from hospital_work import SIZES, All, Own, Server, rows  # noqa: F401  those that tests import from here
from rayps_client.exchange.connection import Line, ServiceConnection
from rayps_client.exchange.signed_orders import ClientToken
from rayps_client.machine.client_folder import ClientFolder
from rayps_client.members.consent import Consent
from rayps_client.members.member_key import MemberKey
from rayps_client.members.signed_requests import SignedRequests
from rayps_client.process import ClientProcess
from rayps_client.secure.pinned_keys import PeerKeys
from real_service import stop_running, until
from service_site import Site

from rayps.clients.workload_trainer import WorkloadTrainer
from rayps.cluster.local import surrounding
from rayps.service.client import Client, Job
from rayps.tensors.checkpoints import checkpoint
from rayps.tensors.snapshot import Snapshot

WORK = """
import os, time
import torch
import client_site

class Server(client_site.Server):  # knows the model, and has no training data
    pass

class Slow(client_site.Own):  # the client of a process: which one, and how slow, its environment says
    def __init__(self):
        super().__init__(int(os.environ["HOSPITAL"]), float(os.environ.get("PAUSE", 0)))
"""


class Hospitals:
    """The user of a service, and the clients of the user's jobs as threads of this process."""

    def __init__(self, path: Path, user: Client) -> None:
        self.path, self.user, self.running = path, user, list[Hospital]()

    def invite(self, job: Job, **more: Any) -> dict[str, Any]:
        found: dict[str, Any] = self.user.call("POST", "/api/v1/client-tokens", json={"job": job.id, **more})
        return found

    def hospital(self, job: Job, k: int, token: str | ClientToken | None = None, **options: Any) -> Hospital:
        made = Hospital(self, job, k, token or self.invite(job)["token"], **options)
        self.running.append(made)
        return made

    def hospitals(self, job: Job, count: int, **options: Any) -> list[Hospital]:
        """So many, which join one after another: their numbers are those of the simulated clients."""
        return [self.hospital(job, k, **options).begin() for k in range(count)]

    def joined(self, job: Job) -> dict[str, dict[str, Any]]:
        found = self.user.call("GET", f"/api/v1/jobs/{job.id}/clients")["clients"]
        return {client["name"]: client for client in found}

    def standing(self, job: Job) -> str | None:
        """Which clients the job waits for."""
        found: str | None = self.user.call("GET", f"/api/v1/jobs/{job.id}/clients")["waits"]
        return found

    def reason(self, job: Job) -> str:
        return str(job.refresh().data["reason"] or "")

    def trained(self, job: Job, seconds: float = 60.0) -> torch.Tensor:
        """The parameters with which a job ended."""
        data = job.wait(seconds).data
        assert data["status"] == "SUCCEEDED", data["reason"]
        return Snapshot.from_state(checkpoint.load(data["checkpoint"])).params

    def close(self) -> None:
        for job in self.user.jobs():
            stop_running(job)
        for each in self.running:
            each.end()
        self.user.close()


class Clinic(Site, Hospitals):
    """A service, its jobs and their clients, all in this process."""

    def __init__(self, path: Path, port: int = 0, **settings: Any) -> None:
        place = ThreadPlace()
        place.threads = surrounding()  # type: ignore[assignment]  # where a driver in a thread starts its workers
        Site.__init__(self, path / "state", port, place, **settings)
        Hospitals.__init__(self, path, Client(self.url, self.token))
        (path / "work.py").write_text(WORK)

    def job(self, strategy: str, rounds: int = 3, **options: Any) -> Job:
        return self.user.submit("work.py:Server", working_dir=self.path, strategy=strategy, epochs=rounds, **options)

    def workers(self) -> list[str]:
        return [
            name
            for name, handle in surrounding()._handles.items()  # type: ignore[attr-defined]
            if type(handle.actor).__name__ == "WorkerActor" and not handle.dead.is_set()
        ]

    def kill_workers(self) -> None:
        for name in self.workers():
            cluster = surrounding()
            cluster.kill(cluster.find(name))  # type: ignore[arg-type]

    def close(self) -> None:
        Hospitals.close(self)
        Site.close(self)


class Hospital(threading.Thread):
    """A client as a thread: what it said, and how it ended."""

    def __init__(
        self,
        home: Hospitals,
        job: Job,
        k: int,
        token: str | ClientToken,
        *,
        name: str | None = None,
        pause: float = 0.0,
        transport: httpx2.BaseTransport | None = None,
        state: Path | None = None,
        gate: threading.Event | None = None,
        pinned: PeerKeys | None = None,
        member: MemberKey | None = None,
        accepted: str | None = None,
    ) -> None:
        super().__init__(daemon=True)
        self.said: list[str] = []
        self.ended: Any = None
        self.error: Exception | None = None
        workload = Own(k, pause, gate)
        found = token if isinstance(token, ClientToken) else ClientToken.read(token)
        self.folder = ClientFolder(state or home.path / f"hospital-{job.id}-{name or k}")
        line = Line(auth=None if member is None else SignedRequests(member, found.fingerprint))
        bearer = str(found) if found.secret else ""
        self.connection = ServiceConnection(home.user.url, bearer, 20.0, self.said.append, transport, line=line)
        self.outside = ClientProcess(
            WorkloadTrainer(workload, workload.data()),
            found,
            job.id,
            self.connection,
            self.folder,
            name=name or f"h{k}",
            report=self.said.append,
            pinned=pinned,
            consent=Consent(self.folder.folder, self.connection, member, accepted),
        )

    def run(self) -> None:
        try:
            self.ended = self.outside.run()
        except Exception as error:  # the test looks at it
            self.error = error

    def begin(self) -> Hospital:
        self.start()
        until(lambda: any("joined" in connection for connection in self.said) or self.error is not None)
        return self

    def over(self) -> Hospital:
        self.join(60)
        assert not self.is_alive()
        return self

    def end(self) -> None:
        if self.ident is not None:
            self.connection.close()
            self.join(60)
        self.folder.close()


class Process:
    """A client as a process, as a user starts it."""

    def __init__(self, clinic: Clinic, job: Job, k: int, token: str, url: str | None = None, pause: float = 0.0):
        self.command = [
            sys.executable,
            "-m",
            "rayps.cli",
            "client",
            "--url",
            url or clinic.url,
            "--name",
            f"h{k}",
            "--state",
            str(clinic.path / f"process-{k}"),
            "--patience",
            "20",
            "work.py:Slow",
        ]
        self.environment = {
            **os.environ,
            "HOSPITAL": str(k),
            "PAUSE": str(pause),
            "RAYPS_CLIENT_TOKEN": token,
            "PYTHONPATH": os.pathsep.join([PYTHONPATH, *filter(None, [os.environ.get("PYTHONPATH")])]),
            "OMP_NUM_THREADS": "1",
        }
        self.clinic = clinic
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            self.command,
            cwd=self.clinic.path,
            env=self.environment,
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def end(self, seconds: float = 60.0) -> tuple[int, str]:
        _, said = self.process.communicate(timeout=seconds)
        return self.process.returncode, said


class Tap:
    """A proxy before a service, which keeps every byte that goes in."""

    def __init__(self, port: int) -> None:
        self.sent, self._port = bytearray(), port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self._port))
            threading.Thread(target=self._carry, args=(near, far, self.sent), daemon=True).start()
            threading.Thread(target=self._carry, args=(far, near, None), daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket, folder: bytearray | None) -> None:
        with contextlib.suppress(OSError):
            while block := source.recv(65536):
                if folder is not None:
                    folder += block
                sink.sendall(block)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()


def cohorts(job: Job) -> list[dict[str, Any]]:
    """The events of the rounds of a job with clients."""
    return [event for event in job.events() if event["kind"] == "cohort"]
