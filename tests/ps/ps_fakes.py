"""Servers that hold nothing, over real links: they say what a real one would say, at once or when told to."""

import contextlib
import json
import os
import pickle
import threading
import time
from typing import ClassVar

from rayps_client.errors import LinkError

from rayps.comm.link import Message, connect
from rayps.ps.protocol.messages import Event, GroupMessage, Role

HOSTS = {}  # by name: the living ones, for the tests to look at


class FakeHost:
    """Takes the arguments of ServerActor."""

    machines: ClassVar = {}  # by server: its machine
    hold: ClassVar = set()  # kinds of events that are not said

    def __init__(self, server, group, secret, manager, *, gently=False):
        self.gently = gently
        self.name, self.secret, self.manager = server, secret, manager
        self.spaces, self.orders, self.branches, self.forgotten = {}, {}, [], []
        self.log = []
        self.load = {}
        self.mute = False
        self._link, self._closing, self._lock = None, threading.Event(), threading.RLock()
        self._connect()
        HOSTS[server] = self
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _connect(self):
        self._link = connect(self.manager, name=self.name, secret=self.secret, generation=0, timeout=0.5)
        holds = {}
        for (space, index), (role, generation, _) in self.orders.items():
            holds.setdefault(str(space), []).append([index, role, generation])
        self._say(
            GroupMessage.REGISTER,
            {
                "name": self.name,
                "address": f"{self.name}@127.0.0.1:1/",
                "pid": os.getpid(),
                "host": self.machines.get(self.name, "here"),
                "holds": holds,
            },
        )
        for (space, index), order in list(self.orders.items()):
            self._answer(space, index, order, None)

    def _say(self, kind, body, tag=0):
        with self._lock:
            self._link.send(Message(kind, tag=tag), json.dumps(body).encode(), timeout=60)

    def _run(self):
        beat = 0.0
        while not self._closing.is_set():
            try:
                with self._lock:
                    if not self.mute and time.monotonic() - beat > 0.05:
                        beat = time.monotonic()
                        self._say(GroupMessage.HEARTBEAT, self.load)
                    for message in [] if self.mute else self._link.feed():
                        self._take(message)
            except LinkError:
                if self._closing.is_set():
                    break
                with contextlib.suppress(LinkError):
                    self._link.close()
                    self._connect()
            time.sleep(0.002)
        self._link.close()

    def _take(self, message):
        if message.kind == GroupMessage.SPACE:
            self.spaces[message.a] = pickle.loads(bytes(message.payload))
        elif message.kind == GroupMessage.FORGET:
            self.forgotten.append(message.a)
            self.orders = {key: order for key, order in self.orders.items() if key[0] != message.a}
            self.spaces.pop(message.a, None)
        elif message.kind == GroupMessage.BRANCH:
            self.branches.append((message.a, message.b, json.loads(bytes(message.payload))["segments"]))
        elif message.kind == GroupMessage.ORDERS:
            body = json.loads(bytes(message.payload))
            assert body["space"] in self.spaces, "orders before the space"
            for index, role, generation, copies, _ in body["holdings"]:
                key, order = (body["space"], index), (role, generation, copies)
                self.log.append((*key, role, generation, tuple(copies)))
                before = self.orders.get(key)
                if role == Role.NONE:
                    self.orders.pop(key, None)
                    self.report(body["space"], message.tag, [Event.DROPPED, index, generation, ""])
                else:
                    self.orders[key] = order
                    self._answer(*key, order, before, message.tag)

    def _answer(self, space, index, order, before, tag=0):
        role, generation, copies = order
        if role == Role.PRIMARY:
            self.report(space, tag, [Event.READY, index, generation, ""])
        if role in (Role.PRIMARY, Role.LEAVING):
            self.report(space, tag, *[[Event.SYNCED, index, generation, copy] for copy in copies])
        if role == Role.LEAVING:
            self.report(space, tag, [Event.HANDED, index, generation, ""])

    def report(self, space, tag, *events):
        events = [event for event in events if event[0] not in self.hold]
        if events:
            self._say(GroupMessage.REPORT, {"space": space, "events": events}, tag)

    def say_all(self):
        """What was held back."""
        with self._lock:
            for (space, index), order in self.orders.items():
                self._answer(space, index, order, None)

    def close(self):
        self._closing.set()
        self._thread.join(60)
        HOSTS.pop(self.name, None)
