"""A service on one host and workers on another that share no folder: network and mount namespaces, and a real Ray.

Host 0 has the service and the head of Ray, without CPUs; host 1 runs the workers; host 2 is the user's machine. Each
has a `/tmp` and a `/dev/shm` of its own, so that the project is on host 2 only and the state directory on host 0 only.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from code_work import project, wheel
from conftest import missing
from rayps_client.errors import ClusterError

from rayps.bench.netns import Hosts

pytestmark = pytest.mark.ray
ROOT = Path(__file__).resolve().parents[2]
RAY = str(Path(sys.executable).with_name("ray"))
# The hosts have the programs in common. Those below /tmp are mounted below /mnt first, and from there in the new /tmp.
_PROGRAMS = {f"/mnt/{n}": path for n, path in enumerate((Path(sys.prefix), ROOT)) if path.is_relative_to("/tmp")}
_KEEP = "mount -t tmpfs tmpfs /mnt && " + "".join(
    f"mkdir '{kept}' && mount --bind '{path}' '{kept}' && " for kept, path in _PROGRAMS.items()
)
_RETURN = "".join(f"mkdir -p '{path}' && mount --bind '{kept}' '{path}' && " for kept, path in _PROGRAMS.items())
_PRIVATE = (
    f"mount --make-rprivate / && {_KEEP}mount -t tmpfs tmpfs /tmp && {_RETURN}"
    "mount -t tmpfs tmpfs /dev/shm && mkdir -p /tmp/h && "
)
SUBMIT = """
import json, sys
from rayps.service.client import Client
options = json.loads(sys.argv[2])
with Client() as client:
    job = client.submit(options.pop("workload"), working_dir=sys.argv[1], **options).wait(300)
    print(json.dumps(job.data))
assert not {"torch", "ray"} & set(sys.modules), "the client is light"
"""


class Machines:
    """Three hosts, each with its own network and files. Commands run in a host by the id of a process in it."""

    def __init__(self, net: Hosts) -> None:
        self.net = net
        self.inits = [self._start(host, "exec cat") for host in range(3)]
        self.started: list[subprocess.Popen[bytes]] = []

    def _start(self, host: int, command: str) -> subprocess.Popen[bytes]:
        """Start a shell command in the host's network with new mounts; return its process."""
        namespace = self.net._namespaces[1 + host].pid
        shell = f"{_PRIVATE} echo ready && {command}"
        process = subprocess.Popen(
            ["nsenter", "--target", str(namespace), "--net", "unshare", "--mount", "sh", "-c", shell],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert process.stdout is not None and process.stderr is not None
        if process.stdout.readline() != b"ready\n":
            missing(f"right to make mount namespaces: {process.stderr.read().decode().strip()}")
        return process

    def command(self, host: int, *words: str, **environ: str) -> tuple[list[str], dict[str, str]]:
        at = ["nsenter", "--target", str(self.inits[host].pid), "--net", "--mount", *words]
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("RAY", "TMPDIR"))}
        paths = os.pathsep.join([str(ROOT), str(ROOT / "api")])
        return at, {**kept, "PYTHONPATH": paths, "HOME": "/tmp/h", "TMPDIR": "/tmp", **environ}

    def run(self, host: int, *words: str, seconds: float = 120, **environ: str) -> str:
        at, env = self.command(host, *words, **environ)
        done = subprocess.run(at, env=env, cwd="/", capture_output=True, text=True, timeout=seconds, check=False)
        assert done.returncode == 0, f"{words[:4]}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
        return done.stdout

    def start(self, host: int, *words: str, log: Path, **environ: str) -> None:
        at, env = self.command(host, *words, **environ)
        with log.open("wb") as file:
            self.started.append(
                subprocess.Popen(at, env=env, cwd="/", stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
            )

    def close(self) -> None:
        for process in self.started:
            process.terminate()
        for process in self.started:
            process.wait(60)
        spaces = {Path(f"/proc/{init.pid}/ns/mnt").readlink() for init in self.inits}
        for entry in Path("/proc").iterdir():  # what still runs in our mount namespaces, such as Ray's daemons
            try:
                if entry.name.isdigit() and (entry / "ns/mnt").readlink() in spaces:
                    os.kill(int(entry.name), 9)
            except OSError:
                continue
        for init in self.inits:
            init.wait()


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    if shutil.which("unshare") is None:
        missing("unshare: install util-linux")
    try:
        net = Hosts(3, "1gbit")
    except ClusterError as error:
        missing(f"right to make network namespaces: {error}")
    logs = tmp_path_factory.mktemp("logs")
    with net:
        found = Machines(net)
        try:
            head, *_ = net.addresses
            ray = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "ab" * 32, "RAY_worker_niceness": "0"}
            sizes = ("--object-store-memory", "200000000", "--disable-usage-stats", "--block", "--num-gpus=0")
            options = ("--include-dashboard=false", "--port=6379", f"--node-ip-address={head}", "--num-cpus=0")
            found.start(0, RAY, "start", "--head", *options, *sizes, log=logs / "head", **ray)
            join = (f"--address={head}:6379", f"--node-ip-address={net.addresses[1]}", "--num-cpus=2")
            _await_port(found, 0, head, 6379)
            found.start(1, RAY, "start", *join, *sizes, log=logs / "node", **ray)
            serve = (
                "-m",
                "rayps.cli",
                "serve",
                "--host",
                head,
                "--port",
                "8420",
                "--address",
                f"{head}:6379",
                "--allow-host",
                head,
            )
            found.start(0, sys.executable, *serve, "--state-dir", "/tmp/state", log=logs / "serve", **ray)
            _await_port(found, 0, head, 8420)
            yield found
        finally:
            found.close()
            for log in sorted(logs.iterdir()):
                print(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}")


def _await_port(machines: Machines, host: int, address: str, port: int) -> None:
    code = f"import socket; socket.create_connection(({address!r}, {port}), 2)"
    deadline = time.monotonic() + 120
    while True:
        at, env = machines.command(host, sys.executable, "-c", code)
        if subprocess.run(at, env=env, capture_output=True, check=False).returncode == 0:
            return
        assert all(process.poll() is None for process in machines.started), "a process has ended"
        assert time.monotonic() < deadline, f"nothing listens at {address}:{port}"
        time.sleep(0.2)


def test_workers_on_a_host_without_a_shared_folder_get_code_data_and_packages(
    machines: Machines, tmp_path: Path
) -> None:
    home = project(tmp_path / "project")
    wheel(home / "wheels")
    head = machines.net.addresses[0]
    # the project is copied to the user's host only, through a pipe
    at, env = machines.command(2, "sh", "-c", "mkdir -p /tmp/project && tar -x -C /tmp/project")
    packed = subprocess.run(["tar", "-c", "-C", str(home), "."], check=True, capture_output=True).stdout
    subprocess.run(at, env=env, input=packed, check=True)
    for host in (0, 1):
        assert machines.run(host, "sh", "-c", "test ! -e /tmp/project && echo absent") == "absent\n"
    # the port listens before the service has written its token
    wait = "for n in $(seq 600); do test -s /tmp/state/token && exec cat /tmp/state/token; sleep 0.1; done; exit 1"
    token = machines.run(0, "sh", "-c", wait).strip()
    user = {"RAYPS_URL": f"http://{head}:8420", "RAYPS_TOKEN": token}
    options = {
        "workload": "src/line.py:Needs",
        "workers": 2,
        "epochs": 1,
        "strategy": "parameter_server",
        "requirements": ["--no-index", "./wheels/rayps_tiny_test_package-1.0-py3-none-any.whl"],
    }
    arguments = (sys.executable, "-c", SUBMIT, "/tmp/project")
    needs = json.loads(machines.run(2, *arguments, json.dumps(options), seconds=400, **user).splitlines()[-1])
    assert needs["status"] == "SUCCEEDED", needs["reason"]
    assert needs["metrics"]["tiny"] == 7.0
    options = {"workload": "src/line.py:Line", "workers": 2, "epochs": 1}
    line = json.loads(machines.run(2, *arguments, json.dumps(options), seconds=400, **user).splitlines()[-1])
    assert line["status"] == "SUCCEEDED", line["reason"]
    assert (line["metrics"]["shift"], line["metrics"]["scale"]) == (0.25, 2.0)
    there = str(Path(f"/proc/{machines.inits[1].pid}/ns/net").readlink())
    assert line["metrics"]["network"] == int(there.strip("net:[]")) % 1_000_000, "the workers are on host 1"
    for host in (0, 1):  # nothing of the jobs' code and packages is left
        listed = machines.run(host, "sh", "-c", "find /tmp /dev/shm -name late.py -o -name 'rayps-packages*' || true")
        assert listed == "", listed
    assert machines.run(0, "sh", "-c", "ls /tmp/state/code | wc -l").strip() in ("1", "2")
