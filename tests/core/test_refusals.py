"""What does not go together stands once: each row is refused with its reason, and nothing else refuses two options."""

import ast
import importlib.util
import re
import string
from dataclasses import fields
from pathlib import Path

import folders
import pytest
from rayps_client.errors import ConfigError

from rayps.core.job.job_fields import TABLE as JOB_TABLE
from rayps.core.refusals.excluded_pair import Door, ExcludedPair
from rayps.core.refusals.table import TABLE, door_of, refuse, rows_by_feature
from rayps.core.strategy.elastic import ElasticWorkers
from rayps.core.strategy.nested_options import options_of
from rayps.privacy.options import PrivacySpec
from rayps.strategies.catalogue import CATALOGUE, REPLICAS, parse
from rayps.strategies.job import JobSpec
from rayps.workload.base import Workload

ROOT = folders.TESTS.parent


class AnyValue:
    """A value that every format of a row can show."""

    def __format__(self, how):
        return "given"

    def __repr__(self):
        return "given"

    __str__ = __repr__


def row_id(row):
    return f"{row.one} with {row.other}"


def features(row):
    """Only the two features of a row, and what its text shows."""
    shown = {name for _, name, _, _ in string.Formatter().parse(row.says + row.why + row.way) if name}
    return {name: AnyValue() for name in {row.one, row.other} | shown}


@pytest.mark.parametrize("row", TABLE, ids=row_id)
def test_each_row_is_refused_with_its_reason(row):
    given = features(row)
    with pytest.raises(ConfigError) as caught:
        refuse(given)
    assert caught.value.message == row.error(given).message and caught.value.data["field"] == row.field
    assert row.says and (row.why or row.way) and row.field


def test_one_feature_alone_is_allowed():
    for name in {row.one for row in TABLE} | {row.other for row in TABLE}:
        refuse({name: AnyValue(), "strategy": "all_reduce"})


def test_no_pair_stands_twice():
    pairs = [frozenset((row.one, row.other)) for row in TABLE]
    assert len(pairs) == len(set(pairs))


def test_of_several_rows_the_first_is_said():
    """The index by feature keeps the order of the table, whichever feature is looked at first."""
    rows = [ExcludedPair(one, "c", f"{one}: ", "no", "", one) for one in ("b", "a")]
    places = {name: [place for place, _ in found] for name, found in rows_by_feature(rows).items()}
    assert places == {"b": [0], "a": [1]}
    pairs = [("epochs", "steps"), ("backup", "compression"), ("privacy", "compression")]
    found = [next(row for row in TABLE if (row.one, row.other) == pair) for pair in pairs]
    for at in range(len(pairs)):
        given = {name: 1 for pair in reversed(pairs[at:]) for name in pair}
        with pytest.raises(ConfigError) as caught:
            refuse(given)
        assert caught.value.message == found[at].error(given).message


def test_a_specification_refuses_what_its_job_excludes():
    """Before anything starts: `JobSpec.check` is asked by a POST and by `rayps.train`."""
    private = {"name": "all_reduce", "privacy": {"noise_multiplier": 1.0, "clip": 1.0, "delta": 1e-5}}
    for more, why in (({"profile": True}, "which rows or clients were drawn"), ({"server_group": "g"}, "other jobs")):
        with pytest.raises(ConfigError, match=why):
            JobSpec("w:W", private, **more).check()
    with pytest.raises(ConfigError, match="fixed servers only"):
        JobSpec("w:W", {"name": "parameter_server", "backup": 1}, workers=4, server_group="g").check()


def test_each_row_is_known_at_some_door():
    assert {door_of(row) for row in TABLE} == {Door.RUN, Door.TRAIN, Door.REQUEST, Door.REQUEST | Door.TRAIN}


def test_the_page_of_limits_shows_the_table():
    path = ROOT / "scripts" / "write_refusals.py"
    spec = importlib.util.spec_from_file_location("write_refusals", path)
    written = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(written)
    page = written.FILE.read_text(encoding="utf-8")
    assert page == written.limits_page(page), "run scripts/write_refusals.py"


# ---- nothing else refuses two options

# what two options of a job may be called in code and in texts; words that are more often something else are left out
_KINDS = (*CATALOGUE.values(), *REPLICAS.values())
OPTIONS = {each.name for each in JOB_TABLE} | {each.name for kind in _KINDS for each in options_of(kind)}
OPTIONS |= {each.name for kind in (ElasticWorkers, PrivacySpec) for each in fields(kind)}
OPTIONS |= {name for name in vars(Workload) if name in Workload.__annotations__}
OPTIONS |= {"adaptive", "buffered", "consistency", "joining", "own_copies", "privacy_spec", "private", "tables"}
OPTIONS -= {
    "by",
    "clients",
    "code",
    "data",
    "name",
    "noise",
    "plan",
    "progress",
    "size",
    "strategy",
    "workers",
    "workload",
}
# rooms whose errors are about arguments of commands, benches and files, and not about a job
OTHERS = ("bench", "cli", "comm", "data", "ps/manager", "service/code", "service/groups")
# errors outside the table that name two options, by file and function, and why each is no pair of features
LIMITS = {
    "core/pipeline/schedule.py:check": "numbers of one option, replica=pipeline(...)",
    "core/rows/phase_rounds.py:phase_ends": "phases, which have numbers of their own",
    "core/strategy/elastic.py:check": "a number that must be at least another",
    "core/strategy/replica.py:__post_init__": "numbers of one option, replica=pipeline(...)",
    "federated/population/options.py:check_replies": "a number that must be at least another",
    "parallel/division/divide.py:_boundaries": "a number of the model's layers",
    "privacy/accountant.py:find_noise": "numbers for which no noise exists",
    "privacy/adaptive_clip.py:update_noise": "a number that must be above another",
    "privacy/budget.py:must_allow_one": "a budget that is spent",
    "privacy/ledger.py:_check_unit": "what a folder has",
    "privacy/noise_shares.py:share_noise": "a number that must be above another",
    "privacy/options.py:__post_init__": "an option that must be given",
    "runtime/checks/preflight.py:_count_rows_of_workers": "a number that must be at least another",
    "runtime/checks/preflight.py:_divide": "a number that must be at least another",
    "runtime/checks/preflight.py:_check_batchnorm": "a layer of the model",
    "runtime/own_loop/view.py:sync_optimizer_and_buffers": "what the workers' optimizers hold",
    "service/store.py:scale": "a number outside of a job's range",
    "strategies/diloco.py:__post_init__": "a number that must be below another",
}
_WAY_OUT = re.compile(r": (?:give|use|leave|set|raise|lower|return)\b|; ")
_PHRASE = re.compile(r"cannot be combined|does not support|were both given|leave one of|leave out one of")


def refusals_of_two(source):
    """(function, options) of each ConfigError about two options: by what its conditions read, or by what it says."""
    found = []

    def walk(node, function, conditions):
        for name, value in ast.iter_fields(node):
            for each in value if isinstance(value, list) else [value]:
                if not isinstance(each, ast.AST):
                    continue
                asked = (
                    [*conditions, node.test] if isinstance(node, (ast.If, ast.IfExp)) and name != "test" else conditions
                )
                inside = each.name if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef)) else function
                asked = [] if inside is not function else asked
                if isinstance(each, ast.Call) and getattr(each.func, "id", "") == "ConfigError" and each.args:
                    text = _WAY_OUT.split(ast.unparse(each.args[0]))[0]
                    read = options_read(asked)
                    said = {option for option in OPTIONS if re.search(rf"\b{option}\b(?: is |=| and | or )", text)}
                    if max(len(read), len(said)) > 1 or _PHRASE.search(ast.unparse(each.args[0])):
                        found.append((inside, sorted(read | said)))
                walk(each, inside, asked)

    walk(ast.parse(source), "", [])
    return found


def options_read(conditions):
    """The options that conditions read: as attributes, names, or texts, as in getattr."""
    words = set()
    for node in (inner for condition in conditions for inner in ast.walk(condition)):
        words |= {getattr(node, "attr", None), getattr(node, "id", None)}
        words |= {node.value} if isinstance(node, ast.Constant) and isinstance(node.value, str) else set()
    return words & OPTIONS


def test_nothing_else_refuses_two_options():
    found = {}
    for path in sorted((ROOT / "rayps").rglob("*.py")):
        name = str(path.relative_to(ROOT / "rayps"))
        if not name.startswith(OTHERS):
            for function, options in refusals_of_two(path.read_text(encoding="utf-8")):
                found[f"{name}:{function}"] = options
    assert {place: found[place] for place in found if place not in LIMITS} == {}, (
        "an error about two options: give the pair a row in rayps/core/refusals, and ask `refuse`"
    )
    assert set(LIMITS) <= set(found), "an entry that nothing needs"


@pytest.mark.parametrize(
    "planted",
    [
        "if self.shard is not None and self.compression is not None:\n    raise ConfigError('no', field='shard')",
        "if spec.resume:\n    if spec.start_from:\n        raise ConfigError('no', field='resume')",
        "if getattr(owner, 'backup') and topology.replica:\n    raise ConfigError('no', field='backup')",
        "if wrong:\n    raise ConfigError(f'epochs is {a} and steps is {b}: give one', field='epochs')",
        "found = ConfigError('privacy cannot be combined with this', field='privacy')",
        "why = 'x'\nreturn ConfigError(why, field='x') if given.upload and given.secure else None",
    ],
)
def test_the_scan_finds_a_refusal_written_elsewhere(planted):
    [(function, _)] = refusals_of_two("def check(self):\n" + "\n".join(f"    {line}" for line in planted.split("\n")))
    assert function == "check"


def test_the_scan_passes_a_limit_of_one_option():
    assert not refusals_of_two(
        "def check(self):\n    if self.backup < 0:\n        raise ConfigError(f'backup is {b}: give shard')"
    )


def test_a_strategy_of_the_catalogue_is_refused_where_it_is_parsed():
    for text in ("all_reduce:backup=1,compression=int8", "fedavg:local_epochs=1,local_steps=1", "ditto:finetune=1"):
        with pytest.raises(ConfigError):
            parse(text)


def test_the_table_is_in_files_of_one_idea_each():
    folder = Path(ROOT / "rayps" / "core" / "refusals")
    assert max(len(path.read_text(encoding="utf-8").splitlines()) for path in folder.glob("*.py")) < 500
