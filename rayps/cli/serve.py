"""`rayps serve`: the service on a socket that is checked first, and its orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import json
import logging
import os
import shlex
import signal
import socket
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import uvicorn
from rayps_api.app import create_app
from rayps_api.connections import Server
from rayps_api.log_limit import LogLimit
from rayps_api.service import Service

from rayps.cli.show import note, say
from rayps.core.errors import ConfigError
from rayps.service.settings import SERVICE_LOCK, Settings, private_write
from rayps.service.state_disk import is_full

log = logging.getLogger(__name__)


class _Server(Server):
    """uvicorn that says when it answers, ends streams first, and leaves with code 0 when it is told to."""

    def __init__(self, config: uvicorn.Config, site: _Site) -> None:
        super().__init__(config)
        self._site = site

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            await self._site.greet()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._site.leaving()
        super().handle_exit(sig, frame)


class _Site:
    """What is said at the start and at the end."""

    def __init__(self, settings: Settings, url: str) -> None:
        self._settings = settings
        self._url = url
        self._service: Service | None = None

    async def began(self, service: Service) -> None:
        self._service = service
        token, new = await service.user_tokens.own()
        if new and sys.stdout.isatty():
            say(f"token: {token}\n(shown once; the local command line finds it in {self._settings.token_file})")
        elif new:
            say(f"token: in {self._settings.token_file}")

    async def greet(self) -> None:
        assert self._service is not None
        try:
            await self._greet(self._service)
        except Exception as error:
            if not is_full(error):
                raise
            note(self._service.store.disk.full())  # it serves: what is there can be read, and deleted

    async def _greet(self, service: Service) -> None:
        facts = {"url": self._url, "pid": os.getpid()}
        private_write(self._settings.service_file, json.dumps(facts))
        if sys.stdout.isatty():
            code = await service.store.login_code()
            say(f"dashboard: {self._url}/#code={code}\n(opens once, within five minutes; `rayps open` gives another)")
        else:  # a log may have other readers
            say(
                f"dashboard: {self._url}/\n(RAYPS_STATE_DIR={shlex.quote(str(self._settings.state_dir))} rayps open "
                "prints, on a terminal, an address that opens it)"
            )

    def leaving(self) -> None:
        if self._service is not None:
            self._service.closing.set()
            running = "" if self._settings.address else " and its Ray"
            note(f"ending the service{running} ...")

    def ended(self, running: int, go_on: bool) -> None:
        self._settings.service_file.unlink(missing_ok=True)
        if running and go_on:
            note(f"{running} running {_jobs(running)} on; the next `rayps serve` takes care of them again")
        elif running:
            note(
                f"{running} running {'job was' if running == 1 else 'jobs were'} interrupted; the next `rayps serve` "
                f"starts {'it' if running == 1 else 'them'} again, from the newest checkpoint where there is one"
            )


def _jobs(count: int) -> str:
    return "job goes" if count == 1 else "jobs go"


def run(settings: Settings, *, keep: bool = False) -> None:
    """Serve until SIGINT or SIGTERM.

    Raises:
        ConfigError: the port or the state directory is in use, or the host would open the service to others.
    """
    if not settings.loopback and not settings.allowed_hosts:
        raise ConfigError(
            f"--host {settings.host} would answer other machines: name the host names by which they will call it\n"
            "with --allow-host NAME, and put TLS in front; or leave --host out to stay on this machine",
            field="host",
        )
    settings.prepare()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("alembic").setLevel(logging.WARNING)
    for handler in logging.getLogger().handlers:
        handler.addFilter(LogLimit())
    with _alone(settings), _listening(settings) as door:
        port = door.getsockname()[1]
        name = f"[{settings.host}]" if ":" in settings.host else settings.host
        site = _Site(settings, f"http://{name}:{port}")
        app = create_app(settings, keep=keep, started=site.began, ended=site.ended)
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=3,
            server_header=False,
            proxy_headers=False,
            lifespan="on",
            ws="none",
        )
        server = _Server(config, site)
        asyncio.run(server.serve([door]))
        if not server.started:
            raise ConfigError(f"the service did not start: its state is in {settings.state_dir}")


@contextlib.contextmanager
def _alone(settings: Settings) -> Iterator[None]:
    """One service for each state directory."""
    with (settings.state_dir / SERVICE_LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(
                f"another `rayps serve` uses {settings.state_dir}: use that one, stop it, or give another "
                "directory with --state-dir",
                field="state_dir",
            ) from error
        yield


@contextlib.contextmanager
def _listening(settings: Settings) -> Iterator[Any]:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as door:
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            door.bind((settings.host, settings.port))
            door.listen(128)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise ConfigError(
                    f"port {settings.port} on {settings.host} is in use: give another with --port (0 = any free "
                    "one), or stop what uses it",
                    field="port",
                ) from error
            raise ConfigError(
                f"cannot listen on {settings.host}:{settings.port}: {error.strerror or error}", field="host"
            ) from error
        yield door
