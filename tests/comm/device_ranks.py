"""Ranks of a ring with a device, each in its own process: CUDA IPC needs processes. No Ray."""

import threading
import time
from multiprocessing import get_context

import torch
from rayps_client.errors import RaypsError

from rayps.comm.link import Listener
from rayps.comm.ring import Ring
from rayps.comm.ring.device import device_ipc, device_staging
from rayps.tensors.device import CpuDevice, Device

SECRET = b"d" * 32
WAIT = 120.0


class Rank:
    """What a test's function gets: this rank's ring and device."""

    def __init__(self, kind, delayed):
        self.device = CpuDevice(delayed=True) if delayed else Device.of(kind)
        self.place = self.device.place
        self.ring = None

    @property
    def number(self):
        return self.ring.rank

    @property
    def size(self):
        return self.ring.size


class Ranks:
    """A group of processes. `kind` is cpu or cuda, `transport` one of the ring's for devices or None."""

    def __init__(self, n, kind, transport, *, timeout=30.0, delayed=False, small=True):
        context = get_context("spawn")
        self.pipes, self.processes = [], []
        self.alive = list(range(n))
        self.options = {"transport": transport, "timeout": timeout}
        self.generation = -1
        for i in range(n):
            pipe, theirs = context.Pipe()
            own = f"cuda:{i}" if kind == "cuda" and transport == "nccl" else kind
            process = context.Process(target=serve, args=(theirs, own, delayed, small), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(pipe)
            self.processes.append(process)
        try:
            self.form()
        except BaseException:
            for process in self.processes:
                process.kill()
            raise

    def form(self):
        """Form the ring of the next generation, between the processes that live."""
        self.generation += 1
        addresses = self.ask(("listen", self.generation))
        self.raising(self.ask(("form", addresses, self.options), numbered=True))

    def __call__(self, work, *args):
        """Run `work(rank, *args)` on all ranks at once; return the results, or raise the first error."""
        return self.raising(self.ask(("run", work, args)))

    def errors(self, work, *args):
        """Run as above; return (the error's class, its text, the peer that it names) or None of each rank."""
        found = self.ask(("run", work, args))
        return [None if good else value for good, value in found]

    def ask(self, message, numbered=False):
        for number, i in enumerate(self.alive):
            self.pipes[i].send((*message, number) if numbered else message)
        return [self.answer(i) for i in self.alive]

    def answer(self, i):
        assert self.pipes[i].poll(WAIT), f"rank {i} does not answer"
        return self.pipes[i].recv()

    def raising(self, found):
        for good, value in found:
            assert good, value
        return [value for _, value in found]

    def kill(self, i):
        self.processes[i].kill()
        self.processes[i].join()
        self.alive.remove(i)

    def close(self):
        for i in self.alive:
            self.pipes[i].send(("end",))
        for process in self.processes:
            process.join(20)
            process.kill()


def serve(pipe, kind, delayed, small):
    """The process of one rank."""
    torch.set_num_threads(1)
    if small:  # several parts, without large tensors
        device_staging.CHUNK_BYTES = 4096
        device_ipc.MOST_SLOT_BYTES = 1 << 16
    rank, listener = Rank(kind, delayed), None
    while True:
        try:
            what, *given = pipe.recv()
        except EOFError:
            return
        if what == "end":
            if rank.ring is not None:
                rank.ring.close()
            return
        if what == "listen":
            if rank.ring is not None:
                rank.ring.close()
            generation = given[0]
            listener = Listener("rank", SECRET, generation)
            pipe.send(listener.address)
            continue
        try:
            if what == "form":
                addresses, options, number = given
                with listener:
                    rank.ring = Ring.form(
                        number,
                        addresses,
                        listener,
                        secret=SECRET,
                        generation=generation,
                        timeout=options["timeout"],
                        streams=1,
                        prefer=options.get("prefer", "auto"),
                        device=rank.device,
                        device_transport=options["transport"],
                    )
                pipe.send((True, rank.ring.choices.get("device")))
            else:
                work, args = given
                pipe.send((True, work(rank, *args)))
        except RaypsError as error:
            pipe.send((False, (type(error).__name__, str(error), error.data.get("peer"))))
        except Exception as error:
            pipe.send((False, (type(error).__name__, str(error), None)))


def later(seconds, work):
    """Call `work` in another thread after some seconds."""

    def run():
        time.sleep(seconds)
        work()

    threading.Thread(target=run, daemon=True).start()
