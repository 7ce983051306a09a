"""The service's child process that joins Ray's cluster and runs the requests of `ray_process.ClusterProcess`.

    python -P -m rayps.service.local_ray.ray_child --pipe FD --cluster MODULE:CLASS --address HOST:PORT

When Ray's gcs or raylet is lost, Ray's client can hang forever in C++ or end its process. Then only this child process
is affected, not the service. Each request runs in its own thread. When the service ends, the pipe closes and the child
ends. The child also ends when it gets no request for `--dead-man` seconds. A timer of `faulthandler`, which needs no
interpreter lock, then writes the stack of every thread and exits.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import pickle
import signal
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any

from rayps_client.errors import ClusterError, RaypsError
from rayps_client.values import Keywords

from rayps.cluster.local import FIRST_PROTOCOL, PROTOCOL, Actors, Bundle, resolve
from rayps.cluster.notices import Notice
from rayps.cluster.warm import WarmState

CALL_SECONDS = 60.0  # seconds that an actor's method may take; the service's own deadline is shorter
_DEAD_MAN = 600.0  # seconds without a request after which this process exits


class Child:
    """Run the requests that arrive on a pipe. A request is (number, operation, arguments, named arguments)."""

    def __init__(self, pipe: Connection, cluster: Actors, dead_man: float = _DEAD_MAN) -> None:
        self._pipe = pipe
        self._dead_man = dead_man
        self._cluster = cluster
        self._sending = threading.Lock()

    def serve(self) -> None:
        """Run requests until the pipe closes."""
        while True:
            faulthandler.dump_traceback_later(self._dead_man, exit=True)
            try:
                request = pickle.loads(self._pipe.recv_bytes())
            except (EOFError, OSError):
                return
            threading.Thread(target=self._answer, args=request, daemon=True).start()

    def answer(self, number: int, value: object, error: Exception | None) -> None:
        """Send the answer of request `number`."""
        try:
            data = pickle.dumps((number, value, error))
        except Exception as fault:  # an actor may return or raise objects that cannot be pickled
            data = pickle.dumps((number, None, ClusterError(f"{error or value!r:.500} cannot be sent: {fault}")))
        with self._sending:
            self._pipe.send_bytes(data)

    def _answer(self, number: int, operation: str, args: tuple[object, ...], named: Keywords) -> None:
        try:
            value, error = getattr(self, f"do_{operation}")(*args, **named), None
        except Exception as raised:  # sent to the service
            value, error = None, raised
        self.answer(number, value, error)

    def do_spawn(self, target: str, *args: Any, **options: Any) -> None:
        """Start an actor."""
        self._cluster.spawn(target, *args, **options)

    def do_find(self, name: str) -> bool:
        """Return whether an actor of that name is alive."""
        return self._cluster.find(name) is not None

    def do_kill(self, name: str) -> None:
        """Kill an actor if it is alive."""
        handle = self._cluster.find(name)
        if handle is not None:
            self._cluster.kill(handle)

    def do_call(self, name: str, method: str, *args: Any) -> Any:
        """Call an actor's method and return its result."""
        handle = self._cluster.find(name)
        if handle is None:
            raise ClusterError(f"there is no actor {name}")
        return handle.call(method, *args).result(timeout=CALL_SECONDS)

    def do_keep_warm(self, wanted: int) -> WarmState:
        """Keep processes that wait for an actor, and return their state."""
        return self._cluster.keep_warm(wanted)

    def do_free(self) -> Bundle:
        """Return the free resources."""
        return self._cluster.free()

    def do_total(self) -> Bundle:
        """Return all resources."""
        return self._cluster.total()

    def do_hosts(self, free: bool) -> dict[str, Bundle]:
        """Return a dict from host to its resources: the free ones with `free`, else all."""
        return self._cluster.hosts(free)

    def do_notices(self) -> tuple[Notice, ...]:
        """Return the notices that hosts or processes will end."""
        return self._cluster.notices()

    def do_announce(self, notice: Notice) -> None:
        """Add a notice for every process of the cluster."""
        self._cluster.announce(notice)

    def do_withdraw(self, notice: Notice) -> None:
        """Remove an announced notice."""
        self._cluster.withdraw(notice)

    def do_close(self) -> None:
        """Disconnect from the cluster."""
        self._cluster.close()


def main() -> None:
    """Join the cluster and serve requests. Answer number 0 tells the service whether the cluster was joined."""
    parser = argparse.ArgumentParser(description="call Ray for a rayps service")
    parser.add_argument("--pipe", type=int, required=True)
    parser.add_argument("--cluster", required=True)
    parser.add_argument("--address", required=True)
    parser.add_argument("--protocol", type=int, default=FIRST_PROTOCOL)
    parser.add_argument("--dead-man", type=float, default=_DEAD_MAN)
    given = parser.parse_args()
    if given.protocol != PROTOCOL:  # no answer is sent: the service might not be able to read it
        parser.error(
            f"the running service has protocol {given.protocol}, and the rayps that is installed now has {PROTOCOL}: "
            "restart `rayps serve`"
        )
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    faulthandler.dump_traceback_later(given.dead_man, exit=True)
    sys.argv = ["rayps-ray"]  # Ray adds the folder of this name to the workers' path
    pipe = Connection(given.pipe)
    try:
        kind: Any = resolve(given.cluster)
        child = Child(pipe, kind.join(given.address), given.dead_man)
    except (RaypsError, OSError, RuntimeError) as error:
        pipe.send_bytes(pickle.dumps((0, None, error)))
        os._exit(1)
    # a whole host may get SIGTERM; the service then ends this process. After the join, which sets Ray's own handler
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child.answer(0, None, None)
    child.serve()
    os._exit(0)  # the service has ended; Ray's own shutdown may hang


if __name__ == "__main__":
    main()
