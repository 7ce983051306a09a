"""A cluster of plain processes of this host, for tests that kill: no Ray, and a start takes milliseconds.

`arm` names deadly places (see `rayps.core.failpoint`) for the n-th actor of a class: {("ShardActor", 1): "place=3"}.
"""

import contextlib
import itertools
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor

from rayps_client.errors import ActorDied

from rayps.cluster.local import resolve
from rayps.core import failpoint

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["rayps.runtime.driver.workload_job", "small_work"])


def start_process(function, *args, failpoints=""):
    """Start a process that calls a function, in this process's environment and with these places armed.

    It is a fork of a process that has loaded torch and rayps: a new interpreter would take seconds to do so.
    """
    process = CONTEXT.Process(target=_run, args=(dict(os.environ), list(sys.path), failpoints, function, args))
    process.start()
    return process


def _run(environment, path, failpoints, function, args):
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = path
    failpoint.arm(failpoints)
    function(*args)


class ProcessCluster:
    """Actors as processes; see rayps.cluster.local.Cluster."""

    node = ""

    def __init__(self, arm=None, gpus=0.0):
        self.arm = dict(arm or {})
        self.gpus = gpus
        self.handles = []
        self._counts = {}

    def spawn(
        self,
        target,
        *args,
        name=None,
        cpus=0,
        gpus=0,
        detached=False,
        here=False,
        gang=None,
        index=None,
        restarts=0,
        warm=False,
        node=None,
        **more,
    ):
        kind = target.partition(":")[2]
        number = self._counts.get(kind, 0)
        self._counts[kind] = number + 1
        handle = _Handle(f"{kind}-{number}", target, args, more, self.arm.get((kind, number), ""))
        self.handles.append(handle)
        return handle

    def find(self, name):
        return next((handle for handle in self.handles if handle.name == name and not handle.gone.is_set()), None)

    def share(self, value):
        return value

    def total(self):
        return {"cpu": 64.0, "gpu": self.gpus}

    free = total

    def last_output(self, handle):
        return ""

    def held(self):
        return None

    def host_names(self):
        return {"here": ()}

    def reserve(self, bundles, timeout, avoid=()):
        return None if not bundles else _Gang(bundles)

    def hosts(self, free=True):
        return {"here": self.total()}

    node = ""

    def notices(self):
        return ()

    def kill(self, handle):
        handle.kill()

    def close(self):
        for handle in self.handles:
            handle.kill()


class _Gang:
    def __init__(self, bundles):
        self._bundles = bundles

    def hosts(self):
        return ["here"] * len(self._bundles)

    def release(self):
        pass


class _Handle:
    def __init__(self, name, target, args, more, armed):
        self.name, self.gone = name, threading.Event()
        self._ids, self._waiting, self._lock = itertools.count(), {}, threading.Lock()
        self._pipe, theirs = CONTEXT.Pipe()
        self._process = CONTEXT.Process(target=_serve, args=(theirs, list(sys.path), armed), daemon=True)
        self._process.start()
        theirs.close()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._made = self._ask((target, args, more))

    def call(self, method, *args, **more):
        return self._ask((method, args, more))

    def _ask(self, what):
        reply = Future()
        with self._lock:
            number = next(self._ids)
            self._waiting[number] = reply
            try:
                self._pipe.send_bytes(pickle.dumps((number, *what)))
            except OSError:
                self._fail(self._waiting.pop(number))
            if self.gone.is_set() and self._waiting.pop(number, None):
                self._fail(reply)
        return reply

    def _read(self):
        with contextlib.suppress(EOFError, OSError):
            while True:
                number, value, error = pickle.loads(self._pipe.recv_bytes())
                with self._lock:
                    reply = self._waiting.pop(number, None)
                if reply is not None:
                    reply.set_exception(error) if error is not None else reply.set_result(value)
        with self._lock:
            self.gone.set()
            waiting, self._waiting = self._waiting, {}
        for reply in waiting.values():
            self._fail(reply)

    def _fail(self, reply):
        if not reply.done():
            reply.set_exception(ActorDied(f"actor {self.name} is dead", actor=self.name, reason="its process ended"))

    def kill(self):
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGKILL)
        self._process.join(60)
        self._reader.join(60)
        self._pipe.close()


def _serve(pipe, path, armed):
    sys.path[:] = path
    failpoint.arm(armed)
    lock, pool, actors = threading.Lock(), ThreadPoolExecutor(8), []

    def answer(number, work):
        try:
            value, error = work(), None
        except Exception as raised:
            value, error = None, raised
        except BaseException:  # as on Ray
            os._exit(3)
        with lock, contextlib.suppress(OSError):
            pipe.send_bytes(pickle.dumps((number, value, error)))

    with contextlib.suppress(EOFError, OSError):
        while True:
            number, what, args, more = pickle.loads(pipe.recv_bytes())
            if not actors:
                actors.append(resolve(what)(*args, **more))
                answer(number, lambda: None)
            else:
                pool.submit(answer, number, lambda w=what, a=args, m=more: getattr(actors[0], w)(*a, **m))
    os._exit(0)  # whoever made the cluster is gone
