"""The house's floors, held by its imports; sizes; what is loaded when; what is public."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from folders import lacks

import rayps
from rayps.core.rooms import FACES

ROOT = Path(__file__).resolve().parent.parent
HEAVY = ("torch", "ray", "pyarrow", "numpy")
ROOMS = [  # bottom up: a folder imports only those above it in this list
    "core",  # neither torch nor ray
    "privacy",
    "cluster",
    "tensors",
    "data",
    "workload",
    "loggers",
    "comm",
    "ps/protocol",
    "ps/client",
    "ps/tables",
    "ps/server",
    "ps/manager",
    "ps",
    "parallel/tensor",
    "parallel/pipeline",
    "parallel/division",
    "parallel",
    "federated/population",
    "federated/rules",
    "federated/remote",
    "federated",
    "strategies",
    "recovery",
    "worker",
    "runtime",
    "service",
    "clients",
    "bench",
    "cli",
    "__init__",
]
DEEP = {"ps", "federated", "parallel"}  # their subfolders are rooms of their own
LAZY = {  # (module, what it imports within a function): why
    ("data.ray_blocks", "rayps.cluster.ray_cluster"): "only data of Ray needs Ray",
    ("data.clients", "pyarrow.compute"): "0.1 s of the start of each process: only data divided by a column needs it",
    ("runtime.training", "rayps.cluster.ray_cluster"): "a run on a given cluster needs no Ray",
    ("runtime.own_loop.run", "rayps.cluster.ray_cluster"): "a run on a given cluster needs no Ray",
    (
        "federated.rules.robust_rules",
        "rayps.federated.rules.rule_arithmetic",
    ): "the job service reads rules without numpy",
    ("service.strategy_child", "rayps.workload.base"): "only the check of parameters needs torch",
    ("cli.doctor", "resource"): "not on every system",
    ("service.strategy_child", "rayps.federated.private_job"): "only private jobs with a budget need the accountant",
    ("service.strategy_child", "rayps.privacy.accountant"): "the same",
    ("privacy.accountant", "dp_accounting"): "only private jobs need the library",
    ("privacy.accountant", "dp_accounting.pld"): "only private jobs need the library",
}

ACTOR = "an actor's class: its process imports it"
FAMILY = "a job imports the loop of its own family only"
NAMED = {  # (module, what it names as "module:Name"): why
    ("federated.client_states", "federated.client_states:WorkerStates"): "what a worker keeps for one family",
    ("ps.group", "ps.manager.manager:ManagerActor"): ACTOR,
    ("ps.manager.host_starter", "ps.server.server_host:ServerHost"): ACTOR,
    ("ps.manager.launcher", "ps.server.server_actor:ServerActor"): ACTOR,
    ("ps.server_group", "ps.server.shard_actor:ShardActor"): ACTOR,
    ("runtime.driver.job_servers", "ps.server.shard_actor:ShardActor"): ACTOR,
    ("runtime.own_loop.loop_job", "runtime.own_loop.actor:LoopActor"): ACTOR,
    ("runtime.driver.worker_group", "runtime.driver.worker_actor:WorkerActor"): ACTOR,
    ("service.drivers", "runtime.driver.driver_actor:DriverActor"): ACTOR,
    ("service.groups", "ps.manager.manager:ManagerActor"): ACTOR,
    ("service.local_ray.ray_process", "cluster.ray_cluster:RayCluster"): "the service needs no Ray",
    ("core.rooms", "parallel.face:FACE"): "the room of divided models: only they need it",
    ("core.rooms", "ps.tables.face:FACE"): "the room of sparse tables: only models with tables need it",
    ("worker.loops.loop_of_family", "worker.loops.federated_rounds:FederatedRounds"): FAMILY,
    ("worker.loops.loop_of_family", "worker.loops.local_updates:LocalUpdates"): FAMILY,
    ("worker.loops.loop_of_family", "worker.first_on_ring:FirstOnRing"): FAMILY,
    ("worker.loops.loop_of_family", "worker.first_at_servers:FirstAtServers"): FAMILY,
    ("worker.loops.loop_of_family", "worker.noised_sums:NoisedSums"): FAMILY,
    ("worker.loops.loop_of_family", "worker.rows.private_rows:draws_of"): FAMILY,
    ("worker.loops.loop_of_family", "worker.loops.server_steps:ServerSteps"): FAMILY,
    ("worker.loops.loop_of_family", "worker.loops.sharded_parameters:ShardedParameters"): FAMILY,
    ("worker.loops.loop_of_family", "worker.loops.sharded_state:ShardedState"): FAMILY,
    ("worker.loops.loop_of_family", "worker.loops.shared_vector:SharedVectorSteps"): FAMILY,
    ("worker.loops.loop_of_family", "worker.loops.sync_gradients:SyncGradients"): FAMILY,
}


CLIENT = (ROOT / "client" / "rayps_client", "rayps_client")  # below all floors
CHAOS = (ROOT / "chaos" / "rayps_chaos", "rayps_chaos")  # above all floors


def files():
    found = {}
    for root, package in ((ROOT / "rayps", "rayps"), (ROOT / "api" / "rayps_api", "rayps_api"), CLIENT, CHAOS):
        for path in root.rglob("*.py"):
            name = ".".join(path.relative_to(root).with_suffix("").parts)
            name = name.removesuffix(".__init__")
            if not name.startswith("service.migrations.versions"):
                found[f"{package}.{name}"] = path
    return found


class Trees(dict):
    """Syntax trees by module, parsed when they are asked for: each process that collects tests imports this file."""

    def __missing__(self, name):
        return self.setdefault(name, ast.parse(FILES[name].read_text(encoding="utf-8")))


FILES = files()
TREES = Trees()


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


def room(name):
    """The folder of a module; subfolders of some folders are rooms of their own."""
    parts = FILES[name].relative_to(ROOT / "rayps").with_suffix("").parts
    if len(parts) == 1:
        return parts[0]
    return "/".join(parts[:2]) if parts[0] in DEEP and len(parts) > 2 else parts[0]


OURS = [name for name in FILES if name.startswith("rayps.") or name == "rayps"]


def test_the_light_client_imports_nothing_of_rayps():
    used = {(name, used) for name in FILES if name.startswith("rayps_client") for used, _ in imports(TREES[name])}
    assert not {
        (name, other) for name, other in used if re.match(r"(rayps|rayps_api|ray|fastapi|pydantic)(\.|$)", other)
    }


def test_nothing_imports_the_chaos_wheel():
    used = {(name, used) for name in FILES if not name.startswith("rayps_chaos") for used, _ in imports(TREES[name])}
    assert not {(name, other) for name, other in used if other.startswith("rayps_chaos")}


def test_nothing_imports_a_room_that_has_a_face():
    for face in FACES.values():
        room = face.partition(":")[0].removesuffix("face")  # with a period at its end
        others = [name for name in OURS if not f"{name}.".startswith(room)]
        assert not {(name, used) for name in others for used, _ in imports(TREES[name]) if f"{used}.".startswith(room)}


def test_imports_go_downwards():
    wrong = set()
    for name in OURS:
        for used, _ in imports(TREES[name]):
            if used in FILES and used != "rayps" and used.startswith("rayps."):
                here, there = room(name), room(used)
                if ROOMS.index(there) > ROOMS.index(here):
                    wrong.add((here, there))
    assert not wrong, f"go up: {wrong}"


def test_what_the_service_and_the_api_load_needs_neither_torch_nor_ray():
    """All that their modules import, and what these import in turn; not the child, which is a process in Ray."""
    seen, todo = {}, [n for n in FILES if n.startswith(("rayps_api", "rayps.service"))]
    todo.remove("rayps.service.local_ray.ray_child")
    while todo:
        name = todo.pop()
        for used, inside in imports(TREES[name]):
            assert inside or used.partition(".")[0] not in HEAVY, f"{name} imports {used}"
            if used in FILES and used not in seen and not inside:
                seen[used] = name
                todo.append(used)


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
    assert users == {"rayps.cluster.ray_cluster"}


def test_imports_stand_at_the_top():
    found = {
        (name.removeprefix("rayps."), used)
        for name in OURS
        for used, inside in imports(TREES[name])
        if inside and not name.startswith(("rayps.migrations", "rayps.cli"))
    }
    assert found <= set(LAZY), found - set(LAZY)


def test_what_is_imported_by_name():
    """Beside imports: strings "rayps.module:Name". Benchmarks name their own actors, and their table its functions."""
    found = {
        (name.removeprefix("rayps."), node.value.removeprefix("rayps."))
        for name in OURS
        for node in ast.walk(TREES[name])
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.fullmatch(r"rayps(\.\w+)+:\w+", node.value)
        and not name.startswith(("rayps.bench", "rayps.cli.bench"))
    }
    assert found == set(NAMED)
    for _, target in NAMED:
        module, _, thing = target.partition(":")
        if lacks(f"rayps/{module.replace('.', '/')}.py"):
            continue
        tree = TREES[f"rayps.{module}"]
        defined = {getattr(node, "name", "") for node in tree.body}
        defined |= {getattr(each, "id", "") for node in tree.body for each in getattr(node, "targets", ())}
        assert thing in defined, target


@pytest.mark.parametrize("name", sorted(FILES))
def test_sizes(name):
    for node in ast.walk(TREES[name]):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[1] if ast.get_docstring(node) and len(node.body) > 1 else node.body[0]
            length = node.end_lineno - first.lineno + 1
            assert length <= 75, f"{name}.{node.name} has {length} lines below its docstring"


def test_a_class_name_occurs_once():
    where = {}
    for name in OURS:
        for node in ast.walk(TREES[name]):
            if isinstance(node, ast.ClassDef):
                where.setdefault(node.name, []).append(name)
    assert {name: places for name, places in where.items() if len(places) > 1} == {}


NAMED_TUPLE = {"_asdict", "_replace", "_fields", "_make"}  # public, by typing.NamedTuple
PRIVATE = {  # names of torch's, Ray's and Python's own: why there is no public way
    "_global_node": "Ray: the folder of its log files on this host",
    "_actor_id": "Ray: by which its control service finds an actor; the state API needs Ray's dashboard",
    "_buffers": "a module's own buffers, to put another in its place",
    "_current_frames": "sys: public",
    "_execution_engine": "torch: a callback at the end of backward",
    "_current_autograd_node": "torch: whether a backward runs inside of another one",
    "_current_graph_task_id": "torch: which backward runs",
    "_exit": "os: public",
    "_ff_block": "torch: whether a subclass of a block has another pair of linear layers",
    "_foreach_add_": "torch: one call for all parameters",
    "_foreach_copy_": "the same",
    "_forward_hooks": "torch: whether a module has hooks, which it lists nowhere",
    "_forward_pre_hooks": "the same",
    "_internal_kv_del": "Ray: the map that all actors of a cluster share",
    "_internal_kv_get": "the same",
    "_internal_kv_put": "the same",
    "_internal_kv_list": "the same",
    "_new_shared_cuda": "torch: memory of another process, which its multiprocessing opens in the same way",
    "_share_cuda_": "the same",
    "_modules": "a module's own children, to put another in its place",
    "_optimizer_step_post_hooks": "torch: whether an optimizer has hooks, which it lists nowhere",
    "_optimizer_step_pre_hooks": "the same",
    "_overloadname": "torch: the operation of the same name that takes a generator",
    "_parameters": "a module's own parameters, to put another in its place",
    "_schema": "torch: which arguments an operation changes",
    "_values": "torch: values() of a sparse tensor needs the duplicates of an index to be added up first",
    "_version": "torch: whether a tensor was written",
}


def private_reads(tree):
    """Private names that a module reads of objects whose class is not in it; of packages that it imports too."""
    nodes = list(ast.walk(tree))
    own = {n.name for n in nodes if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))}
    own |= {n.attr for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)}
    own |= {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    for n in nodes:
        if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load) and re.fullmatch(r"_[a-z]\w*", n.attr):
            if getattr(n.value, "id", "") not in ("self", "cls") and n.attr not in own | NAMED_TUPLE:
                yield n.attr
        elif isinstance(n, ast.ImportFrom) and str(n.module).startswith("rayps"):
            yield from (alias.name for alias in n.names if re.fullmatch(r"_[a-z]\w*", alias.name))


def test_no_private_name_of_another_module_is_read():
    found = {(name, read) for name in OURS for read in private_reads(TREES[name])}
    assert {(name, read) for name, read in found if read not in PRIVATE} == set()
    assert {read for _, read in found} == set(PRIVATE), "remove what nobody reads any more"


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
    assert {f"rayps.{name}" for name in rayps.__all__} & set(FILES) == {"rayps.data", "rayps.loggers"} & set(FILES)


@pytest.mark.parametrize(
    "code",
    [
        "import rayps; rayps.Client",
        "import rayps; rayps.AllReduce; rayps.ParameterServer; rayps.Strategy; rayps.RaypsError",
        "import rayps.service.client; from rayps.service import scheduler, store, settings",
        "from rayps.service.local_ray import ray_daemon, ray_place",
        "from rayps.strategies import catalogue, job; catalogue.parse('parameter_server:staleness=none')",
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
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'api'}:{ROOT / 'client'}:{ROOT / 'chaos'}", "PATH": "/usr/bin:/bin"},
        timeout=60,
    )
    assert run.returncode == 0, run.stderr
    assert run.stderr.strip() == ""


@pytest.mark.parametrize("path", sorted(ROOT.glob("rayps/strategies/*.py")), ids=lambda path: path.stem)
def test_strategy_files_know_no_torch(path):
    used = {name.partition(".")[0] for name, _ in imports(ast.parse(path.read_text()))}
    assert not used & {*HEAVY, "threading", "socket", "asyncio", "subprocess"}
