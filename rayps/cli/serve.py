"""`rayps serve`: check the state directory and the address, run the service, and shut it down."""

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

import uvicorn
from rayps_api.app import create_app
from rayps_api.connections import Server as HttpServer
from rayps_api.log_limit import LogLimit
from rayps_api.service import Service
from rayps_client.errors import ConfigError
from rayps_client.exchange.signed_orders import Key

from rayps.cli.show import print_line, print_note
from rayps.service.members import members_of
from rayps.service.settings import SERVICE_LOCK, Settings, private_write
from rayps.service.state_disk import is_full

log = logging.getLogger(__name__)


class _Server(HttpServer):
    """An HTTP server that prints its address when it answers. A signal ends first its streams, then the server."""

    def __init__(self, config: uvicorn.Config, messages: _ConsoleMessages) -> None:
        super().__init__(config)
        self._messages = messages

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            await self._messages.announce()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._messages.stopping()
        super().handle_exit(sig, frame)


class _ConsoleMessages:
    """The messages that `rayps serve` prints at the start and at the end of the service."""

    def __init__(self, settings: Settings, url: str) -> None:
        self._settings = settings
        self._url = url
        self._service: Service | None = None

    async def started(self, service: Service) -> None:
        self._service = service
        token, new = await service.user_tokens.service_token()
        if new and sys.stdout.isatty():
            print_line(
                f"token: {token}\n(shown once; the local command line reads it from {self._settings.token_file})"
            )
        elif new:
            print_line(f"token: in {self._settings.token_file}")

    async def announce(self) -> None:
        assert self._service is not None
        try:
            await self._announce(self._service)
        except Exception as error:
            if not is_full(error):
                raise
            print_note(
                self._service.store.disk.full_message()
            )  # the service runs nevertheless: jobs can be read and deleted

    async def _announce(self, service: Service) -> None:
        facts = {"url": self._url, "pid": os.getpid()}
        private_write(self._settings.service_file, json.dumps(facts))
        if sys.stdout.isatty():
            code = await service.store.login_code()
            print_line(
                f"dashboard: {self._url}/#code={code}\n(valid once, for five minutes; `rayps open` prints another)"
            )
        else:  # no code, because other users may read the log
            print_line(
                f"dashboard: {self._url}/\n(to open it, run in a terminal: "
                f"RAYPS_STATE_DIR={shlex.quote(str(self._settings.state_dir))} rayps open)"
            )

    def stopping(self) -> None:
        if self._service is not None:
            self._service.closing.set()
            running = "" if self._settings.address else " and its Ray"
            print_note(f"stopping the service{running} ...")

    def ended(self, running: int, keep: bool) -> None:
        self._settings.service_file.unlink(missing_ok=True)
        if running and keep:
            print_note(f"jobs that keep running: {running}; the next `rayps serve` manages them again")
        elif running:
            print_note(
                f"interrupted jobs: {running}; the next `rayps serve` restarts them from their newest checkpoints"
            )


def run(settings: Settings, *, keep: bool = False) -> None:
    """Serve until SIGINT or SIGTERM.

    Raises:
        ConfigError: the port or the state directory is in use, other machines can reach `host` and no host name is
            allowed, or the files of members are invalid.
    """
    if not settings.loopback and not settings.allowed_hosts:
        raise ConfigError(
            f"--host {settings.host} opens the service to other machines: give its host name with --allow-host NAME\n"
            "and put TLS in front; or omit --host to serve this machine only",
            field="host",
        )
    settings.prepare()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("alembic").setLevel(logging.WARNING)
    for handler in logging.getLogger().handlers:
        handler.addFilter(LogLimit())
    with _lock_state(settings), _listen(settings) as listener:
        members_of(settings, Key.load_or_create(settings.client_key))  # an error in a file is shown without the log
        port = listener.getsockname()[1]
        name = f"[{settings.host}]" if ":" in settings.host else settings.host
        messages = _ConsoleMessages(settings, f"http://{name}:{port}")
        app = create_app(settings, keep=keep, started=messages.started, ended=messages.ended)
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
        server = _Server(config, messages)
        asyncio.run(server.serve([listener]))
        if not server.started:
            raise ConfigError(
                f"the service with the state directory {settings.state_dir} did not start: see the log above"
            )


@contextlib.contextmanager
def _lock_state(settings: Settings) -> Iterator[None]:
    """Lock the state directory, so that only one service uses it.

    Raises ConfigError if another service has the lock.
    """
    with (settings.state_dir / SERVICE_LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(
                f"another `rayps serve` uses {settings.state_dir}: use that service, stop it, or give another "
                "directory with --state-dir",
                field="state_dir",
            ) from error
        yield


@contextlib.contextmanager
def _listen(settings: Settings) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((settings.host, settings.port))
            listener.listen(128)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise ConfigError(
                    f"port {settings.port} on {settings.host} is in use: give another with --port (0: any free port)",
                    field="port",
                ) from error
            raise ConfigError(
                f"cannot listen on {settings.host}:{settings.port}: {error.strerror or error}", field="host"
            ) from error
        yield listener
