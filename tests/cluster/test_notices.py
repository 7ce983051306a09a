"""Notices: which processes they concern, when they end, and the three ways on which they arrive."""

import json
import os
import signal
import subprocess
import sys
import textwrap

import pytest
from folders import FOLDERS, TESTS

from rayps.cluster import termination
from rayps.cluster.local import LocalCluster
from rayps.cluster.members import ActorHost
from rayps.cluster.notices import LINGER_SECONDS, Notice, StoredNotice, earliest

PLACE = ActorHost("alpha", 7, "10.0.0.1:5000", "n1")
ON_THREADS = ActorHost("alpha", 7, "127.0.0.1:5000")


@pytest.mark.parametrize(
    ("notice", "place", "concerns"),
    [
        (Notice("n1", "", 5.0, ""), PLACE, True),
        (Notice("n1", "beta", 5.0, ""), PLACE, True),  # node ids are known and equal: the host's name is not compared
        (Notice("n2", "alpha", 5.0, ""), PLACE, False),  # another node of the same host
        (Notice("n2", "", 5.0, ""), PLACE, False),
        (Notice("", "alpha", 5.0, ""), PLACE, True),
        (Notice("", "10.0.0.1", 5.0, ""), PLACE, True),
        (Notice("", "10.0.0.2", 5.0, ""), PLACE, False),
        (Notice("", "", 5.0, ""), PLACE, False),
        (Notice("n1", "", 5.0, "", pid=7), PLACE, True),
        (Notice("n1", "", 5.0, "", pid=8), PLACE, False),
        (Notice("n1", "alpha", 5.0, ""), ON_THREADS, True),  # the place has no node id
        (Notice("n1", "", 5.0, ""), ON_THREADS, False),
        (Notice("", "::1", 5.0, ""), ActorHost("alpha", 7, "[::1]:5000"), True),
        (Notice("", "10.0.0.1", 5.0, ""), ActorHost("alpha", 7, "worker-0@10.0.0.1:5000/rayps-1"), True),
    ],
)
def test_whom_a_notice_concerns(notice, place, concerns):
    assert notice.concerns(place.node, place.host, place.address, place.pid) is concerns
    assert (place.notice((notice,)) is notice) is concerns


def test_the_earliest_notice_counts():
    late, soon, open_ended = (Notice("n1", "", seconds, "") for seconds in (30.0, 3.0, None))
    assert PLACE.notice((late, open_ended, soon)) is soon
    assert PLACE.notice((open_ended,)) is open_ended
    assert earliest(()) is None


def test_a_stored_notice_is_the_same_and_has_fewer_seconds_left():
    notice = Notice("n1", "alpha", 30.0, "spot", pid=3)
    stored = StoredNotice.unpack(StoredNotice.of(notice, 100.0).pack())
    assert stored.at(100.0) == notice
    assert [stored.at(now).seconds for now in (110.0, 130.0, 500.0)] == [20.0, 0.0, 0.0]
    assert [stored.over(now) for now in (130.0, 130.0 + LINGER_SECONDS, 130.1 + LINGER_SECONDS)] == [False, False, True]
    without = StoredNotice.unpack(StoredNotice.of(Notice("", "alpha", None, ""), 100.0).pack())
    assert without.at(1e9).seconds is None and not without.over(1e9)


def test_a_cluster_of_threads_has_the_notices_that_were_announced():
    cluster = LocalCluster()
    assert cluster.notices() == () and cluster.node == ""
    cluster.announce(Notice("", "alpha", 30.0, "spot"))
    cluster.announce(Notice("", "alpha", None, "later"))  # replaces the first
    cluster.announce(Notice("", "alpha", 9.0, "one process", pid=4))
    assert [(one.reason, one.pid) for one in cluster.notices()] == [("later", None), ("one process", 4)]
    cluster.withdraw(Notice("", "alpha", None, ""))
    assert [one.pid for one in cluster.notices()] == [4]


@pytest.mark.parametrize(("text", "seconds"), [("", 10.0), ("0", 0.0), ("2.5", 2.5), ("soon", 10.0), ("-1", 10.0)])
def test_the_grace_is_a_variable(monkeypatch, text, seconds):
    monkeypatch.setenv(termination.VARIABLE, text)
    assert termination.grace_seconds() == seconds


def under_term(grace, signals, applies=True):
    """A process that announces its end on its output and gets SIGTERM; return its exit code and output."""
    code = f"""
        import sys, time
        from rayps.cluster.termination import TermHandler
        handler = TermHandler(lambda seconds: print("ends in", seconds, flush=True), {grace}, lambda: {applies})
        print(handler.install(), flush=True)
        time.sleep(60)
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)
    lines = [process.stdout.readline()]
    for number in range(signals):
        process.send_signal(signal.SIGTERM)
        if number + 1 < signals or grace < 10:
            lines.append(process.stdout.readline())
    rest, _ = process.communicate(timeout=60)
    return process.returncode, "".join(lines) + rest


@pytest.mark.parametrize(
    ("grace", "signals", "applies", "code", "output"),
    [
        (0.05, 1, True, 143, "True\nends in 0.05\n"),  # it ends after the grace
        (50.0, 2, True, 143, "True\nends in 50.0\n"),  # a second signal ends it at once
        (50.0, 1, False, 143, "True\n"),  # as a warm process that no job has taken
        (0, 1, True, -signal.SIGTERM, "False\n"),  # no grace: the handler of before
    ],
    ids=["grace", "second", "not-in-use", "none"],
)
def test_sigterm_is_announced_and_the_process_ends_after_its_grace(grace, signals, applies, code, output):
    assert under_term(grace, signals, applies) == (code, output)


ON_RAY = """
    import json, os, signal, subprocess, sys, time
    import ray
    from ray.cluster_utils import Cluster
    from rayps.cluster import ray_cluster
    from rayps.cluster.local import until
    from rayps.cluster.members import ActorHost
    from rayps.cluster.notices import Notice
    from rayps.cluster.ray_cluster import RayCluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    second = made.add_node(num_cpus=1)
    try:
        cluster = RayCluster.join(made.address)
        gang = cluster.reserve([{"cpu": 1.0}], 60, [cluster.node])
        names = cluster.host_names()
        reserved = gang.hosts()[0] != cluster.node, sorted(names) == sorted(cluster.hosts()), cluster.held()
        gang.release()
        actors = [cluster.spawn("test_notices:Placed", cpus=1) for _ in range(2)]
        places = [actor.call("place").result(60) for actor in actors]
        found = {"nodes": len({place.node for place in places}), "before": len(cluster.notices())}
        found["reserved"] = reserved
        other = next(place for place in places if place.node != cluster.node)
        here = next(place for place in places if place.node == cluster.node)

        def notice(place):
            return place.notice(cluster.notices())

        elsewhere = cluster.spawn("test_notices:Placed", here=True, avoid=(cluster.node,))
        stays = cluster.spawn("test_notices:Placed", here=True, avoid=(other.node,))
        places_of = [actor.call("place").result(60).node for actor in (elsewhere, stays)]
        found["avoids"] = places_of == [other.node, cluster.node]

        os.kill(here.pid, signal.SIGTERM)
        assert until(lambda: notice(here), 30), cluster.notices()
        found["term"] = [notice(here).reason, notice(here).seconds <= 20, notice(other) is None]
        found["lives"] = actors[places.index(here)].call("place").result(60) == here

        cluster.announce(Notice(other.node, "", 100.0, "spot"))
        assert until(lambda: notice(other), 30), cluster.notices()
        found["announced"] = [notice(other).reason, 90 < notice(other).seconds <= 100]
        # what an actor sees
        found["actor"] = actors[places.index(other)].call("notice").result(60)
        cluster.withdraw(Notice(other.node, "", None, ""))
        assert until(lambda: not notice(other), 30), cluster.notices()

        subprocess.run([os.path.join(os.path.dirname(sys.executable), "ray"), "drain-node", "--address", made.address,
            "--node-id", other.node, "--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot",
            "--deadline-remaining-seconds", "50"], check=True, capture_output=True)
        assert until(lambda: notice(other), 30), cluster.notices()
        found["drains"] = [notice(other).reason, 20 < notice(other).seconds <= 50, notice(other).host == other.host]

        ray_cluster._global_state = None  # as in a Ray without the call
        cluster.announce(Notice(other.node, "", 100.0, "spot"))
        assert until(lambda: [one.reason for one in cluster.notices() if one.node == other.node] == ["spot"], 30)
        print(json.dumps(found))
    finally:
        ray.shutdown()
        made.shutdown()
"""


class Placed:
    """An actor of the test on Ray."""

    def place(self):
        return ActorHost.own("127.0.0.1:1")

    def notice(self):
        from rayps.cluster.local import surrounding, until

        until(lambda: self.place().notice(surrounding().notices()), 30)
        return self.place().notice(surrounding().notices()).reason


@pytest.mark.ray
def test_ray_announces_drains_terminations_and_what_others_announced():
    paths = os.pathsep.join([*FOLDERS, str(TESTS.parent)])
    environment = {**os.environ, "PYTHONPATH": paths, "RAY_AUTH_MODE": "disabled", termination.VARIABLE: "20"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(ON_RAY)], capture_output=True, text=True, timeout=180, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr.count("does not list its draining nodes") == 1, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "nodes": 2,
        "reserved": [True, True, None],
        "before": 0,
        "avoids": True,
        "term": [termination.REASON, True, True],
        "lives": True,
        "announced": ["spot", True],
        "actor": "spot",
        "drains": ["Ray drains the node", True, True],
    }
