"""The ledger of an elastic group: each push adds 1 to slots of its own, whatever is killed at whichever moment.

Servers are processes and really die; their manager and the workers are threads, but where a worker is to die as well.
Every push has one slot in each segment, so that a push that is lost or doubled in any of them is seen.
"""

import contextlib
import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import covers
import pytest
import torch
from process_cluster import ProcessCluster
from ps_session_fakes import Handed, slot
from rayps_client.errors import ActorDied, PeerLost

from rayps.cluster.local import LocalCluster, until
from rayps.core.job.user_module import pack
from rayps.ps import group as elastic
from rayps.ps.protocol.rows import cut
from rayps.ps.protocol.space import Space
from rayps.ps.server_group import OwnSpace
from rayps.strategies.parameter_server import ParameterServer
from rayps.tensors.flat import Layout

SEGMENTS, PUSHES, SECONDS = 6, 40, 180.0


def plain(params):
    return torch.optim.SGD(params, lr=1.0)


class Ledger:
    """A group of processes, and a space of slots on it."""

    def __init__(self, servers=3, replicas=1, staleness=0, workers=2, arm=None, pushes=PUSHES):
        self.workers, self.pushes = workers, pushes
        self.local, self.hosts = LocalCluster(), ProcessCluster(arm)
        layout = Layout.of([("slots", torch.zeros(SEGMENTS * workers * pushes, dtype=torch.float64))])
        self.group = elastic.start(
            self.local,
            f"chaos-{os.urandom(4).hex()}",
            servers,
            replicas,
            detached=False,
            hosts=self.hosts,
            timeout=60.0,
        )
        space = Space(
            "slots",
            0,
            workers,
            ParameterServer(shards=servers, staleness=staleness),
            layout,
            cut(layout, SEGMENTS),
            pack(plain),
        )
        self.own = OwnSpace.open(
            self.group,
            space,
            torch.zeros(layout.size, dtype=torch.float64),
            SECONDS,
            private=False,
            marks=[0] * workers,
        )
        self.acknowledged = [0] * workers

    def gradient(self, rank, step):
        return slot(SEGMENTS, self.workers, self.pushes, rank, step)

    def work(self, rank, pause=0.002):
        """All pushes of a rank, whoever dies meanwhile."""
        server = self.own.server(rank)
        try:
            while server.step < self.pushes:
                step = server.step
                server.push(self.gradient(rank, step))
                if random.random() < 0.5:
                    server.settle()
                server.pull()
                self.acknowledged[rank] = step + 1
                time.sleep(pause * random.random())
            server.flush()
        finally:
            server.close()

    def run(self, chaos=None):
        """Work while `chaos` goes on, then the slots."""
        with ThreadPoolExecutor(self.workers + 1) as pool:
            works = [pool.submit(self.work, rank) for rank in range(self.workers)]
            more = pool.submit(chaos) if chaos is not None else None
            for each in works:
                each.result(2 * SECONDS)
            if more is not None:
                more.result(2 * SECONDS)
        return self.slots()

    def handed(self, rank):
        """What a worker's process gets: it cannot reach the manager's thread but over its links."""
        return Handed(self.own.space, self.group.contact(), self.group.join(self.own.space.number, rank))

    def slots(self):
        server = self.own.server(0)
        try:
            return server.read()
        finally:
            server.close()

    def alive(self):
        return [each for each in self.group.facts()["servers"] if each["state"] == "alive"]

    def kill(self, name=None):
        """kill -9 of a server, by default of any; returns when it is missed."""
        victim = random.choice([each for each in self.alive() if name in (None, each["name"])])
        deaths = self.group.facts()["counts"]["deaths"]
        os.kill(victim["pid"], signal.SIGKILL)
        assert until(lambda: self.group.facts()["counts"]["deaths"] > deaths, SECONDS)
        return victim["name"]

    def close(self):
        try:
            self.own.close()
            self.group.stop()
        finally:
            self.local.close()
            self.hosts.close()


@contextlib.contextmanager
def ledger(**options):
    found = Ledger(**options)
    try:
        yield found
    except BaseException:
        with contextlib.suppress(Exception):
            facts = found.group.facts()
            print(facts["counts"], facts["servers"], facts["moves"], sep="\n")
            print(*(f"{each['time']:.3f} {each['message']}" for each in facts["events"]), sep="\n")
        raise
    finally:
        found.close()


def ones(slots):
    return torch.equal(slots, torch.ones_like(slots))


def said(slots, own):
    wrong = (slots != 1).nonzero().flatten().tolist()
    rows = [
        (i // (own.workers * own.pushes), i // own.pushes % own.workers, i % own.pushes, slots[i].item())
        for i in wrong[:10]
    ]
    return f"{len(wrong)} slots, (segment, rank, step, value): {rows}; acknowledged {own.acknowledged}"


@pytest.mark.chaos
@covers.values
@pytest.mark.parametrize("staleness", [0, 2, None])
@pytest.mark.parametrize("workers", [2, 3])
def test_servers_that_die_at_random_moments(staleness, workers):
    with ledger(staleness=staleness, workers=workers) as own:
        kills = []

        def chaos():
            while len(kills) < 3 and min(own.acknowledged) < own.pushes:
                time.sleep(random.random() * 0.1)
                kills.append(own.kill())
                own.group.wait_settled(SECONDS)

        slots = own.run(chaos)
        assert ones(slots), said(slots, own)
        assert kills


@pytest.mark.chaos
@pytest.mark.parametrize("staleness", [0, None])
def test_servers_that_die_while_segments_move(staleness):
    with ledger(staleness=staleness, servers=2, pushes=60) as own:

        def chaos():
            for servers in (4, 3):
                own.group.resize(servers)
                time.sleep(random.random() * 0.2)
                own.kill()
                own.group.wait_settled(SECONDS)

        slots = own.run(chaos)
        assert ones(slots), said(slots, own)
        assert len(own.alive()) == 3


def test_without_replicas_what_is_lost_is_said():
    with ledger(servers=2, replicas=0, staleness=None, workers=1) as own:
        server = own.own.server(0)
        server.push(own.gradient(0, 0))
        server.pull()
        gone = [
            each["index"]
            for each in own.group.facts()["spaces"][0]["segments"]
            if each["primary"] == own.alive()[0]["name"]
        ]
        own.kill(own.alive()[0]["name"])
        server.push(own.gradient(0, 1))
        with pytest.raises(PeerLost, match="replicas") as caught:
            server.pull()
        assert sorted(caught.value.data["segments"]) == gone
        server.close()


HOST_PLACES = {
    "host: applied, not forwarded": 9,
    "host: forwarded, not copied": 9,
    "host: copied, not acknowledged": 9,
    "copy: applied, not acknowledged": 9,
    "host: state sent, not synced": 8,
    "host: leaving, not handed": 1,
}  # visits: those of the last two are while segments move


@pytest.mark.chaos
@covers.values
@pytest.mark.parametrize("staleness", [0, None])
@pytest.mark.parametrize("place", HOST_PLACES)
def test_a_server_that_dies_at_a_named_place(place, staleness):
    arm = {("ServerActor", 1): f"{place}={HOST_PLACES[place]}"}
    with ledger(arm=arm, staleness=staleness, servers=2, pushes=30) as own:

        def chaos():
            for servers in (3, 2) * 3:
                if not deaths():
                    own.group.resize(servers)
                    own.group.wait_settled(SECONDS)

        def deaths():
            return own.group.facts()["counts"]["deaths"]

        slots = own.run(chaos)
        assert deaths(), "nobody came by there"
        assert ones(slots), said(slots, own)


TALK_PLACES = [
    "session: between servers",
    "session: sent, not answered",
    "session: acknowledged",
    "session: a newer map",
    "session: lost, not sent again",
]


@pytest.mark.chaos
@covers.values
@pytest.mark.parametrize("staleness", [0, None])
@pytest.mark.parametrize("place", TALK_PLACES)
def test_a_worker_that_dies_at_a_named_place(place, staleness):
    with ledger(staleness=staleness, servers=2, pushes=30) as own:
        own.hosts.arm = {("Pusher", 1): f"{place}={1 if place in TALK_PLACES[3:] else 31}"}
        pushers = [
            own.hosts.spawn("ps_session_fakes:Pusher", own.handed(rank), rank, own.pushes, SEGMENTS)
            for rank in range(2)
        ]
        for each in pushers:
            each.call("joined").result(SECONDS)
        slow = place in TALK_PLACES[3:]  # what is come by when a server dies
        works = [each.call("work", 0.2 if slow else 0.0) for each in pushers]
        if slow:
            own.kill()
        else:
            own.group.resize(3)
        with pytest.raises(ActorDied):
            works[1].result(SECONDS)
        again = own.hosts.spawn("ps_session_fakes:Pusher", own.handed(1), 1, own.pushes, SEGMENTS)
        assert again.call("work").result(SECONDS) == own.pushes
        assert works[0].result(SECONDS) == own.pushes
        slots = own.slots()
        assert ones(slots), said(slots, own)
