"""The catalogue of strategies: find a strategy by name, parse it from text, YAML or JSON, and write it as JSON.

A user's own strategy is named like a workload, "module:Class" or "path/file.py:Class", followed by its options:
"easgd:EASGD:rho=0.1". To parse such a name, the user's file must run, so `parse` accepts one only together with the
folder of the file. `own_names` finds such names without running a file.

A new strategy of rayps is a file of this folder and a row of `CATALOGUE`, and `rayps/__init__.py` exports its class.

The module does not import torch, so that the job service can check strategies without torch.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NotRequired, TypeAlias, TypedDict, TypeGuard, TypeVar

from rayps_client.errors import ConfigError, WorkloadError
from rayps_client.values import Json, JsonObject, Keywords, is_json

from rayps.core.job.user_module import Finder, broken
from rayps.core.refusals.table import refuse
from rayps.core.rows.phase_rounds import phase_ends
from rayps.core.spelling import near
from rayps.core.strategy.elastic import explain_misplaced
from rayps.core.strategy.nested_options import Option, options_of
from rayps.core.strategy.replica import Pipeline, Replica, TensorParallel
from rayps.core.strategy.strategy import Phase, ShardView, StrategyView, WorkerView
from rayps.core.strategy.strategy_families import LOCAL_UPDATES, SERVER_STEPS, SYNC_GRADIENTS, has_remote_clients
from rayps.core.strategy.text import form, parse_scalar
from rayps.core.strategy.topology import features_of, is_private
from rayps.federated.population.attack_spec import attack_with
from rayps.federated.rules.robust_rules import rule_with
from rayps.federated.strategy_interface import FederatedView, Federation
from rayps.privacy.options import privacy_in
from rayps.strategies.admm import ADMM
from rayps.strategies.all_reduce import AllReduce
from rayps.strategies.base import Strategy
from rayps.strategies.diloco import DiLoCo
from rayps.strategies.ditto import Ditto
from rayps.strategies.downpour import Downpour
from rayps.strategies.fedavg import FedAvg
from rayps.strategies.fedbuff import FedBuff
from rayps.strategies.fedopt import FedAdagrad, FedAdam, FedAvgM, FedYogi
from rayps.strategies.fedper import FedPer
from rayps.strategies.fedprox import FedProx
from rayps.strategies.fedrep import FedRep
from rayps.strategies.hogwild import Hogwild
from rayps.strategies.hybrid import Hybrid
from rayps.strategies.local_sgd import LocalSGD
from rayps.strategies.parallel_sgd import ParallelSGD
from rayps.strategies.parameter_server import ParameterServer
from rayps.strategies.scaffold import Scaffold
from rayps.strategies.statistics import Statistics

__all__ = [
    "CATALOGUE",
    "REPLICAS",
    "Phase",
    "Replica",
    "ShardView",
    "Strategy",
    "WorkerView",
    "catalogue",
    "check_for_loop",
    "described",
    "federations",
    "federations_in",
    "has_real_clients",
    "has_secure_sums",
    "notes_of",
    "own_names",
    "parse",
    "parse_for_loop",
    "phase_ends",
    "sendable",
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
        FedPer,
        FedRep,
        Statistics,
    )
}
REPLICAS: dict[str, type[Replica]] = {kind.name: kind for kind in (Pipeline, TensorParallel)}
# the kinds of replicas that an option takes, by the option's name
_NESTED: dict[str, tuple[str, ...]] = {"replica": tuple(REPLICAS), "stage": (TensorParallel.name,)}
_Kind = TypeVar("_Kind", Strategy, Replica)
# a strategy as a user writes it: see `parse`
StrategySpec: TypeAlias = Strategy | Replica | Json | Sequence["StrategySpec"] | Mapping[str, "StrategySpec"]
_OWN = re.compile(r"(?P<place>[\w./~-]+):(?P<kind>[^\W\d]\w*)(?=$|:|\()")  # module:Class or file.py:Class
FINDER = Finder("strategy", "strategies", "rayps.Strategy")


class OptionDescription(TypedDict):
    """An option of a strategy, as JSON-ready data."""

    name: str
    type: str
    default: Json
    of: NotRequired[list[str]]  # the kinds of replicas that the option takes, if it takes a replica


class StrategyDescription(TypedDict):
    """A strategy's name, summary and options, as JSON-ready data, for help texts and the dashboard."""

    name: str
    summary: str
    options: list[OptionDescription]


def parse(given: StrategySpec, folder: str | Path | None = None) -> list[Phase]:
    """Parse a strategy as a user wrote it, into the phases of a run. Users' own strategies are searched in `folder`.

    Accepted are a Strategy; the text form `parameter_server:staleness=3,shards=2`, or several such texts joined by ` >
    ` with their epochs in front (`2*parameter_server:staleness=none > all_reduce`); the wire form `{"name": ...,
    option: ...}`; and lists of (epochs, strategy) or `{"epochs": n, "strategy": ...}`. A replica of several workers is
    an option of a strategy: `all_reduce:replica=pipeline(stages=4,micro_batches=8)`, `{"name": "all_reduce", "replica":
    {"name": "pipeline", "stages": 4}}`. A replica without a strategy means all_reduce with that replica.

    Raises:
        ConfigError: there is no such strategy or option, or `given` names a user's own strategy and `folder` is None.
    """
    FINDER.forget()
    phases = [_phase(item, folder) for item in _items(given)]
    for phase in phases[:-1]:
        if phase.epochs is None:
            raise ConfigError(
                "only the last strategy of a list may leave out its number of epochs: "
                "write [(2, ParameterServer()), AllReduce()]",
                field="strategy",
            )
    declared = (phase.strategy.federation for phase in phases if isinstance(phase.strategy, FederatedView))
    secure = {each.secure is not None for each in declared if each.joining is not None}
    if len(secure) > 1:
        raise ConfigError(
            "some phases of this job are secure and others are not: the others would show each update. Give all "
            "phases secure=...",
            field="secure",
        )
    return phases


def own_names(given: StrategySpec) -> list[str]:
    """Return the names ("module:Class") of the user's own strategies in `given`, without reading their files.

    Raises:
        ConfigError: `given` is not a strategy in any form.
    """
    found = [_form(_split_epochs(item)[1]) for item in _items(given)]
    return [item["name"] for item in found if isinstance(item, dict) and _is_own(item.get("name"))]


def notes_of(given: StrategySpec) -> list[str]:
    """Return what a user is told about the options of federated strategies, once each; none of a user's own strategy.

    Raises:
        ConfigError: `given` cannot be parsed.
    """
    notes = [each.client_side.note for each in federations(given)]
    return list(dict.fromkeys(note for note in notes if note is not None))


def has_secure_sums(given: StrategySpec) -> bool:
    """Return whether updates are summed under masks. Raises ConfigError if `given` cannot be parsed."""
    return any(each.secure is not None for each in federations(given))


def federations(given: StrategySpec) -> list[Federation]:
    """Return what the federated strategies of a job declare; none of a user's own strategy.

    Raises:
        ConfigError: `given` cannot be parsed.
    """
    return [] if own_names(given) else federations_in(parse(given))


def federations_in(phases: Sequence[Phase]) -> list[Federation]:
    """Return what the federated strategies of these phases declare."""
    return [phase.strategy.federation for phase in phases if isinstance(phase.strategy, FederatedView)]


def has_real_clients(given: StrategySpec) -> bool:
    """Return whether clients of a strategy are remote; False if it is a user's own, or cannot be parsed."""
    try:
        return not own_names(given) and any(has_remote_clients(phase.strategy) for phase in parse(given))
    except ConfigError:
        return False  # the service refuses it, with the reason


def _items(given: StrategySpec) -> list[StrategySpec]:
    """Return the phases as the user wrote them, not parsed yet."""
    if isinstance(given, str) and ">" in given:
        whole, given = given, [part.strip() for part in given.split(">")]
        if "" in given:
            raise ConfigError(
                f"strategy {given.index('') + 1} of {len(given)} in {whole!r} is empty: write one on each side of >, "
                "as in 2*parameter_server:staleness=none > all_reduce",
                field="strategy",
            )
    if not isinstance(given, list):
        return [given]
    if not given:
        raise ConfigError("strategy is an empty list: give at least one of " + _names(), field="strategy")
    return list(given)


_WITH_DATA = ("admm", "parallel_sgd")


def parse_for_loop(given: StrategySpec) -> StrategyView:
    """Parse the strategy of a training loop that a user wrote (`rayps.wrap`).

    Raises:
        ConfigError: `given` cannot be parsed, changes the strategy during the run, or works only in a loop of rayps.
    """
    return check_for_loop(parse(given, Path.cwd()))


def check_for_loop(phases: Sequence[Phase]) -> StrategyView:
    """Return the strategy of a training loop that a user wrote, which is the only one of `phases`.

    Raises:
        ConfigError: there are several phases, or the strategy works only in a loop of rayps.
    """
    given: dict[str, Json] = {"several phases": len(phases)} if len(phases) > 1 else {}
    phase = phases[0]
    chosen = phase.strategy
    private = privacy_in(chosen) is not None or is_private(chosen)
    found: dict[str, Json] = {
        "privacy of any kind": private,
        "rounds of rayps alone": chosen.loop not in (SYNC_GRADIENTS, SERVER_STEPS, LOCAL_UPDATES),
        "data or the end of the run": chosen.name in _WITH_DATA,
    }
    given |= {name: value for name, value in found.items() if value}
    refuse(features_of(chosen.topology) | given | {"strategy": chosen.name, "a loop of your own": True})
    return chosen


def wire(phases: list[Phase]) -> Json:
    """Return the phases as JSON-ready data. For one phase without epochs, return the strategy's data alone."""
    if len(phases) == 1 and phases[0].epochs is None:
        return _wire(phases[0].strategy)
    return [{"epochs": phase.epochs, "strategy": _wire(phase.strategy)} for phase in phases]


def sendable(given: StrategySpec, folder: str | Path | None = None) -> Json:
    """Convert a strategy, in any form that `parse` accepts, to JSON-ready data that can be sent to the service.

    Texts, dicts, and lists of texts and dicts are returned unchanged. The class of a user's own strategy object must be
    in a file that can be imported from `folder`.

    Raises:
        ConfigError: `given` is not a strategy, or an object's class is defined in the running program or in a function.
    """
    if isinstance(given, str) or (isinstance(given, (dict, list)) and is_json(given)):
        return given
    phases = parse(given, folder)
    for phase in phases:
        kind = type(phase.strategy)
        if kind.__module__.partition(".")[0] != "rayps" and not _is_own(_named(phase.strategy)):
            raise ConfigError(
                f"strategy is an object of class {kind.__name__}, which the service cannot import from a file: put the "
                f"class into a file of working_dir and give its name, as in 'file.py:{kind.__name__}'",
                field="strategy",
            )
    return wire(phases)


def described(name: str, kind: type[Strategy] | type[Replica]) -> StrategyDescription:
    """Return a strategy's name, summary and options as JSON-ready data."""
    return {
        "name": name,
        "summary": ((kind.__doc__ or "").strip().splitlines() or [""])[0],
        "options": [_option(f) for f in options_of(kind)],
    }


def _option(field: Option) -> OptionDescription:
    kind = "Any" if "Json" in str(field.type) else str(field.type)  # any JSON value: the strategy checks it itself
    found: OptionDescription = {"name": field.name, "type": kind, "default": _default(field)}
    if field.name in _NESTED:
        found["of"] = list(_NESTED[field.name])
    return found


def catalogue() -> list[StrategyDescription]:
    """Return the name, summary and options of every strategy, for help texts and the dashboard.

    The list ends with the kinds of replicas of several workers. As a strategy, the name of a replica means all_reduce
    with that replica. The description of an option that takes a replica lists the possible kinds in `of`.
    """
    kinds: dict[str, type[Strategy] | type[Replica]] = {**CATALOGUE, **REPLICAS}
    return [described(name, kind) for name, kind in kinds.items()]


def _phase(item: StrategySpec, folder: str | Path | None) -> Phase:
    epochs, item = _split_epochs(item)
    if epochs is not None and (isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 1):
        raise ConfigError(
            f"a phase has {epochs!r} as its number of epochs: give a whole number of at least 1", field="strategy"
        )
    return Phase(epochs, _strategy(item, folder))


def _split_epochs(item: StrategySpec) -> tuple[StrategySpec, StrategySpec]:
    """Return a phase's number of epochs (None if not given), and its strategy as the user wrote it."""
    if isinstance(item, tuple) and len(item) == 2:
        return item[0], item[1]
    if isinstance(item, dict) and "strategy" in item:
        unknown = set(item) - {"epochs", "strategy"}
        if unknown:
            raise ConfigError(
                f"a phase has no field {sorted(unknown)[0]!r}: its fields are epochs and strategy", field="strategy"
            )
        return item.get("epochs"), item["strategy"]
    if isinstance(item, str) and "*" in item.partition("(")[0].partition(":")[0]:
        count, _, item = item.partition("*")
        return parse_scalar(count), item
    return None, item


def _form(item: StrategySpec) -> StrategySpec:
    """Convert a strategy's text form to the wire form. Return anything else unchanged."""
    if not isinstance(item, str):
        return item
    own = _OWN.match(item.strip())
    if own is None or own["place"].replace("-", "_") in {*CATALOGUE, *REPLICAS}:
        return form(item)
    options = form("-" + item.strip()[own.end() :])
    return options | {"name": f"{own['place']}:{own['kind']}"}


def _is_own(name: StrategySpec) -> TypeGuard[str]:
    return isinstance(name, str) and _OWN.fullmatch(name) is not None


def _strategy(item: StrategySpec, folder: str | Path | None) -> Strategy:
    if isinstance(item, Strategy):
        return item
    if isinstance(item, Replica):
        return AllReduce(replica=item)
    if isinstance(item, type) and issubclass(item, Strategy):
        raise ConfigError(
            f"strategy is the class {item.__name__}: write {item.__name__}(), or its name {item.name!r}",
            field="strategy",
        )
    item = _form(item)
    if not isinstance(item, dict) or not isinstance(item.get("name"), str):
        raise ConfigError(
            f"strategy {item!r} cannot be read: write a name such as 'all_reduce', or "
            '{"name": "parameter_server", "staleness": 3}',
            field="strategy",
        )
    name = item["name"].replace("-", "_")
    if name in REPLICAS:
        return AllReduce(replica=_build("replica", REPLICAS[name], item))
    if _is_own(item["name"]):
        return _own(item, folder)
    if name not in CATALOGUE:
        raise ConfigError(
            f"there is no strategy {item['name']!r}{near(name, [*CATALOGUE, *REPLICAS])}: the strategies are "
            f"{', '.join(CATALOGUE)}, and for models too large for one worker {', '.join(REPLICAS)}; your own strategy "
            "is written module:Class or file.py:Class",
            field="strategy",
        )
    return _build("strategy", CATALOGUE[name], item)


def _own(item: Mapping[str, StrategySpec], folder: str | Path | None) -> Strategy:
    """Import and construct a user's own strategy.

    Raises:
        ConfigError: the class cannot be found, its file fails, or it refuses its options.
    """
    target = str(item["name"])
    if folder is None:
        raise ConfigError(
            f"strategy {target!r} is a class in your own file, but no working directory was given in which to find it",
            field="strategy",
        )
    try:
        kind: type[Strategy] = FINDER.find(target, folder, Strategy)
    except WorkloadError as error:
        message = error.message
        known = near(target.partition(":")[0].replace("-", "_"), [*CATALOGUE, *REPLICAS])
        raise ConfigError(f"strategy {target!r}: {message}{known}", field="strategy") from error
    try:
        return _build("strategy", kind, item)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"strategy {broken(f'{target}()', error).message}", field="strategy") from error


def _build(what: str, kind: type[_Kind], item: Mapping[str, StrategySpec]) -> _Kind:
    known = [f.name for f in options_of(kind)]
    given = {key: value for key, value in item.items() if key != "name"}
    for key in given:
        if key not in known:
            has = f"its options are {', '.join(known)}" if known else "it has no options"
            if not dataclasses.is_dataclass(kind):
                has = "it has no options: only the fields of a @dataclass(frozen=True) are options"
            has += _hint_other_owner(str(key), known)
            raise ConfigError(
                f"{what} {kind.name} has no option {key!r}{near(str(key), known)}: {has}", field="strategy"
            )
    options: Keywords = {key: _replica(key, value) if key in _NESTED else value for key, value in given.items()}
    return kind(**options)


def _hint_other_owner(key: str, known: list[str]) -> str:
    """Return the end of an error: a hint which strategies or replicas have the option `key`, or "" if none has it."""
    if explain_misplaced(key) is not None:
        own = f"; {key} is an option of the workers, beside the strategy: elastic={{{key!r}: ...}}, --elastic {key}=..."
        return own + ("; or of replica=pipeline(...)" if key == "balance" and "replica" in known else "")
    if "replica" in known and any(key == f.name for replica in REPLICAS.values() for f in options_of(replica)):
        return f"; {key} is an option of replica, written in parentheses: replica=pipeline(stages=4,micro_batches=8)"
    if "rule" in known:
        for option, found in (("rule", rule_with(key)), ("attack", attack_with(key))):
            if found is not None:
                return f"; {key} is an option of {option}, written in parentheses: {option}={found}"
    takers = [name for name, kind in CATALOGUE.items() if key in [f.name for f in options_of(kind)]]
    return f"; {key} is an option of {', '.join(takers)}" if takers else ""


def _replica(option: str, item: StrategySpec) -> Replica | None:
    """Parse the value of an option that takes a replica: None, a Replica, its text form or its wire form."""
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
        is_a = ", which is a strategy" if name in CATALOGUE else near(name, known)
        raise ConfigError(
            f"{option} is {item['name']!r}{is_a}: give one of {', '.join(known)} with its options", field="strategy"
        )
    return _build("replica", REPLICAS[name], item)


def _wire(given: StrategyView) -> JsonObject:
    return given.to_wire() | {"name": _named(given)}


def _named(given: StrategyView) -> str:
    """Return the name by which `parse` finds the strategy's class.

    For a class that is not defined in a file, return the strategy's `name`, which `parse` does not find.
    """
    module = type(given).__module__
    if module == "__main__" or module.partition(".")[0] == "rayps" or "<locals>" in type(given).__qualname__:
        return given.name
    return FINDER.target_of(type(given))


def _default(field: Option) -> Json:
    """Return an option's default value, converted to text if JSON has no such type."""
    if field.default is dataclasses.MISSING:
        return None
    default = field.default
    return default if default is None or isinstance(default, (bool, int, float, str, tuple)) else str(default)


def _names() -> str:
    return ", ".join([*CATALOGUE, *REPLICAS])
