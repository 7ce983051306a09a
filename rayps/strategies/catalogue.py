"""The catalogue of strategies: find one by name, read it from text, YAML or JSON, write it back.

No torch here, so that the job service can check a strategy without loading any.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from rayps.core.calendar import phase_ends
from rayps.core.errors import ConfigError
from rayps.core.families import SERVER_STEPS, SYNC_GRADIENTS
from rayps.core.nested_options import options_of
from rayps.core.replica import Pipeline, Replica, TensorParallel
from rayps.core.spelling import near
from rayps.core.strategy import Phase, ShardView, StrategyView, WorkerView
from rayps.core.text import form, scalar
from rayps.core.topology import servers_of
from rayps.federated.population.attack_spec import attack_with
from rayps.federated.robust_rules import rule_with
from rayps.strategies.admm import ADMM
from rayps.strategies.all_reduce import AllReduce
from rayps.strategies.base import Strategy
from rayps.strategies.diloco import DiLoCo
from rayps.strategies.ditto import Ditto
from rayps.strategies.downpour import Downpour
from rayps.strategies.fedavg import FedAvg
from rayps.strategies.fedbuff import FedBuff
from rayps.strategies.fedopt import FedAdagrad, FedAdam, FedAvgM, FedYogi
from rayps.strategies.fedprox import FedProx
from rayps.strategies.hogwild import Hogwild
from rayps.strategies.hybrid import Hybrid
from rayps.strategies.local_sgd import LocalSGD
from rayps.strategies.parallel_sgd import ParallelSGD
from rayps.strategies.parameter_server import ParameterServer
from rayps.strategies.scaffold import Scaffold

__all__ = [
    "CATALOGUE",
    "REPLICAS",
    "Phase",
    "Replica",
    "ShardView",
    "Strategy",
    "WorkerView",
    "catalogue",
    "for_a_loop",
    "parse",
    "phase_ends",
    "wire",
]

CATALOGUE: dict[str, type[Strategy]] = {
    kind.name: kind
    for kind in (
        AllReduce,
        ParameterServer,
        Hybrid,
        Downpour,
        Hogwild,
        LocalSGD,
        ParallelSGD,
        DiLoCo,
        ADMM,
        FedAvg,
        FedProx,
        Scaffold,
        FedAvgM,
        FedAdagrad,
        FedAdam,
        FedYogi,
        FedBuff,
        Ditto,
    )
}
REPLICAS: dict[str, type[Replica]] = {kind.name: kind for kind in (Pipeline, TensorParallel)}
_NESTED: dict[str, tuple[str, ...]] = {"replica": tuple(REPLICAS), "stage": (TensorParallel.name,)}  # by option
_Kind = TypeVar("_Kind", Strategy, Replica)


def parse(given: Any) -> list[Phase]:
    """Read what a user wrote as the phases of a run.

    Accepts a Strategy, the text form `parameter_server:staleness=3,shards=2` (several joined by ` > ` with
    their epochs in front: `2*parameter_server:staleness=none > all_reduce`), the wire form
    `{"name": ..., option: ...}`, and lists of (epochs, strategy) or `{"epochs": n, "strategy": ...}`.
    What a replica is nests in each of them: `all_reduce:replica=pipeline(stages=4,micro_batches=8)`,
    `{"name": "all_reduce", "replica": {"name": "pipeline", "stages": 4}}`; alone, it learns by all_reduce.

    Raises:
        ConfigError: naming the strategies or options that there are.
    """
    if isinstance(given, str) and ">" in given:
        whole, given = given, [part.strip() for part in given.split(">")]
        if "" in given:
            raise ConfigError(
                f"strategy {given.index('') + 1} of {len(given)} in {whole!r} is empty: write one on each side of >, "
                "as in 2*parameter_server:staleness=none > all_reduce",
                field="strategy",
            )
    if not isinstance(given, list):
        given = [given]
    if not given:
        raise ConfigError("strategy is an empty list: give at least one of " + _names(), field="strategy")
    phases = [_phase(item) for item in given]
    for phase in phases[:-1]:
        if phase.epochs is None:
            raise ConfigError(
                "only the last strategy of a list may leave out its number of epochs: "
                "write [(2, ParameterServer()), AllReduce()]",
                field="strategy",
            )
    return phases


def for_a_loop(given: Any) -> StrategyView:
    """The strategy of a training loop of one's own, read as `parse` does.

    Raises:
        ConfigError: it cannot be read, changes during the run, or needs more of a worker than such a loop has.
    """
    phases = parse(given)
    if len(phases) > 1:
        raise ConfigError("wrap takes one strategy: a loop of your own changes it by wrapping again", field="strategy")
    chosen = phases[0].strategy
    topology, servers = chosen.topology, servers_of(chosen)
    own = servers is not None and servers.own_copies
    if topology.replica is not None or own or chosen.loop not in (SYNC_GRADIENTS, SERVER_STEPS):
        what = chosen.name if topology.replica is None else f"{chosen.name} with a replica of several workers"
        raise ConfigError(f"wrap cannot follow {what}: use rayps.train, which makes the loop", field="strategy")
    return chosen


def wire(phases: list[Phase]) -> Any:
    """The phases as JSON-ready data; one phase without epochs is its strategy alone."""
    if len(phases) == 1 and phases[0].epochs is None:
        return phases[0].strategy.to_wire()
    return [{"epochs": phase.epochs, "strategy": phase.strategy.to_wire()} for phase in phases]


def catalogue() -> list[dict[str, Any]]:
    """Every strategy by name, with its summary and its options, for help texts and the dashboard.

    After the strategies what a replica of several workers may be: such a name alone is that replica under all_reduce.
    An option that takes one of them says so in `of`.
    """
    kinds: dict[str, type[Strategy] | type[Replica]] = {**CATALOGUE, **REPLICAS}
    return [
        {
            "name": name,
            "summary": (kind.__doc__ or "").strip().splitlines()[0],
            "options": [
                {"name": f.name, "type": str(f.type), "default": f.default}
                | ({"of": list(_NESTED[f.name])} if f.name in _NESTED else {})
                for f in options_of(kind)
            ],
        }
        for name, kind in kinds.items()
    ]


def _phase(item: Any) -> Phase:
    epochs: int | None = None
    if isinstance(item, tuple) and len(item) == 2:
        epochs, item = item
    elif isinstance(item, dict) and "strategy" in item:
        unknown = set(item) - {"epochs", "strategy"}
        if unknown:
            raise ConfigError(
                f"a phase has no field {sorted(unknown)[0]!r}: write epochs and strategy", field="strategy"
            )
        epochs, item = item.get("epochs"), item["strategy"]
    elif isinstance(item, str) and "*" in item.partition("(")[0].partition(":")[0]:
        count, item = item.split("*", 1)
        epochs = scalar(count)
    if epochs is not None and (isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 1):
        raise ConfigError(f"a phase has epochs {epochs!r}: give a whole number of at least 1", field="strategy")
    return Phase(epochs, _strategy(item))


def _strategy(item: Any) -> Strategy:
    if isinstance(item, Strategy):
        return item
    if isinstance(item, Replica):
        return AllReduce(replica=item)
    if isinstance(item, type) and issubclass(item, Strategy):
        raise ConfigError(
            f"strategy is the class {item.__name__}: write {item.__name__}(), or its name {item.name!r}",
            field="strategy",
        )
    if isinstance(item, str):
        item = form(item)
    if not isinstance(item, dict) or not isinstance(item.get("name"), str):
        raise ConfigError(
            f"strategy {item!r} cannot be read: write a name such as 'all_reduce', or "
            '{"name": "parameter_server", "staleness": 3}',
            field="strategy",
        )
    name = item["name"].replace("-", "_")
    if name in REPLICAS:
        return AllReduce(replica=_build("replica", REPLICAS, item))
    if name not in CATALOGUE:
        raise ConfigError(
            f"there is no strategy {item['name']!r}{near(name, [*CATALOGUE, *REPLICAS])}: there are "
            f"{', '.join(CATALOGUE)}, and for models larger than a worker {', '.join(REPLICAS)}",
            field="strategy",
        )
    return _build("strategy", CATALOGUE, item)


def _build(what: str, kinds: Mapping[str, type[_Kind]], item: dict[str, Any]) -> _Kind:
    kind = kinds[item["name"].replace("-", "_")]
    known = [f.name for f in options_of(kind)]
    given = {key: value for key, value in item.items() if key != "name"}
    for key in given:
        if key not in known:
            has = f"its options are {', '.join(known)}" if known else "it has none"
            has += _elsewhere(str(key), known)
            raise ConfigError(
                f"{what} {kind.name} has no option {key!r}{near(str(key), known)}: {has}", field="strategy"
            )
    return kind(**{key: _replica(key, value) if key in _NESTED else value for key, value in given.items()})


def _elsewhere(key: str, known: list[str]) -> str:
    """Where an option belongs that a strategy with these options does not have, if it is known."""
    if "replica" in known and any(key == f.name for replica in REPLICAS.values() for f in options_of(replica)):
        return "; a replica's own stand in parentheses, as in replica=pipeline(stages=4,micro_batches=8)"
    if "rule" in known:
        for option, found in (("rule", rule_with(key)), ("attack", attack_with(key))):
            if found is not None:
                return f"; {key} stands in the parentheses of what it belongs to, as in {option}={found}"
    takers = [name for name, kind in CATALOGUE.items() if key in [f.name for f in options_of(kind)]]
    return f"; {key} is an option of {', '.join(takers)}" if takers else ""


def _replica(option: str, item: Any) -> Any:
    """What stands in an option that takes a replica: none, the object itself, its text or its wire form."""
    if item is None or isinstance(item, Replica):
        return item
    if isinstance(item, str):
        item = form(item)
    known = _NESTED[option]
    if not isinstance(item, dict) or not isinstance(item.get("name"), str):
        raise ConfigError(
            f"{option} is {item!r}: give none, or one of {', '.join(known)} with its options, as in "
            f"{known[0]}({options_of(REPLICAS[known[0]])[0].name}=2)",
            field="strategy",
        )
    name = item["name"].replace("-", "_")
    if name not in known:
        is_a = " is a strategy" if name in CATALOGUE else f" is none{near(name, known)}"
        raise ConfigError(
            f"{option} {item['name']!r}{is_a}: a {option} is made of {', '.join(known)}", field="strategy"
        )
    return _build("replica", REPLICAS, item)


def _names() -> str:
    return ", ".join([*CATALOGUE, *REPLICAS])
