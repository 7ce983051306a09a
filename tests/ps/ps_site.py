"""A scripted manager and raw workers, for tests of an elastic group's servers: in one process, over real links."""

import json
import pickle
import queue
import threading
import time

import cloudpickle
import numpy as np
import torch
from torch.optim import SGD

from rayps.cluster.local import until
from rayps.comm.link import Listener, Message, connect
from rayps.core.partition import cut_slices
from rayps.ps.protocol.messages import JOIN_PAYLOAD, GroupMessage, SegmentPayload, pack, read_numbers, unpack
from rayps.ps.protocol.space import Space
from rayps.ps.server.dense_segment import state_of
from rayps.ps.server.server import GroupServerLoop
from rayps.strategies.parameter_server import ParameterServer
from rayps.tensors.flat import Layout

SECRET = b"s" * 32
SECONDS = 60.0


def plain_sgd(params):
    return SGD(params, lr=0.1)


def space(size=12, segments=3, workers=2, staleness=None, number=1, factory=plain_sgd, strategy=None, **more):
    layout = Layout.of([("a", torch.empty(size // 2)), ("b", torch.empty(size - size // 2))])
    cuts = tuple((cut.start, cut.stop) for cut in cut_slices(size, segments))
    strategy = strategy or ParameterServer(staleness=staleness)
    return Space(f"space-{number}", number, workers, strategy, layout, cuts, cloudpickle.dumps(factory), **more)


class Manager:
    """Says what it is told to say, and keeps what it hears."""

    def __init__(self):
        self.listener = Listener("manager", SECRET)
        self.links, self.facts, self.loads = {}, [], {}
        self._todo = queue.SimpleQueue()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        strangers = []
        while not self._closing.is_set():
            time.sleep(0.001)
            while (link := self.listener.accept_ready()) is not None:
                strangers.append(link)
            for link in [*strangers, *self.links.values()]:
                try:
                    for message in link.feed():
                        self._hear(link, message)
                except Exception:
                    strangers = [other for other in strangers if other is not link]
                    self.links = {name: other for name, other in self.links.items() if other is not link}
            while not self._todo.empty():
                name, message, payload = self._todo.get()
                if name in self.links:
                    self.links[name].queue(message, payload)
        for link in [*strangers, *self.links.values()]:
            link.close()

    def _hear(self, link, message):
        body = json.loads(bytes(message.payload))
        if message.kind == GroupMessage.REGISTER:
            self.links[body["name"]] = link
            link.queue(Message(GroupMessage.WELCOME), json.dumps({"heartbeat": 0.05}).encode())
        elif message.kind == GroupMessage.HEARTBEAT:
            self.loads[link.peer] = body
        elif message.kind == GroupMessage.REPORT:
            self.facts += [
                (link.peer, what, body["space"], segment, generation, name)
                for what, segment, generation, name in body["events"]
            ]

    def tell(self, name, kind, body, a=0, b=0):
        payload = body if isinstance(body, bytes) else json.dumps(body).encode()
        self._todo.put((name, Message(kind, 0, a, b), payload))

    def orders(self, name, number, rows):
        self.tell(name, GroupMessage.ORDERS, {"space": number, "holdings": [list(row) for row in rows]})

    def heard(self, *fact, seconds=SECONDS):
        """Wait for a report (server, event, space, segment, generation, name)."""
        assert until(lambda: fact in self.facts, seconds), f"{fact} not in {self.facts}"

    def close(self):
        self._closing.set()
        self._thread.join()
        self.listener.close()


class Site:
    """A manager and some servers."""

    def __init__(self, *names):
        self.manager = Manager()
        self.hosts, self.listeners, self.guests = {}, {}, []
        for name in names:
            self.add(name)

    def add(self, name):
        self.listeners[name] = Listener(name, SECRET)
        self.hosts[name] = GroupServerLoop(name, self.listeners[name], self.manager.listener.address, SECRET)
        assert until(lambda: name in self.manager.links, SECONDS)
        return self.hosts[name]

    def address(self, name):
        return self.listeners[name].address

    def copies(self, *names):
        return {name: self.address(name) for name in names}

    def open(self, one, primaries, generation=1, copies=None):
        """Tell everyone of a space; `primaries[i]` is the server of segment i, `copies[i]` the names of its copies."""
        copies = copies or [()] * len(primaries)
        for name in self.hosts:
            self.manager.tell(name, GroupMessage.SPACE, pickle.dumps(one))
            rows = []
            for i, (primary, others) in enumerate(zip(primaries, copies, strict=True)):
                if primary == name:
                    rows.append([i, "primary", generation, self.copies(*others)])
                elif name in others:
                    rows.append([i, "copy", generation, {}])
            self.manager.orders(name, one.number, rows)
        for i, (primary, others) in enumerate(zip(primaries, copies, strict=True)):
            self.manager.heard(primary, "ready", one.number, i, generation, "")
            for other in others:
                self.manager.heard(primary, "synced", one.number, i, generation, other)

    def guest(self, name, number=1, rank=0, incarnation=0, join=True):
        guest = Raw(self.address(name), number, rank, incarnation)
        self.guests.append(guest)
        if join:
            assert guest.join().kind == GroupMessage.JOINED
        return guest

    def load(self, one, primaries, vector, generation=1):
        for name in sorted(set(primaries)):
            opener = self.guest(name, one.number, rank=-1)
            pieces = [
                SegmentPayload(i, generation, state_of(vector[lo:hi], one.layout, lo, marks=[0] * one.workers))
                for i, (lo, hi) in enumerate(one.cuts)
                if primaries[i] == name
            ]
            assert opener.ask(GroupMessage.LOAD, pieces).kind == GroupMessage.ACK

    def segment(self, name, index, number=1):
        """What a server holds, read from this thread: only while nothing is under way."""
        return self.hosts[name]._assignments.spaces[number].by_index[index].segment

    def kill(self, name):
        """As seen from outside: all links end at once."""
        host = self.hosts.pop(name)
        host.close()
        self.listeners[name].close()

    def close(self):
        for guest in self.guests:
            guest.close()
        for name in list(self.hosts):
            self.kill(name)
        self.manager.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


class Raw:
    """A worker that says exactly what it is told to say."""

    def __init__(self, address, number, rank, incarnation=0):
        self.link = connect(address, name=f"worker-{rank}", secret=SECRET, generation=0, timeout=SECONDS)
        self.number, self.rank, self.incarnation, self.tag = number, rank, incarnation, 0
        self.early = {}

    def say(self, kind, pieces=(), a=0, weight=0.0, b=0, payload=None):
        self.tag += 1
        self.link.send(
            Message(kind, self.tag, a, b, weight), pack(pieces) if payload is None else payload, timeout=SECONDS
        )
        return self.tag

    def hear(self, tag, seconds=SECONDS):
        while tag not in self.early:
            message = self.link.recv(seconds)
            self.early[message.tag] = message
        return self.early.pop(tag)

    def silent(self, seconds=0.1):
        """Whether nothing arrives."""
        try:
            message = self.link.recv(seconds)
        except Exception:
            return True
        self.early[message.tag] = message
        return False

    def ask(self, kind, pieces=(), a=0, weight=0.0, b=0):
        return self.hear(self.say(kind, pieces, a, weight, b))

    def join(self, patience=None):
        payload = b"" if patience is None else JOIN_PAYLOAD.pack(patience, -1)
        answer = self.hear(
            self.say(GroupMessage.JOIN, a=self.number, b=self.rank, weight=self.incarnation, payload=payload)
        )
        if answer.kind == GroupMessage.JOINED:
            pairs = read_numbers(answer.payload)
            self.marks = dict(zip(pairs[::2], pairs[1::2], strict=True))
        return answer

    def close(self):
        self.link.close()


def values(answer):
    """By segment: the elements of a VALUE's pieces."""
    return {p.segment: np.frombuffer(bytes(p.data), np.float32) for p in unpack(answer.payload)}


def error(answer):
    assert answer.kind == GroupMessage.ERROR
    return json.loads(bytes(answer.payload))
