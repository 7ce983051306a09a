"""The house's floors, held by its imports; sizes; what is loaded when; what is public."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import rayps

ROOT = Path(__file__).resolve().parent.parent
FLOORS = [
    # pure: no thread, no socket
    "__init__ errors job clock grid partition flat compress metrics strategy strategies user_code logs failpoint "
    "thread_ends "
    "prox attendance epochs pipeline.schedule pipeline.validate pipeline.simulate pipeline.gantt costs placement "
    "spelling joining finite grad_watch federated.cohort federated.choices federated.virtual federated.real.joining",
    # where actors live, and how bytes travel between them
    "cluster scratch ray_cluster link federated.real.mailbox federated.real.signed",
    # the two ways of talking
    "ring eager optim rates server tables elastic",
    # what is learnt
    "tensor data workload checkpoint apart keeping snapshot embedding buckets worker runtime.plans runtime.decide "
    "pipeline replica meter stepping federated",
    # a run
    "runtime elastic.job elastic.job_tables loop loop_watch server_group training",
    # the service
    "service client",
    # the command line, which may also train at once and serve; measurements
    "cli bench federated.real.outside federated.real.kept",
]
FLOOR = {name: number for number, names in enumerate(FLOORS) for name in names.split()}
SERVICE_MAY = {0, 1, 5}  # the service wing needs neither torch nor the floors of training
LAZY = {  # (module, what it imports within a function): why
    ("training", "rayps.ray_cluster"): "a run on a given cluster needs no Ray",
    ("loop", "rayps.ray_cluster"): "a run on a given cluster needs no Ray",
    ("cli.doctor", "resource"): "not on every system",
}


def files():
    found = {}
    for root, package in ((ROOT / "rayps", "rayps"), (ROOT / "api" / "rayps_api", "rayps_api")):
        for path in root.rglob("*.py"):
            name = ".".join(path.relative_to(root).with_suffix("").parts)
            name = name.removesuffix(".__init__")
            if not name.startswith("service.migrations.versions"):
                found[f"{package}.{name}"] = path
    return found


FILES = files()
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in FILES.items()}


def typing_only(tree):
    """The lines of `if TYPE_CHECKING:` blocks."""
    return {
        inner.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
        for inner in ast.walk(node)
        if hasattr(inner, "lineno")
    }


def imports(tree):
    """(module, whether within a function) for each import that runs."""
    hidden = typing_only(tree)
    inside = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) and node.lineno not in hidden:
            yield from ((alias.name, id(node) in inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.lineno not in hidden:
            assert node.level == 0, f"line {node.lineno}: a relative import"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield (whole if whole in FILES else str(node.module)), id(node) in inside


def floor(name):
    short = name.removeprefix("rayps.").removeprefix("rayps") or "__init__"
    while short and short not in FLOOR:
        short = short.rpartition(".")[0]  # a package stands on one floor, but for what is named apart
    assert short in FLOOR, f"{name} stands on no floor: put it into FLOORS where it belongs"
    return FLOOR[short]


OURS = [name for name in FILES if name.startswith("rayps.")]


def test_imports_go_downwards():
    wrong = []
    for name in OURS:
        for used, _ in imports(TREES[name]):
            if used.partition(".")[0] == "rayps" and used != "rayps" and floor(used) > floor(name):
                wrong.append(f"{name} (floor {floor(name)}) imports {used} (floor {floor(used)})")
    assert not wrong


def test_the_service_wing_imports_pure_floors_only():
    wrong = []
    for name in FILES:
        if name.startswith("rayps_api") or floor(name) == 5:
            for used, _ in imports(TREES[name]):
                if used.partition(".")[0] == "rayps" and used != "rayps" and floor(used) not in SERVICE_MAY:
                    wrong.append(f"{name} imports {used}")
    assert not wrong


def test_no_import_cycles():
    graph = {name: {used for used, inside in imports(TREES[name]) if used in FILES and not inside} for name in FILES}
    done, path = set(), []

    def visit(name):
        assert name not in path, " -> ".join([*path[path.index(name) :], name])
        if name not in done:
            path.append(name)
            for used in sorted(graph[name]):
                visit(used)
            path.pop()
            done.add(name)

    for name in sorted(graph):
        visit(name)


def test_only_one_module_imports_ray():
    users = {name for name in FILES for used, _ in imports(TREES[name]) if used.partition(".")[0] == "ray"}
    assert users == {"rayps.ray_cluster"}


def test_imports_stand_at_the_top():
    found = {
        (name.removeprefix("rayps."), used)
        for name in OURS
        for used, inside in imports(TREES[name])
        if inside and not name.startswith(("rayps.migrations", "rayps.cli"))
    }
    assert found <= set(LAZY), found - set(LAZY)


@pytest.mark.parametrize("name", sorted(FILES))
def test_sizes(name):
    for node in ast.walk(TREES[name]):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[1] if ast.get_docstring(node) and len(node.body) > 1 else node.body[0]
            length = node.end_lineno - first.lineno + 1
            assert length <= 75, f"{name}.{node.name} has {length} lines below its docstring"


def test_nobody_prints():
    calls = [
        f"{name}:{node.lineno}"
        for name in FILES
        for node in ast.walk(TREES[name])
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "print"
    ]
    assert not calls


def test_every_module_says_what_it_is():
    assert [name for name in FILES if not ast.get_docstring(TREES[name])] == []


def test_what_is_public_is_what_is_exported():
    for name in rayps.__all__:
        assert getattr(rayps, name) is not None
    shown = {
        name
        for node in ast.walk(TREES["rayps.__init__"])
        if isinstance(node, ast.ImportFrom) and node.lineno in typing_only(TREES["rayps.__init__"])
        for name in (alias.asname for alias in node.names)
    }
    assert shown == set(rayps.__all__) - {"__version__"}
    with pytest.raises(AttributeError):
        rayps.nothing_of_that_name  # noqa: B018
    assert set(dir(rayps)) >= set(rayps.__all__)


def test_no_module_hides_a_public_name():
    """The import of a module puts it into the package under its name, whatever was there."""
    assert {f"rayps.{name}" for name in rayps.__all__} & set(FILES) == {"rayps.data"}


HEAVY = ("torch", "ray", "pyarrow", "numpy")


@pytest.mark.parametrize(
    "code",
    [
        "import rayps; rayps.Client",
        "import rayps; rayps.AllReduce; rayps.ParameterServer; rayps.Strategy; rayps.RaypsError",
        "import rayps.client; from rayps.service import scheduler, store, settings, ray_daemon, ray_place",
        "import rayps.strategy, rayps.job; rayps.strategy.parse('parameter_server:staleness=none')",
        "import rayps_api.app",
        "import sys, rayps.cli.main; sys.argv = ['rayps', '--help']; rayps.cli.main.main()",
    ],
)
def test_what_the_service_and_the_client_do_not_load(code):
    check = (
        "import atexit, sys; atexit.register(lambda: "
        f"sys.stderr.write(','.join(m for m in {HEAVY} if m in sys.modules)))"
    )
    run = subprocess.run(
        [sys.executable, "-c", f"{check}\n{code}"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'api'}", "PATH": "/usr/bin:/bin"},
        timeout=60,
    )
    assert run.returncode == 0, run.stderr
    assert run.stderr.strip() == ""


@pytest.mark.parametrize("path", sorted(ROOT.glob("rayps/strategies/*.py")), ids=lambda path: path.stem)
def test_strategy_files_know_no_torch(path):
    used = {name.partition(".")[0] for name, _ in imports(ast.parse(path.read_text()))}
    assert used <= {"rayps", "typing", "dataclasses", "collections", "itertools", "__future__"}
