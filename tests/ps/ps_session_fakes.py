"""A server group that is not one: real links, threads that answer what a test wants, and segments that add up pushes.

What the servers of a real group share by copies, these share by being one process. What a server has only
`filed` dies with it.
"""

import contextlib
import json
import threading
import time

import numpy as np
import torch
from rayps_client.errors import LinkError, PeerTimeout

from rayps.comm.link import Listener, Message
from rayps.ps.client.client import GroupServer
from rayps.ps.client.session import Session
from rayps.ps.protocol.messages import GroupMessage, SegmentPayload, make_refusal, pack, pack_numbers, unpack
from rayps.ps.protocol.pieces import Extent
from rayps.ps.protocol.segment_map import SegmentHolders, SpaceMap
from rayps.ps.protocol.space import Space
from rayps.strategies.parameter_server import ParameterServer
from rayps.tensors.flat import Layout

SECRET = b"fake" * 8


def space_of(size, segments, staleness=None, workers=1):
    layout = Layout.of([("w", torch.zeros(size, dtype=torch.float64))])
    cuts = tuple((size * i // segments, size * (i + 1) // segments) for i in range(segments))
    return Space("job", 7, workers, ParameterServer(staleness=staleness), layout, cuts)


class Loop:
    """A thread with a listener; `handle(link, message)` answers."""

    def __init__(self, name):
        self.name, self.links, self.closing = name, [], False
        self.listener = Listener(name, SECRET)
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self):
        while not self.closing:
            while (link := self.listener.accept_ready()) is not None:
                self.links.append(link)
            for link in list(self.links):
                try:
                    link.flush()
                    for message in link.feed():
                        self.handle(link, message)
                except LinkError:
                    link.close()
                    self.links.remove(link)
            with contextlib.suppress(LinkError):  # whoever waited may have left
                self.turn()
            time.sleep(0.001)
        for link in self.links:
            link.close()
        self.listener.close()

    def turn(self):
        pass

    def close(self):
        self.closing = True
        self.thread.join(60)


class Manager(Loop):
    def __init__(self, group):
        self.group, self.watching, self.told = group, [], 0
        super().__init__("manager")

    def handle(self, link, message):
        assert message.kind == GroupMessage.WATCH and message.a == 7
        self.watching.append(link)
        self.tell(link)

    def tell(self, link):
        link.queue(Message(GroupMessage.MAP), json.dumps(self.group.map.to_json()).encode())

    def turn(self):
        if self.told != self.group.map.version:
            self.told = self.group.map.version
            for link in self.watching:
                if not link.closed:
                    self.tell(link)


class Server(Loop):
    def __init__(self, name, group):
        self.group, self.ranks, self.parked, self.filed = group, {}, [], {}
        self.mute = False
        super().__init__(name)

    def handle(self, link, message):
        group = self.group
        with group.lock:
            if self.mute:
                return
            if message.kind == GroupMessage.JOIN:
                self.ranks[link] = message.b
                held = [
                    i
                    for i, each in enumerate(group.map.holders)
                    if each.primary == self.name and i not in group.unheard
                ]
                pairs = [n for i in held for n in (i, group.marks[i].get(message.b, 0))]
                link.queue(Message(GroupMessage.JOINED, message.tag), pack_numbers(pairs))
                return
            pieces = unpack(message.payload)
            stale = [p.segment for p in pieces if not self.holds(p)]
            group.heard.append((self.name, GroupMessage(message.kind), message.a, [p.segment for p in pieces]))
            if stale:
                link.queue(Message(GroupMessage.STALE, message.tag), pack_numbers(stale))
            else:
                self.serve(link, message, pieces)

    def holds(self, piece):
        holding = self.group.map.holders[piece.segment]
        return (holding.primary, holding.generation) == (self.name, piece.generation)

    def serve(self, link, message, pieces):
        group, rank = self.group, self.ranks[link]
        mark = 0
        if message.kind in (GroupMessage.PUSH, GroupMessage.PUSH_PULL):
            for segment, _, data in pieces:
                if group.files:
                    self.filed[segment, rank, message.a] = np.frombuffer(data, np.float64).copy()
                elif group.marks[segment].get(rank, 0) <= message.a:
                    group.marks[segment][rank] = message.a + 1
                    if len(data):
                        said = group.extent(segment).read_push(data)
                        group.values[segment][slice(*said.area)] += message.weight * said.value.numpy()
            mark = 0 if group.files else message.a + 1
            pieces = [SegmentPayload(s, g, b"") for s, g, _ in pieces]
        if message.kind in (GroupMessage.PUSH, GroupMessage.FLUSH):
            link.queue(Message(GroupMessage.ACK, message.tag, weight=mark))
        elif group.parks and message.kind != GroupMessage.READ:
            self.parked.append((link, message, pieces, time.monotonic() + message.b / 1000))
        else:
            self.answer(link, message, pieces, mark)

    def answer(self, link, message, pieces, mark=0):
        values, extent = self.group.values, self.group.extent
        found = [SegmentPayload(s, g, values[s][slice(*extent(s).read_pull(d))].tobytes()) for s, g, d in pieces]
        link.queue(Message(GroupMessage.VALUE, message.tag, 3, 1, mark), pack(found))

    def turn(self):
        with self.group.lock:
            parked, self.parked = self.parked, []
            for link, message, pieces, until in parked:
                if not all(map(self.holds, pieces)):
                    link.queue(Message(GroupMessage.STALE, message.tag), pack_numbers(p.segment for p in pieces))
                elif not self.group.parks:
                    self.answer(link, message, pieces)
                elif time.monotonic() > until:
                    said, body = make_refusal(message.tag, PeerTimeout("waits for rank 3", peer=self.name))
                    said.kind = GroupMessage.ERROR
                    link.queue(said, body)
                else:
                    self.parked.append((link, message, pieces, until))


class FakeGroup:
    def __init__(self, space, servers):
        self.space, self.lock = space, threading.RLock()
        self.values = [np.zeros(b - a) for a, b in space.cuts]
        self.marks = [{} for _ in space.cuts]
        self.heard, self.files, self.parks = [], False, False
        self.unheard = set()  # segments that their new holder has no orders for yet
        self.map = SpaceMap(0, tuple(SegmentHolders(None) for _ in space.cuts), {})
        self.servers = {}
        for i in range(servers):
            self.add(f"s{i}")
        for i in range(len(space.cuts)):
            self.give(i, f"s{i % servers}")
        self.manager = Manager(self)

    def extent(self, segment):
        return Extent(self.space.layout, *self.space.cuts[segment])

    def add(self, name):
        self.servers[name] = Server(name, self)
        with self.lock:
            where = self.map.addresses | {name: self.servers[name].listener.address}
            self.map = SpaceMap(self.map.version + 1, self.map.holders, where)

    def give(self, segment, server):
        """Another primary, in another generation."""
        with self.lock:
            held = list(self.map.holders)
            held[segment] = SegmentHolders(server, (), held[segment].generation + 1)
            self.map = SpaceMap(self.map.version + 1, tuple(held), self.map.addresses)

    def kill(self, name):
        self.servers[name].close()

    def contact(self):
        return {"address": self.manager.listener.address, "secret": SECRET}

    def value(self):
        with self.lock:
            return torch.from_numpy(np.concatenate(self.values))

    def close(self):
        self.manager.close()
        for server in self.servers.values():
            server.close()


class Handed:
    """A space and a way to its manager, for another process; `server` as an OwnSpace gives it."""

    def __init__(self, space, contact, incarnation):
        self.space, self.contact, self.incarnation = space, contact, incarnation

    def server(self, rank):
        return GroupServer(Session(self.contact, self.space, rank, incarnation=self.incarnation, timeout=60.0))


class Pusher:
    """An actor that does all pushes of a rank, for tests that kill it; see test_ps_chaos."""

    def __init__(self, own, rank, pushes, segments):
        self.server = own.server(rank)
        self.rank, self.workers, self.pushes, self.segments = rank, own.space.workers, pushes, segments

    def joined(self):
        """Answers once it has joined."""

    def work(self, pause=0.0):
        """How many are acknowledged, at the end."""
        server = self.server
        while server.step < self.pushes:
            server.push(slot(self.segments, self.workers, self.pushes, self.rank, server.step))
            if server.step % 2:
                server.settle()
            server.pull()
            time.sleep(pause)
        server.flush()
        server.close()
        return server.step


def slot(segments, workers, pushes, rank, step):
    """A gradient that adds 1 to one slot in each segment, after the servers have divided it by the workers."""
    found = torch.zeros(segments, workers, pushes, dtype=torch.float64)
    found[:, rank, step] = -float(workers)
    return found.reshape(-1)
