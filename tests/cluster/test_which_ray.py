"""Which Ray a process is in: the decision for every combination of facts, and what becomes of it on real Rays."""

import contextlib
import itertools
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest
from folders import PYTHONPATH, TESTS
from rayps_client.errors import ClusterError

from rayps.cluster.which_ray import Move, Owner, busy, foreign, head, move, slow_start, token_refused, too_slow

FACTS = list(itertools.product(Owner, [False, True], [False, True], [False, True]))


@pytest.mark.parametrize(("owner", "named", "same", "busy"), FACTS)
def test_every_combination_of_facts_has_one_move(owner, named, same, busy):
    found = move(owner, named=named, same=same, busy=busy)
    if owner is Owner.NONE:
        assert found is (Move.JOIN if named else Move.START)
    else:
        stays = same or not named
        assert (found is Move.STAY) == stays  # never another Ray than the one that is named
        # what rayps does not own is never left, and what a run uses is never left
        assert (found is Move.LEAVE_AND_JOIN) == (not stays and owner is not Owner.FOREIGN and not busy)
        assert (found is Move.REFUSE_FOREIGN) == (not stays and owner is Owner.FOREIGN)
        assert (found is Move.REFUSE_BUSY) == (not stays and owner is not Owner.FOREIGN and busy)


@pytest.mark.parametrize("inside", [None, "in:1"])
@pytest.mark.parametrize("environment", [None, "", "env:2"])
@pytest.mark.parametrize("last", [None, "last:3"])
@pytest.mark.parametrize("found", [[], ["only:4"], ["last:3"], ["a:5", "b:6"], ["last:3", "b:6"]])
def test_what_auto_means(inside, environment, last, found):
    facts = {"inside": inside, "environment": environment, "last": last, "found": found}
    assert head("host:9", **facts) == "host:9"  # a named address is never anything else
    wanted = inside or environment or (last if last in found else found[0] if len(found) == 1 else None)
    if wanted is not None:
        assert head("auto", **facts) == wanted
        return
    with pytest.raises(ClusterError) as caught:
        head("auto", **facts)
    assert ("no Ray runs on this machine" in str(caught.value)) == (not found)
    assert all(each in str(caught.value) for each in [*found, "RAY_ADDRESS", "host:port"])


@pytest.mark.parametrize(
    "given",
    [
        "head",
        "head:",
        ":6379",
        "head:0",
        "head:65536",
        "head:x",
        "head:-1",
        "head:６３",
        "",
        "local",
        "ray://head:10001",
        "http://head:8265",
    ],
)
def test_what_is_no_address_is_refused_with_an_example(given):
    for name, refused in (("address", lambda: head(given)), ("RAY_ADDRESS", lambda: head("auto", environment=given))):
        if name == "RAY_ADDRESS" and not given:
            continue  # as if it were not set
        with pytest.raises(ClusterError) as caught:
            refused()
        assert f"{name} is {given!r}" in str(caught.value)
        assert "10.0.0.5:6379" in str(caught.value)


def test_ipv6_and_names_are_addresses():
    for given in ("[::1]:6379", "head.example.org:6379", "10.0.0.5:6379"):
        assert head(given) == given


def test_each_refusal_names_both_rays_and_a_way_out():
    for error in (foreign("b:2", "a:1"), busy("b:2", "a:1")):
        assert all(word in str(error) for word in ["'b:2'", "a:1", "another process"])
    assert "ray.shutdown()" in str(foreign("b:2", "a:1"))
    assert "refused the token" in str(token_refused("b:2", sent=True))
    assert "sends none" in str(token_refused("b:2", sent=False))


# ---------------------------------------------------------------------------------------------- on real Rays

on_ray = pytest.mark.ray


class Head:
    """A Ray of others, started by `ray start --head` in a process group of its own."""

    def __init__(self, token=None):
        self.temp = Path(tempfile.mkdtemp(prefix="h", dir="/tmp"))  # short: a socket's path has at most 107 characters
        from ray.util import get_node_ip_address  # loads ray, which most tests of this file do without

        own = get_node_ip_address()  # of this machine; Ray puts it in the place of 127.0.0.1 where there is another
        with socket.socket() as free:
            free.bind((own, 0))
            self.address = f"{own}:{free.getsockname()[1]}"
        self.env = environment(RAY_TMPDIR=str(self.temp), HOME=str(self.temp))
        if token is not None:
            self.env |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
        command = [
            sys.executable,
            "-m",
            "ray.scripts.scripts",
            "start",
            "--head",
            "--block",
            f"--port={self.address.rpartition(':')[2]}",
            f"--node-ip-address={own}",
            "--num-cpus=4",
            "--include-dashboard=false",
            "--disable-usage-stats",
            "--no-monitor",
            "--include-log-monitor=false",
            "--object-store-memory=80000000",
        ]
        with (self.temp / "log").open("wb") as log:
            self.process = subprocess.Popen(
                command, env=self.env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def wait(self):
        """Until a client gets its cluster's id, and a node is there."""
        script = "import ray, sys; ray.init(address=sys.argv[1], log_to_driver=False); assert ray.nodes()"
        for _ in range(30):
            done = subprocess.run(
                [sys.executable, "-c", script, self.address],
                env=self.env,
                capture_output=True,
                text=True,
                timeout=200,
                check=False,
            )
            if done.returncode == 0:
                return
            assert self.process.poll() is None, done.stderr
        raise AssertionError(done.stderr)

    def end(self):
        self.process.terminate()
        try:
            self.process.wait(30)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            shutil.rmtree(self.temp, ignore_errors=True)


def environment(**more):
    """What a process is given that has no Ray of its own: nothing of the shared cluster's Ray, and an empty home.

    A plain `ray.init()` leaves a token in the home, and turns authentication on for each later Ray that finds it there.
    """
    return (
        {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
        | {
            "PYTHONPATH": f"{PYTHONPATH}{os.pathsep}{TESTS.parent}",
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            "HOME": tempfile.mkdtemp(dir=os.environ.get("RAYPS_TEST_FOLDER")),
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        | more
    )


@pytest.mark.parametrize(
    ("text", "slow"),
    [
        ("The current node timed out during startup. This could happen because some of the raylet failed", True),
        ("Failed to start GCS.  Last 0 lines of error files:.", True),
        ("Timed out after 30 seconds while waiting for node to startup.", True),
        ("Head node temp_dir not found in NodeInfo, either GCS or head node's raylet may not have started", True),
        ("num_cpus must be an integer", False),
        ("AF_UNIX path length cannot exceed 107 bytes", False),
    ],
)
def test_only_a_start_that_took_too_long_is_tried_again(text, slow):
    assert too_slow(Exception(text)) == slow


def test_a_start_that_took_too_long_says_the_load_and_what_to_do():
    error = slow_start(61.2, 23.4, 2, "The current node timed out during startup.")
    assert all(word in str(error) for word in ("two tries (61 s)", "load", "23.4 with 2 processors", "address='auto'"))
    assert "ray start --head" in str(error) and error.data["load"] == 23.4


TOKEN = secrets.token_hex(32)


@pytest.fixture(scope="module")
def heads():
    """Two Rays of others: one without authentication, and one with a token."""
    pytest.importorskip("ray")
    found = [Head(token) for token in (None, TOKEN)]
    try:
        for each in found:
            each.wait()
        yield found
    finally:
        for each in found:
            each.end()


SCRIPT = """
import os, sys, threading, time
import ray
import rayps
from rayps_client.errors import ClusterError
from rayps.cluster.ray_cluster import RayCluster
from small_work import Small

PLAIN, GUARDED, TOKEN = sys.argv[1:]

class Where(Small):
    \"\"\"Its workers say in which Ray they are.\"\"\"
    def evaluate(self, model, batch):
        import ray
        return {"port": float(ray.get_runtime_context().gcs_address.rpartition(":")[2])}

def port(address=None, **options):
    result = rayps.train(Where(n=12), workers=1, steps=2, progress=False, address=address, timeout=300.0, **options)
    return int(result.metrics["port"])

def at(address):
    return int(address.rpartition(":")[2])

def joined(address):
    \"\"\"What a job does first: the Ray that this process is in afterwards.\"\"\"
    cluster = RayCluster.join(address)
    found = ray.get_runtime_context().gcs_address
    cluster.close()
    return found

def refused(call, *words):
    try:
        call()
    except ClusterError as error:
        assert all(word in str(error) for word in words), str(error)
        assert len(str(error).splitlines()) <= 3
        return
    raise AssertionError("it was not refused")
"""


def child(heads, body, **env):
    """Run a script in a process of its own, with the two Rays' addresses."""
    plain, guarded = heads
    script = SCRIPT + textwrap.dedent(body)
    done = subprocess.run(
        [sys.executable, "-c", script, plain.address, guarded.address, TOKEN],
        capture_output=True,
        env=environment(**env),
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


class TestOnRay:
    pytestmark = on_ray

    def test_one_process_trains_on_one_ray_after_another(self, heads):
        child(
            heads,
            """
            before = {key: value for key, value in os.environ.items() if key.startswith("RAY_")}
            first = port()
            assert first not in (at(PLAIN), at(GUARDED))
            assert not ray.is_initialized()
            assert before == {key: value for key, value in os.environ.items() if key.startswith("RAY_")}
            os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
            assert port(GUARDED) == at(GUARDED)
            assert os.environ.pop("RAY_AUTH_TOKEN") == TOKEN and os.environ.pop("RAY_AUTH_MODE") == "token"
            assert rayps.run(lambda: __import__("ray").get_runtime_context().gcs_address, workers=2,
                             address=PLAIN) == [PLAIN, PLAIN]
            assert port() not in (first, at(PLAIN), at(GUARDED))
        """,
        )

    def test_a_ray_that_rayps_started_is_ended_for_the_address(self, heads):
        child(
            heads,
            """
            from rayps.service.processes import list_descendants
            own = RayCluster.local(cpus=2)
            second = RayCluster.local(cpus=2)
            address = ray.get_runtime_context().gcs_address
            RayCluster.join(address).close()  # it is in that one already
            second.close()
            assert port() == at(address)  # another cluster object holds it open
            gang = own.reserve([{"cpu": 1.0}], 60)
            refused(lambda: RayCluster.join(PLAIN), PLAIN, address, "a run of this process uses")
            gang.release()
            assert joined(PLAIN) == PLAIN
            refused(own.total, "has left the Ray at " + address)
            own.close()
            deadline = time.monotonic() + 100
            while list_descendants(os.getpid()) and time.monotonic() < deadline:
                time.sleep(0.1)
            assert not list_descendants(os.getpid())
            before = RayCluster.join(PLAIN)
            refused(lambda: RayCluster.join("127.0.0.1:1"), "no Ray cluster answers", "127.0.0.1:1")
            assert ray.get_runtime_context().gcs_address == PLAIN  # not left for one that does not answer
            os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
            assert joined(GUARDED) == GUARDED  # one that rayps joined is left too
            refused(before.free, "has left the Ray")
        """,
        )

    def test_a_start_that_takes_too_long_is_tried_once_more_and_leaves_nothing(self):
        """The first Ray has its processes, but does not register in time."""
        script = """
            import os, ray
            from ray._private import services
            from rayps.cluster.ray_cluster import RayCluster
            from rayps_client.errors import ClusterError
            from rayps.service.processes import read_command, list_descendants

            def late(*given, **options):
                tries.append(options.get("_temp_dir"))
                services.get_node = real
                raise Exception("The current node timed out during startup. This could happen")

            def running():
                return sorted(found for pid in list_descendants(os.getpid())
                              if (found := os.path.basename(read_command(pid)[0])) in ("gcs_server", "raylet"))

            def named():
                return {key: value for key, value in os.environ.items() if key.startswith("RAY_")}

            real, tries, before = services.get_node, [], named()
            services.get_node = late
            cluster = RayCluster.local(cpus=1)
            assert cluster.total()["cpu"] == 1 and running() == ["gcs_server", "raylet"], running()
            assert len(tries) == 1
            cluster.close()
            assert named() == before
            tries, ray.init = [], late
            try:
                RayCluster.local(cpus=1)
            except ClusterError as error:
                assert "two tries" in str(error) and "timed out during startup" in str(error), error
                assert error.data["load"] > 0
            assert len(set(tries)) == 2 and not ray.is_initialized() and named() == before
            assert not [name for name in os.listdir(os.environ["TMPDIR"]) if name.startswith("rayps-")]
        """
        with tempfile.TemporaryDirectory(prefix="rs", dir="/tmp") as temp:  # Ray's sockets need a short path
            done = subprocess.run(
                [sys.executable, "-c", textwrap.dedent(script)],
                env={k: v for k, v in environment(TMPDIR=temp).items() if k != "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"},
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )
        assert done.returncode == 0, done.stdout + done.stderr

    def test_a_foreign_ray_is_never_left_and_named(self, heads):
        child(
            heads,
            """
            ray.init(address=GUARDED, log_to_driver=False)
            refused(lambda: port(PLAIN), PLAIN, GUARDED, "rayps did not start", "ray.shutdown()")
            refused(lambda: rayps.run(print, workers=1, address=PLAIN), PLAIN, GUARDED)
            for address in (GUARDED, GUARDED.replace("127.0.0.1", "localhost"), "auto"):
                RayCluster.join(address).close()  # it is in that one already
            RayCluster.local(cpus=1).close()
            assert port() == at(GUARDED)
            assert ray.is_initialized()  # and it is still the user's

            @ray.remote(num_cpus=0)
            def inside(address):
                return port(address)

            try:
                ray.get(inside.remote(PLAIN))
            except ray.exceptions.RayTaskError as error:
                assert "rayps did not start" in str(error)
            else:
                raise AssertionError("an actor left its Ray")
            ray.shutdown()
            del os.environ["RAY_AUTH_MODE"], os.environ["RAY_AUTH_TOKEN"]
            assert joined(PLAIN) == PLAIN
        """,
            RAY_AUTH_MODE="token",
            RAY_AUTH_TOKEN=TOKEN,
        )

    def test_auto_finds_a_ray(self, heads):
        plain, _ = heads
        child(
            heads,
            """
            own = RayCluster.local(cpus=2)  # a private Ray is not what auto means
            assert port('auto') == at(PLAIN)
            own.close()
            del os.environ["RAY_TMPDIR"]
            refused(lambda: port('auto'), 'several Rays run', PLAIN, GUARDED)
            os.environ["RAY_ADDRESS"] = "ray://127.0.0.1:10001"
            refused(lambda: port('auto'), 'RAY_ADDRESS is')
            os.environ["RAY_ADDRESS"] = PLAIN
            assert joined('auto') == PLAIN
        """,
            RAY_TMPDIR=plain.env["RAY_TMPDIR"],
        )

    def test_a_token_in_the_home_does_not_hinder_a_ray_without_tokens(self, heads, tmp_path):
        (tmp_path / ".ray").mkdir()
        (tmp_path / ".ray" / "auth_token").write_text(secrets.token_hex(32))  # as a plain `ray.init()` leaves it
        child(heads, "assert port(PLAIN) == at(PLAIN)", HOME=str(tmp_path))

    def test_a_refused_token_is_said(self, heads):
        child(
            heads,
            """
            for given, says in [
                ({}, "sends none"),
                ({"RAY_AUTH_TOKEN": TOKEN}, "sends none"),
                ({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}, "refused the token of this process"),
            ]:
                os.environ |= given
                refused(lambda: port(GUARDED), GUARDED, says, 'RAY_AUTH_TOKEN_PATH')
        """,
        )
