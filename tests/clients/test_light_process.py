"""The light client as a process without rayps, torch, Ray and FastAPI; TLS with pins, cut transfers, hours, limits."""

from __future__ import annotations

import ast
import datetime
import hashlib
import http.server
import ipaddress
import json
import os
import re
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import httpx2
import numpy as np
import pytest
import torch
from client_site import All, Clinic, cohorts, until
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from rayps_api.update_parts import PartWriter, begin_of_range, span_of
from rayps_client import __main__ as command
from rayps_client.client_options import ClientOptions
from rayps_client.command import assignments_of, proxy_address, run_client, service_address
from rayps_client.errors import ConfigError, Conflict, RaypsError, ServiceError, Unauthorized, Unreachable
from rayps_client.exchange.connection import Line, ServiceConnection
from rayps_client.exchange.raw_tensors import RawTensor, decode_tensors, encode_tensors, metadata_of, raw_of_array
from rayps_client.exchange.signed_orders import ClientToken
from rayps_client.load_workload import load
from rayps_client.machine import limits
from rayps_client.machine.certificates import pin_of, trusted
from rayps_client.machine.client_folder import ClientFolder
from rayps_client.machine.limits import DailyTraffic, Pace, memory_refusal, traffic_refusal, used_memory
from rayps_client.machine.participation import Participation
from rayps_client.machine.schedule import Supply, hours_of, is_on_charge, minutes_until, read_supplies, why_away
from rayps_client.process import ClientProcess, Ended
from rayps_client.trainers.local_trainer import LocalTask, LocalTrainer, RoundStart
from rayps_client.trainers.torch_tensors import raw_of, tensor_of
from small_work import train

from rayps.clients.workload_trainer import WorkloadTrainer
from rayps.strategies.catalogue import parse

ROOT = Path(__file__).resolve().parents[2]
ALONE = """
import importlib.abc, sys
from pathlib import Path

class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ImportError(f"{{name}} is not on this machine")

sys.path[:] = [p for p in sys.path if not (Path(p or ".") / "rayps" / "__init__.py").is_file()]
sys.path.insert(0, {client!r})
sys.meta_path.insert(0, Blocked())
"""
HEAVY = ["torch", "ray", "fastapi", "pydantic", "typer", "uvicorn", "pyarrow", "cloudpickle", "yaml", "sqlalchemy"]


def alone(code: str, blocked: list[str] = HEAVY, **options: Any) -> subprocess.Popen[str]:
    """Run code in a process in which rayps is not installed."""
    text = ALONE.format(blocked=blocked, client=str(ROOT / "client")) + code
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", text], env=environment | options.pop("env", {}), **pipes, **options)


def said(process: subprocess.Popen[str], seconds: float = 60.0) -> tuple[int, str, str]:
    out, error = process.communicate(timeout=seconds)
    return process.returncode, out, error


# ---- alone


def test_every_module_but_those_of_torch_and_parquet_loads_alone() -> None:
    home = ROOT / "client" / "rayps_client"
    paths = [path for folder in (".", "exchange", "machine", "trainers") for path in (home / folder).glob("*.py")]
    names = sorted(".".join(path.relative_to(home).with_suffix("").parts) for path in paths)
    torch_files = ("torch_trainer", "torch_schedule", "torch_tensors", "module_modes", "moved_weight")
    of_torch = {f"trainers.{name}" for name in torch_files}
    optional = of_torch | {"columns", "parquet_rows"}
    wanted = [name for name in names if name not in optional and "__" not in name]
    known = {"process", "command", "load_workload", "trainers.numpy_trainer", "exchange.connection", "twin"}
    assert known <= set(wanted)
    code = f"import importlib\nfor name in {wanted!r}: importlib.import_module('rayps_client.' + name)\n"
    code += f"print([m for m in {HEAVY!r} if m in sys.modules], 'rayps' in sys.modules)"
    assert said(alone(code)) == (0, "[] False\n", "")


TWIN = """
import rayps
import rayps.data
from rayps import Callback, Sum, Workload
from rayps.data import iid, tensors

class Work(Workload):
    average = rayps.EMA(0.9)
    width: int = 3

    def model(self): ...
    def loss(self, model, batch): ...

    def data(self):
        import numpy as np
        return tensors(np.ones((4, self.width)), batch_size=2, client=iid(2))

class Stop(Callback):
    pass
"""


def test_a_file_of_rayps_loads_where_rayps_is_not_installed(tmp_path: Path) -> None:
    (tmp_path / "work.py").write_text(TWIN)
    (tmp_path / "ring.py").write_text("import rayps\nrayps.Ring()\n")
    (tmp_path / "loggers.py").write_text("from rayps.loggers import MLflow\n")
    (tmp_path / "name.py").write_text("from rayps import FedAvg\n")
    code = """
from rayps_client.load_workload import load
work = load("work.py:Work", {"width": 2})
rows = work.data()
print(rows.rows(), rows.take([0]).x.shape, type(work).__mro__[1].__module__)
for file in ("ring", "loggers", "name"):
    try:
        load(file + ".py:X", {})
    except Exception as error:
        print(type(error).__name__, str(error).splitlines()[0])
import rayps
from rayps_client import twin
assert not hasattr(rayps, "__wrapped__") and not twin.is_installed()
twin.remove()
assert "rayps" not in sys.modules
"""
    returned, out, error = said(alone(code, cwd=tmp_path))
    assert (returned, error) == (0, "")
    first, *refused = out.splitlines()
    assert first == "4 (1, 2) rayps_client.workload"
    assert len(refused) == 3
    for line, name in zip(refused, ("rayps.Ring", "rayps.loggers", "rayps.FedAvg"), strict=True):
        assert line.startswith("WorkloadError ") and name in line and "install rayps" in line


OPTIONAL = """
import rayps

class Table(rayps.NumpyWorkload):
    def parameters(self): ...
    def loss_and_gradient(self, parameters, batch): ...
    def data(self):
        return rayps.data.parquet("rows.parquet", features="*", label="y")

class Arrays(Table):
    def data(self):
        import numpy as np
        return rayps.data.tensors(np.ones((4, 3)))

class Model(rayps.Workload):
    def model(self): ...
    def loss(self, model, batch): ...
    def data(self):
        import numpy as np
        return rayps.data.tensors(np.ones((4, 3)))
"""


def test_a_missing_optional_package_and_a_device_that_numpy_cannot_use(tmp_path: Path) -> None:
    (tmp_path / "work.py").write_text(OPTIONAL)
    code = """
from rayps_client.client_options import ClientOptions
from rayps_client.load_workload import trainer_of

class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "pyarrow"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
for kind, device in (("Table", "cpu"), ("Model", "cpu"), ("Arrays", "cuda")):
    try:
        trainer_of(ClientOptions(f"work.py:{kind}", device=device))
    except Exception as error:
        print(type(error).__name__, str(error).replace("\\n", " "))
"""
    returned, out, error = said(alone(code, cwd=tmp_path, blocked=[]))
    assert (returned, error) == (0, "")
    table, model, arrays = out.splitlines()
    assert 'pip install "rayps-client[parquet]"' in table
    assert 'pip install "rayps-client[torch]"' in model
    assert arrays.startswith("ConfigError --device is 'cuda', but work.py:Arrays computes with numpy")


PATIENTS = """
import numpy as np
import rayps
from rayps import stats

class Patients(rayps.StatisticsWorkload):
    columns = ("age", "bmi", "dose")
    queries = {
        "age": rayps.stats.mean(0, 110),
        "older": rayps.stats.mean(60.5, 110, column="age"),
        "bmi": rayps.stats.histogram((10, 18.5, 25, 30, 60)),
        "dose": stats.quantile((0.25, 0.5), 0, 10, bins=16),
    }

    def data(self):
        made = np.random.default_rng(7)
        x = np.column_stack([made.normal(50, 40, 203), made.normal(26, 9, 203), made.gamma(2, 2, 203)])
        return rayps.data.tensors(x, batch_size=16)

class Own(Patients):
    queries = {"weight": rayps.stats.mean(0, 110)}
"""
STRATEGIES = ["by=clients", "by=rows", "by=rows,rows_per_client=50"]


def test_statistics_have_the_same_bits_with_rayps_and_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same file, in this process with rayps and torch, and in one that has numpy alone."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "patients.py").write_text(PATIENTS)
    wires = [parse(f"statistics:{each},clients=remote")[0].strategy.to_wire() for each in STRATEGIES]
    code = f"""
import json
import numpy as np
from rayps_client.client_options import ClientOptions
from rayps_client.load_workload import trainer_of
from rayps_client.trainers.local_trainer import LocalTask, RoundStart
from rayps_client.exchange.raw_tensors import raw_of_array

trainer = trainer_of(ClientOptions("patients.py:Patients"))
trainer.try_out()
layout = [list(row) for row in trainer.layout()]
start = RoundStart(raw_of_array(np.zeros(sum(row[1][0] for row in layout))))
replies = []
for wire in {wires!r}:
    found = trainer.train(LocalTask(wire, 5, 0, 3, 0, start=start, state={{}}))
    replies.append([bytes(found.w.data).hex(), found.n, found.steps, found.samples])
try:
    trainer_of(ClientOptions("patients.py:Own"))
except Exception as error:
    refused = str(error)
print(json.dumps([layout, replies, refused]))
"""
    returned, out, error = said(alone(code, cwd=tmp_path))
    assert (returned, error) == (0, "")
    layout, replies, refused = json.loads(out)
    assert "the query 'weight' needs the column 'weight', and the rows have age, bmi, dose" in refused
    work = load("patients.py:Patients", {})
    ours = WorkloadTrainer(work, work.data())  # type: ignore[arg-type]
    assert [list(row) for row in ours.layout()] == layout
    start = RoundStart(raw_of(ours.trainer.flat.vector.new_zeros(ours.trainer.flat.vector.numel())))
    for wire, reply in zip(wires, replies, strict=True):
        found = ours.train(LocalTask(wire, 5, 0, 3, 0, start=start, state={}))
        assert [bytes(found.w.data).hex(), found.n, found.steps, found.samples] == reply
        assert any(found.w.array())


@pytest.fixture(scope="module")
def clinic(clinic: Clinic) -> Clinic:
    (clinic.path / "line.py").write_text(LINE)
    return clinic


LINE = """
import os
import numpy as np
from rayps_client import NumpyWorkload, tensors

def rows(k):
    generator = np.random.default_rng(k)
    x = generator.normal(size=(20 + 5 * k, 4))
    return x, np.sin(x.sum(axis=1)) + 0.3 * k

class Line(NumpyWorkload):
    lr: float = 0.05

    def parameters(self):
        return {"w": np.zeros(4), "b": np.zeros(1)}

    def data(self):
        return tensors(*rows(int(os.environ["HOSPITAL"])), batch_size=8)

    def evaluation_data(self):
        return tensors(*rows(2), batch_size=8)

    def loss_and_gradient(self, parameters, batch):
        error = batch.x @ parameters["w"] + parameters["b"] - batch.y
        return float((error**2).mean()), {"w": 2 * error @ batch.x / len(batch), "b": 2 * error.mean(keepdims=True)}

    def evaluate(self, parameters, batch):
        return {"error": float(np.abs(batch.x @ parameters["w"] + parameters["b"] - batch.y).mean())}
"""


def light(clinic: Clinic, job: Any, k: int, *options: str) -> subprocess.Popen[str]:
    arguments = ["line.py:Line", "--url", clinic.url, "--name", f"h{k}", "--state", str(clinic.path / f"light-{k}")]
    code = f"from rayps_client.__main__ import main\nsys.exit(main({[*arguments, '--patience', '20', *options]!r}))"
    env = {"HOSPITAL": str(k), "RAYPS_CLIENT_TOKEN": clinic.invite(job)["token"]}
    return alone(code, cwd=clinic.path, env=env)


@pytest.mark.parametrize("strategy", ["fedrep:private=b,head_epochs=2", "scaffold:local_steps=4"])
def test_processes_without_torch_learn_what_a_simulation_learns(clinic: Clinic, strategy: str) -> None:
    name, _, options = strategy.partition(":")
    job = clinic.user.submit(
        "line.py:Line",
        working_dir=clinic.path,
        strategy=f"{name}:{options},clients=remote(least=2,wait=100)",
        epochs=3,
        seed=5,
    )
    processes = []
    for k in (0, 1):
        processes.append(light(clinic, job, k, "--set", "lr=0.05", "--traffic", "50", "--memory", "4000"))
        until(lambda k=k: f"h{k}" in clinic.joined(job) or processes[-1].poll() is not None)
    learnt = clinic.trained(job)
    for process in processes:
        code, _, error = said(process)
        assert code == 0 and "SUCCEEDED" in error, error
    scope: dict[str, Any] = {}
    exec(LINE, scope)
    parts = [scope["rows"](k) for k in (0, 1)]

    class All(scope["Line"]):  # type: ignore[misc]
        def data(self):
            import rayps

            who = np.concatenate([np.full(len(x), k) for k, (x, _) in enumerate(parts)])
            x, y = (np.concatenate(each) for each in zip(*parts, strict=True))
            return rayps.data.tensors(x, y, batch_size=8, client=who)

    simulated = train(All(), strategy, epochs=3, seed=5)
    torch.testing.assert_close(learnt, simulated.snapshot.params, rtol=1e-12, atol=1e-12)
    assert simulated.metrics["error"] > 0
    facts = json.loads((clinic.path / "light-0" / job.id / "h0" / "traffic.json").read_text())
    assert facts["bytes"] > 3 * 2 * facts["round"] / 2 > 0


def test_sigterm_ends_a_waiting_client_in_good_order(clinic: Clinic) -> None:
    job = clinic.user.submit("line.py:Line", working_dir=clinic.path, strategy="fedavg:clients=remote(least=2)")
    process = light(clinic, job, 0)
    assert process.stderr is not None and process.stderr.readline().startswith("joined job")
    process.terminate()
    code, _, error = said(process)
    assert code == 143 and "rayps-client: ended by SIGTERM: " in error and "Traceback" not in error, error
    assert clinic.joined(job)["h0"]["state"] == "left"
    job.stop()


def test_a_command_says_what_is_wrong(tmp_path: Path) -> None:
    token = str(ClientToken("s", "0" * 26, "f", "h0"))
    for arguments, code, why in (
        (["x.py:X", "--token", "rps"], 2, "not a client token"),
        (["x.py:X", "--token", token], 2, "--url, or RAYPS_URL"),
        (["x.py:X", "--token", token, "--url", "http://a", "--pin", "0" * 64], 2, "need an address with https://"),
        (["x.py:X", "--token", token, "--url", "http://a", "--between", "7"], 2, "such as 22:00-06:00"),
        (["x.py:X", "--token", token, "--url", "http://a", "--traffic", "0"], 2, "above 0"),
        (["x.py:X", "--token", token, "--url", "http://a", "--cpus", "9999"], 2, "from 1 to"),
        (
            ["x.py:X", "--token", token, "--url", "http://a", "--proxy", "foo"],
            2,
            "such as http://proxy.example.org:3128",
        ),
        (["x.py:X", "--token", token, "--url", "http://a"], 2, "there is no file"),
        (["x.py:X", "--set", "lr"], 2, "NAME=VALUE"),
    ):
        run = subprocess.run(
            [sys.executable, "-m", "rayps_client", *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT / "client")},
            timeout=60,
        )
        assert run.returncode == code and why in run.stderr, (arguments, run.stderr)
    assert not (tmp_path / "clients").exists()


def test_the_last_line_counts_updates_that_were_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Done(ClientProcess):
        def run(self) -> Ended:
            return Ended("FAILED", "no update counted", 1)

    monkeypatch.setattr("rayps_client.command.ClientProcess", Done)
    lines: list[str] = []
    token = str(ClientToken("s", "0" * 26, "f", "h0"))
    options = ClientOptions("x.py:X", url="http://a", token=token, state=tmp_path)
    run_client(options, lambda _: cast("LocalTrainer", None), lines.append)
    assert lines[-1].endswith("no update counted (1 update sent since this start, without the rejected ones)")


HOSTILE = "\x1b[2J\x1b]52;c;ZXZpbA==\x07\x9b31m\rover\x08\x00\x7f\u202eevil"


@pytest.mark.parametrize("way", ["error", "report", "statement"])
def test_what_a_service_answers_does_not_control_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], way: str
) -> None:
    def run(options: ClientOptions, trainer: object, report: Callable[[str], None]) -> Ended:
        if way == "error":
            raise Conflict(f"the service says{HOSTILE}")
        report(f"the service says{HOSTILE}")
        return Ended("SUCCEEDED", HOSTILE, 1)

    monkeypatch.setattr("rayps_client.command.run_client", run)
    monkeypatch.setattr("rayps_client.command.show_statement", lambda options, report: run(options, None, report))
    command.main(["x.py:X", *(["--show-statement"] if way == "statement" else [])])
    out, error = capsys.readouterr()
    assert out == "" and r"the service says\x1b[2J\x1b]52;c;ZXZpbA==\x07\x9b31m" in error
    assert r"over\x08\x00\x7f\u202eevil" in error
    assert set(error) <= {"\n", *map(chr, range(32, 127))}


def test_the_command_writes_to_the_terminal_at_one_place() -> None:
    """A new way to it would need the same care: `rayps_client.machine.terminal_text`."""
    found = [
        f"{path.name}: {ast.unparse(node)}"
        for path in (ROOT / "client").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and re.match(r"print\(|sys\.std(out|err)\.write\(", ast.unparse(node))
    ]
    assert len(found) == 1 and "plain(text)" in found[0], found


def test_values_of_parameters_and_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    found = assignments_of(["lr=0.3", "name=abc", "layers=[1,2]", "on=true"])
    assert found == {"lr": 0.3, "name": "abc", "layers": [1, 2], "on": True}
    monkeypatch.setenv("RAYPS_URL", "https://a.b/")
    assert service_address(None) == "https://a.b" and service_address("http://c") == "http://c"
    with pytest.raises(ConfigError, match="--url is 'ftp://a'"):
        service_address("ftp://a")
    assert proxy_address(None) is None and proxy_address("http://me:secret@p:3128") == "http://me:secret@p:3128"
    for wrong in ("p:3128", "ftp://p", "http://", "http://p:port"):
        with pytest.raises(ConfigError, match=f"--proxy is '{wrong}'"):
            proxy_address(wrong)


# ---- TLS


def certificate(folder: Path, name: str = "server") -> tuple[Path, Path, str]:
    """Make a certificate for 127.0.0.1; return its file, its key's file and its SHA-256."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    begin = datetime.datetime(2020, 1, 1)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(7)
        .not_valid_before(begin)
        .not_valid_after(begin + datetime.timedelta(days=36500))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        .sign(key, hashes.SHA256())
    )
    file, secret = folder / f"{name}.pem", folder / f"{name}.key"
    file.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    secret.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return file, secret, hashlib.sha256(made.public_bytes(serialization.Encoding.DER)).hexdigest()


class Answering(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = b'{"ok": true}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def secure(tmp_path: Path) -> Iterator[tuple[str, Path, str]]:
    """A server with TLS: its address, its certificate and the certificate's hash."""
    file, key, digest = certificate(tmp_path)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answering)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield f"https://127.0.0.1:{server.server_address[1]}", file, digest
    server.shutdown()
    server.server_close()


def test_only_the_trusted_certificate_is_accepted(secure: tuple[str, Path, str], tmp_path: Path) -> None:
    url, file, digest = secure
    other, _, unlike = certificate(tmp_path, "other")
    colons = ":".join(re.findall("..", digest.upper()))

    def call(*given: Any) -> Any:
        connection = ServiceConnection(url, "t", 0.0, lambda _: None, line=Line(trusted(*given)))
        try:
            return connection.call("GET", "/").json()
        finally:
            connection.close()

    for good in (
        (file, []),
        (None, [digest]),
        (None, [f"SHA256:{colons}"]),
        (None, [unlike, digest]),
        (file, [digest]),
    ):
        assert call(*good) == {"ok": True}
    for bad in ((other, []), (None, [unlike]), (file, [unlike]), (None, [])):
        with pytest.raises(Unauthorized, match=r"the certificate of https://127.0.0.1") as refused:
            call(*bad)
        assert refused.value.exit_code == 4
    assert unlike not in str(refused.value)


def test_pins_and_files_are_checked(tmp_path: Path) -> None:
    assert pin_of("sha256 Fingerprint=" + ":".join(["AB"] * 32)) == "ab" * 32
    for wrong in ("", "ab", "g" * 64):
        with pytest.raises(ConfigError, match="64 hex digits"):
            trusted(None, [wrong])
    (tmp_path / "no.pem").write_text("nothing")
    for name in ("no.pem", "missing.pem"):
        with pytest.raises(ConfigError, match="give a PEM file"):
            trusted(tmp_path / name)
    assert trusted(None) is None


def test_a_proxy_is_used() -> None:
    asked = []

    class Proxy(Answering):
        def do_GET(self) -> None:
            asked.append(self.path)
            super().do_GET()

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    line = Line(proxy=f"http://127.0.0.1:{server.server_address[1]}")
    connection = ServiceConnection("http://service.invalid", "t", 0.0, lambda _: None, line=line)
    try:
        assert connection.call("GET", "/x").json() == {"ok": True} and asked == ["http://service.invalid/x"]
    finally:
        connection.close()
        server.shutdown()
        server.server_close()


# ---- cut transfers


class Cutting(httpx2.BaseTransport):
    """A service in memory that is cut off after some bytes of each request and each answer."""

    def __init__(self, most: int) -> None:
        self.most, self.parts, self.requests = most, bytearray(), list[tuple[str, str, str]]()
        self.whole = bytes(range(256)) * 40

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        span = request.headers.get("content-range", "")
        self.requests.append((request.method, request.headers.get("range", ""), span))
        if request.method == "PUT":
            return self.put(request, span)
        if "rayps-sha256" in request.headers:
            return httpx2.Response(200, json={"serial": 1, "received": len(self.parts)})
        begin = begin_of_range(request.headers.get("range"), len(self.whole))
        rest = self.whole[begin:]
        return httpx2.Response(206 if begin else 200, stream=Cut(rest, self.most))

    def put(self, request: httpx2.Request, span: str) -> httpx2.Response:
        given = span_of(span)
        assert given.begin == len(self.parts)
        body = b"".join(request.stream)  # type: ignore[arg-type]
        assert len(body) == int(request.headers["content-length"])
        self.parts += body[: self.most]
        if len(body) > self.most:
            raise httpx2.WriteError("cut")
        assert hashlib.sha256(self.parts).hexdigest() == request.headers["rayps-sha256"]
        return httpx2.Response(201, json={"again": False})


class Cut(httpx2.SyncByteStream):
    def __init__(self, rest: bytes, most: int) -> None:
        self.rest, self.most = rest, most

    def __iter__(self) -> Iterator[bytes]:
        yield self.rest[: self.most]
        if len(self.rest) > self.most:
            raise httpx2.ReadError("cut")


class Counting:
    def __init__(self) -> None:
        self.up = self.down = 0

    def sent(self, count: int) -> None:
        self.up += count

    def received(self, count: int) -> None:
        self.down += count


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayps_client.exchange.connection.time.sleep", lambda _: None)


@pytest.mark.parametrize("most", [1000, 5120, 10240, 20000])
def test_a_cut_transfer_continues_where_it_was(most: int, no_pauses: None) -> None:
    service, meter = Cutting(most), Counting()
    connection = ServiceConnection("http://x", "t", 60.0, lambda _: None, service, line=Line(meter=meter))
    assert connection.download("/parameters", {}) == service.whole
    tries = -(-len(service.whole) // most)
    assert len(service.requests) == tries and meter.down >= len(service.whole)
    assert meter.down < len(service.whole) + 1000 * tries  # nothing is received twice
    service.requests.clear()
    connection.upload("/update", service.whole, {})
    assert bytes(service.parts) == service.whole
    assert [method for method, _, _ in service.requests].count("PUT") == tries
    assert service.requests[0][2] == f"bytes 0-{len(service.whole) - 1}/{len(service.whole)}"


def test_an_upload_whose_answer_was_lost_sends_nothing_again(no_pauses: None) -> None:
    service, lost = Cutting(10**6), []
    put = service.put

    def losing(request: httpx2.Request, span: str) -> httpx2.Response:
        answer = put(request, span)
        if not lost:
            lost.append(1)
            raise httpx2.ReadError("cut")
        return answer

    service.put = losing  # type: ignore[method-assign]
    connection = ServiceConnection("http://x", "t", 60.0, lambda _: None, service)
    connection.upload("/update", service.whole, {})
    assert [method for method, _, _ in service.requests] == ["PUT", "GET", "PUT"]
    assert service.requests[-1][2] == f"bytes */{len(service.whole)}"


def test_an_older_service_gets_the_whole_of_a_masked_update_after_a_cut(no_pauses: None) -> None:
    service, spans = Cutting(10**6), list[str]()

    def older(request: httpx2.Request) -> httpx2.Response:
        if request.method == "GET":
            assert request.url.path == "/stage/received"
            return httpx2.Response(404, json={"detail": "there is no such route"})
        spans.append(request.headers["content-range"])
        if len(spans) == 1:
            raise httpx2.WriteError("cut")
        return service.handle_request(request)

    connection = ServiceConnection("http://x", "t", 60.0, lambda _: None, httpx2.MockTransport(older))
    connection.upload("/stage", service.whole, {}, ask="/stage/received")
    assert spans == [f"bytes 0-{len(service.whole) - 1}/{len(service.whole)}"] * 2


DAMAGED = [(400, "bad_request"), (422, "invalid"), (409, "superseded")]


@pytest.mark.parametrize(("status", "code"), DAMAGED)
def test_bytes_that_arrive_damaged_are_sent_again_and_are_no_mistake_of_the_users(
    no_pauses: None, status: int, code: str
) -> None:
    service, refused = Cutting(10**6), list[int]()

    def damages(most: int) -> ServiceConnection:
        refused.clear()
        service.parts.clear()

        def handle(request: httpx2.Request) -> httpx2.Response:
            if request.method == "PUT" and len(refused) < most:
                refused.append(status)
                return httpx2.Response(status, json={"detail": "0 of 276 bytes have arrived", "code": code})
            return service.handle_request(request)

        return ServiceConnection("http://x", "t", 60.0, lambda _: None, httpx2.MockTransport(handle))

    damages(2).upload("/update", service.whole, {})
    assert bytes(service.parts) == service.whole and len(refused) == 2
    with pytest.raises(ServiceError, match="0 of 276") as found:
        damages(100).upload("/update", service.whole, {})
    assert 2 < len(refused) < 10 and found.value.exit_code != 2


@pytest.mark.parametrize("status", [400, 413, 422])
@pytest.mark.parametrize("path", ["key", "join", "work", "rounds/1/withdraw", "rounds/1/stages/unmasking", "leave"])
def test_exit_code_2_is_a_mistake_in_what_the_user_has_given(no_pauses: None, status: int, path: str) -> None:
    answer = httpx2.Response(status, json={"detail": "no"})
    connection = ServiceConnection("http://x", "t", 60.0, lambda _: None, httpx2.MockTransport(lambda request: answer))
    with pytest.raises(RaypsError) as found:
        connection.call("POST", f"/api/v1/client/{path}")
    assert (found.value.exit_code == 2) == (path in ("key", "join"))
    with pytest.raises(ServiceError):
        connection.download(f"/api/v1/client/{path}", {})


def test_a_request_of_another_thread_is_counted_with_the_next_call(no_pauses: None) -> None:
    """A limit of the rate lets whoever counts wait: a renewal of a lease must not wait behind an update."""
    service, meter = Cutting(10**6), Counting()
    connection = ServiceConnection("http://x", "t", 60.0, lambda _: None, service, line=Line(meter=meter))
    connection.try_once("GET", "/lease", 1.0, headers={"Range": f"bytes={len(service.whole) - 50}-"})
    assert meter.down == 0
    connection.download("/parameters", {})
    whole = meter.down
    connection.download("/parameters", {})
    assert 50 < whole - (meter.down - whole) < 500


def test_a_service_that_is_silent_for_too_long(no_pauses: None) -> None:
    connection = ServiceConnection("http://x", "t", 0.0, lambda _: None, Cutting(0))
    with pytest.raises(Unreachable, match="cut"):
        connection.download("/parameters", {})


def test_what_headers_say() -> None:
    assert [begin_of_range(text, 100) for text in (None, "bytes=0-", "bytes=40-", "bytes=100-", "bytes=4-9", "x")] == [
        0,
        0,
        40,
        0,
        0,
        0,
    ]
    assert (span_of(None).begin, span_of(None).whole) == (0, None)
    assert (span_of("bytes 10-99/100").begin, span_of("bytes 10-99/100").whole) == (10, 100)
    assert (span_of("bytes */100").begin, span_of("bytes */100").whole) == (100, 100)
    for wrong in ("bytes 10-98/100", "bytes 100-99/98", "bytes 1-2", "items 1-2/3"):
        with pytest.raises(ConfigError, match="Content-Range"):
            span_of(wrong)


def test_one_request_at_a_time_writes_a_part(tmp_path: Path) -> None:
    path = tmp_path / "part"
    old = PartWriter(path)
    old.write(0, b"abcd")
    old.end()
    new = PartWriter(path)
    for late in (lambda: old.write(4, b"x"), lambda: old.seal("")):
        with pytest.raises(Conflict, match="newer request"):
            late()
    old.drop()
    assert new.size == 4
    new.write(4, b"ef")
    assert new.seal(hashlib.sha256(b"abcdef").hexdigest())
    with pytest.raises(Conflict):
        new.write(6, b"g")  # nothing is written after the hash was checked
    assert path.read_bytes() == b"abcdef"


def test_a_service_retains_what_has_arrived(clinic: Clinic) -> None:
    job = clinic.job("fedavg:clients=remote(wait=100)", 1)
    token = clinic.invite(job)["token"]
    with httpx2.Client(base_url=clinic.url, headers={"Authorization": f"Bearer {token}"}) as http_client:
        joined = http_client.post("/api/v1/client/join", json={"name": "a", "key": "k" * 20, "samples": 20}).json()
        http_client.headers["Rayps-Client"] = f"{job.id}:{joined['number']}:{'k' * 20}"
        work = until(lambda: http_client.get("/api/v1/client/work", params={"wait": 5}).json().get("order"), seconds=30)
        serial = json.loads(work)["serial"]
        base = f"/api/v1/client/rounds/{serial}"
        whole = http_client.get(f"{base}/parameters").content
        rest = http_client.get(f"{base}/parameters", headers={"Range": "bytes=100-"})
        assert (rest.status_code, rest.content) == (206, whole[100:])
        assert rest.headers["content-range"] == f"bytes 100-{len(whole) - 1}/{len(whole)}"
        counts = json.dumps({"n": 20, "steps": 3, "samples": 20, "loss": 0.5})
        raw = encode_tensors({"w": decode_tensors(whole)["w"]}, {"counts": counts})
        named = {"Rayps-Sha256": hashlib.sha256(raw).hexdigest()}

        def received() -> int:
            return int(http_client.get(f"{base}/update", headers=named).json()["received"])

        def put(begin: int, body: bytes, size: int = len(raw)) -> httpx2.Response:
            span = f"bytes {begin}-{size - 1}/{size}" if begin < size else f"bytes */{size}"
            return http_client.put(f"{base}/update", content=body, headers={**named, "Content-Range": span})

        assert received() == 0
        assert put(0, raw[:200]).status_code == 400 and received() == 200  # incomplete, and retained
        assert put(300, raw[300:]).status_code == 422 and received() == 200  # a gap
        assert put(200, raw[200:], 4 << 20).status_code == 413
        assert put(200, raw[200:] + b"x").status_code == 413 and received() == 0
        assert put(0, raw[:-1] + b"x").status_code == 422 and received() == 0
        assert put(0, raw[:200]).status_code == 400
        assert put(200, raw[200:]).status_code == 201
        again = put(len(raw), b"")
        assert again.status_code == 200 and again.json()["again"]
    job.wait(30)


class CutOnce(httpx2.BaseTransport):
    """The line to a real service, which breaks in the first update after 300 bytes of its body."""

    def __init__(self) -> None:
        self._through = httpx2.HTTPTransport()
        self.spans: list[str] = []

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        if request.method != "PUT":
            return self._through.handle_request(request)
        self.spans.append(request.headers["content-range"])
        if len(self.spans) > 1:
            return self._through.handle_request(request)
        body = b"".join(request.stream)  # type: ignore[arg-type]
        head = f"PUT {request.url.path} HTTP/1.1\r\n" + "".join(f"{k}: {v}\r\n" for k, v in request.headers.items())
        with socket.create_connection((request.url.host, request.url.port)) as line:
            line.sendall(head.encode() + b"\r\n" + body[:300])
        raise httpx2.WriteError("the line broke")


def test_an_update_whose_line_breaks_is_completed(clinic: Clinic) -> None:
    job, line = clinic.job("fedavg:local_epochs=2,clients=remote(least=2,wait=100)", 1), CutOnce()
    clinic.hospital(job, 0, transport=line).begin()
    clinic.hospital(job, 1).begin()
    assert torch.equal(clinic.trained(job), train(All(2), "fedavg:local_epochs=2", epochs=1).snapshot.params)
    first, second = (re.match(r"bytes (\d+)-(\d+)/(\d+)", span) for span in line.spans)
    assert first and second and int(first[1]) == 0 and int(second[1]) in (0, 300)  # 0: the service had none of it yet
    assert first[3] == second[3]


def test_no_round_waits_for_a_client_that_is_away(clinic: Clinic) -> None:
    job = clinic.job("fedavg:deadline=500,clients=remote(least=2,wait=100)", 2)
    token = clinic.invite(job)["token"]
    clinic.hospital(job, 0).begin()
    with httpx2.Client(base_url=clinic.url, headers={"Authorization": f"Bearer {token}"}) as http_client:
        joined = http_client.post("/api/v1/client/join", json={"name": "a", "key": "k" * 20, "samples": 20}).json()
        http_client.headers["Rayps-Client"] = f"{job.id}:{joined['number']}:{'k' * 20}"

        def work(away: bool) -> Any:
            return http_client.get("/api/v1/client/work", params={"wait": 0, "away": away}).json()

        until(lambda: work(False)["kind"] == "round", seconds=30)
        assert work(True)["kind"] == "wait" and clinic.joined(job)["a"]["state"] == "away"
        until(lambda: "waits for 1 more of 2 clients; connected: h0; away: a" in clinic.reason(job))
        (event,) = cohorts(job)
        assert (event["trained"], event["dropped"]) == (["h0"], [["a", "offline"]])
        until(lambda: work(False)["kind"] == "round", seconds=30)
        assert clinic.joined(job)["a"]["state"] == "here"
        job.stop().wait(30)


# ---- hours, power, limits


def test_hours() -> None:
    night, noon = hours_of("22:00-06:00"), hours_of("12:00-13:30")
    for hours, inside, outside in ((night, (1320, 1439, 0, 359.9), (360, 720, 1319)), (noon, (720, 809), (719, 810))):
        assert all(hours.contains(minute) for minute in inside) and not any(hours.contains(m) for m in outside)
    assert str(night) == "22:00-06:00" and hours_of("00:00-24:00").contains(1439)
    assert minutes_until([night], 1300) == 20 and minutes_until([night, noon], 700) == 20
    assert minutes_until([night], 30) == 0 == minutes_until([], 30)
    assert minutes_until([noon], 1000) == 1160  # tomorrow
    for wrong in ("", "7-8", "25:00-06:00", "10:00-10:00", "10:00-24:30"):
        with pytest.raises(ConfigError, match="such as 22:00-06:00"):
            hours_of(wrong)


MAINS, BATTERY = Supply("Mains", online=True), Supply("Battery", status="Discharging")


@pytest.mark.parametrize(
    ("supplies", "charged"),
    [
        ([], True),
        ([MAINS], True),
        ([BATTERY], False),
        ([MAINS, BATTERY], True),
        ([Supply("Mains"), BATTERY], False),
        ([Supply("Battery", status="Charging")], True),
        ([Supply("Battery", status="Full"), BATTERY], False),
        ([Supply("USB", online=True), BATTERY], True),
    ],
    ids=["none", "mains", "battery", "both", "unplugged", "charging", "second battery", "usb"],
)
def test_power(supplies: list[Supply], charged: bool) -> None:
    assert is_on_charge(supplies) is charged
    assert (why_away([], 0, supplies) is None) is charged and why_away([], 0, None) is None


def test_power_supplies_are_read_as_linux_writes_them(tmp_path: Path) -> None:
    for name, facts in {
        "AC": {"type": "Mains", "online": "0"},
        "BAT0": {"type": "Battery", "status": "Discharging"},
        "mouse": {"type": "Battery", "scope": "Device", "status": "Charging"},
    }.items():
        (tmp_path / name).mkdir()
        for key, value in facts.items():
            (tmp_path / name / key).write_text(f"{value}\n")
    assert read_supplies(tmp_path) == [Supply("Mains"), Supply("Battery", status="Discharging")]
    assert read_supplies(tmp_path / "missing") == []


def test_traffic_is_counted_by_day_and_survives_a_restart(tmp_path: Path) -> None:
    folder, day = ClientFolder(tmp_path), ["2026-01-01"]

    def made() -> DailyTraffic:
        return DailyTraffic(folder, 1000, lambda: day[0])

    traffic = made()
    traffic.add(300)
    assert traffic.admit(200) is None and traffic.refusal() is None
    traffic.add(550)
    assert "used" in str(traffic.refusal()) and "a round takes" in str(traffic.refusal())
    traffic.save()
    assert made().spent == 850 and made().refusal() is not None
    day[0] = "2026-01-02"
    assert made().spent == 0 and made().refusal() is None and traffic.refusal() is None
    with pytest.raises(ConfigError, match="raise --traffic"):
        traffic.admit(1001)
    folder.close()
    assert traffic_refusal(10, 10, 0) is None and traffic_refusal(10, 10, 1) is not None


def test_memory() -> None:
    assert memory_refusal(100, 60, 10) is None and "raise --memory" in str(memory_refusal(100, 60, 11))
    now, most = used_memory()
    assert 1_000_000 < now <= most


def test_a_rate_is_kept() -> None:
    now, slept = [0.0], list[float]()

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    pace = Pace(100.0, lambda: now[0], sleep)
    for count in (50, 100, 0):
        pace.passed(count)
    now[0] += 10
    pace.passed(100)
    assert slept == [0.5, 1.0, 1.0]


def test_participation(tmp_path: Path) -> None:
    now, slept, supplies = [datetime.datetime(2026, 1, 1, 21, 59, 30)], list[float](), [BATTERY]
    folder = ClientFolder(tmp_path)
    traffic = DailyTraffic(folder, 1000, lambda: "today")

    def made(memory: int | None = None, charge: bool = True) -> Participation:
        return Participation(
            [hours_of("22:00-06:00")],
            charge,
            traffic,
            memory,
            clock=lambda: now[0],
            supplies=lambda: supplies,
            sleep=slept.append,
        )

    found = made()
    assert found.away() == "it takes part between 22:00-06:00"
    found.pause()
    now[0] += datetime.timedelta(minutes=1)
    assert "--on-charge" in str(found.away()) and made(charge=False).away() is None
    found.pause()
    now[0] += datetime.timedelta(hours=10)
    found.pause()
    assert slept == [30.0, 60.0, 60.0]
    now[0] -= datetime.timedelta(hours=10)
    supplies[0] = MAINS
    assert found.away() is None and found.admit(10, 20) is None and found.trained() is None
    traffic.add(990)
    assert "--traffic" in str(found.away())
    with pytest.raises(ConfigError, match="raise --memory"):
        made(memory=1000).admit(10)
    small = made(memory=1000)
    assert "--memory" in str(small.trained()) and small.trained() is None  # said once
    folder.close()


def test_processors_are_limited_in_every_thread() -> None:
    code = """
import os, threading
import numpy as np
from rayps_client.machine.limits import use_cpus
stop = threading.Event()
threading.Thread(target=stop.wait, daemon=True).start()
use_cpus(1)
print({len(os.sched_getaffinity(int(task))) for task in os.listdir("/proc/self/task")}, os.environ["OMP_NUM_THREADS"])
stop.set()
"""
    assert said(alone(code)) == (0, "{1} 1\n", "")
    with pytest.raises(ConfigError, match="cpus is 0"):
        limits.use_cpus(0)


# ---- bytes


@pytest.mark.parametrize("name", ["float64", "float32", "float16", "bfloat16", "int64", "uint8", "bool", "float8_e5m2"])
def test_tensors_survive_as_bytes(name: str) -> None:
    kind = getattr(torch, name)
    tensors = {
        "a": torch.randint(0, 2, (3, 5)).to(kind),
        "none": torch.zeros((0, 2), dtype=kind),
        "one": torch.ones((), dtype=kind),
    }
    raw = encode_tensors({key: raw_of(value) for key, value in tensors.items()}, {"who": "me"})
    import safetensors.torch

    read = safetensors.torch.load(raw)
    written = safetensors.torch.save(tensors, {"who": "me"})
    assert metadata_of(raw) == {"who": "me"} == metadata_of(written)
    for found in (read, {key: tensor_of(value) for key, value in decode_tensors(written).items()}):
        assert found.keys() == tensors.keys()
        for key, value in tensors.items():
            assert found[key].dtype == kind and found[key].shape == value.shape
            assert bytes(raw_of(found[key]).data) == bytes(raw_of(value).data)


def test_arrays_and_tensors_are_the_same_bytes() -> None:
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    one, other = raw_of_array(values), raw_of(torch.from_numpy(values))
    assert (one.dtype, one.shape, bytes(one.data)) == (other.dtype, other.shape, bytes(other.data))
    assert np.array_equal(one.array(), values) and bytes(raw_of_array(values.T).data) == values.T.tobytes()
    assert one.kind == "float32 (2, 3)" and one.nbytes == 24
    assert np.array_equal(raw_of_array(values.astype(">f4")).array(), values)
    with pytest.raises(Exception, match="numpy has no dtype bfloat16"):
        RawTensor("bfloat16", (1,), b"ab").array()
    with pytest.raises(Exception, match="cannot be sent"):
        raw_of_array(np.array([{}]))
