"""What does not go together stands once: each row is refused with its reason, and nothing else says so beside it."""

import ast
import importlib.util
from pathlib import Path

import folders
import pytest
from rayps_client.errors import ConfigError

from rayps.core.strategy.refusals import TABLE, refuse
from rayps.core.strategy.strategy import Phase
from rayps.strategies.catalogue import parse
from rayps.strategies.job import JobSpec

ROOT = folders.TESTS.parent
# strategies whose own options are a row
OF_STRATEGIES = {
    ("backup", "compression"): "all_reduce:backup=1,compression=int8",
    ("backup", "shard"): "all_reduce:backup=1,shard=optimizer",
    ("backup", "staleness"): "parameter_server:backup=1,staleness=2",
    ("slice_backup", "no shard"): "all_reduce:slice_backup=true",
    ("slices of gradients", "compression"): "all_reduce:shard=gradients,compression=int8",
    ("slice_backup", "slices of parameters"): "all_reduce:shard=parameters,slice_backup=true",
}
# others that refuse two features in words of their own, and why
ELSEWHERE = {
    "rayps/core/strategy/replica.py": "the options of a strategy that a replica excludes, whatever they are",
    "rayps/runtime/checks/check_private_rows.py": "what data cannot be drawn by number",
}


def row_id(row):
    return f"{row.one} with {row.other}"


@pytest.mark.parametrize("row", TABLE, ids=row_id)
def test_each_row_is_refused_with_its_reason(row):
    """Only the two features are given, and the row is the first that refuses them."""
    values = {"shard": "optimizer", "replica": "pipeline", "strategy": "all_reduce", "shard_resources": 0.5}
    names = {row.one, row.other, "strategy", *(name for name in values if f"{{{name}" in row.says)}
    names |= {name for name in ("precision", "clip_norm", "accumulate") if f"{{{name}" in row.says + row.way}
    given = {name: values.get(name, 2) for name in names}
    with pytest.raises(ConfigError) as caught:
        raise row.error(given)
    assert row.why in caught.value.message or "{" in row.why
    assert caught.value.data["field"] == row.field
    with pytest.raises(ConfigError):
        refuse(given)


def test_one_feature_alone_is_allowed():
    for name in {row.one for row in TABLE} | {row.other for row in TABLE}:
        refuse({name: 2, "strategy": "all_reduce"})


def test_no_pair_stands_twice():
    pairs = [frozenset((row.one, row.other)) for row in TABLE]
    assert len(pairs) == len(set(pairs))


@pytest.mark.parametrize("pair", OF_STRATEGIES, ids=str)
def test_options_of_a_strategy_are_refused_where_it_is_parsed(pair):
    row = next(row for row in TABLE if (row.one, row.other) == pair)
    with pytest.raises(ConfigError) as caught:
        parse(OF_STRATEGIES[pair])
    assert row.why in caught.value.message and caught.value.data["field"] == row.field


def test_a_specification_refuses_what_its_job_excludes():
    """Before anything starts: `JobSpec.check` is asked by a POST and by `rayps.train`."""
    private = {"name": "all_reduce", "privacy": {"noise_multiplier": 1.0, "clip": 1.0, "delta": 1e-5}}
    for more, why in (({"profile": True}, "which rows or clients were drawn"), ({"server_group": "g"}, "other jobs")):
        with pytest.raises(ConfigError, match=why):
            JobSpec("w:W", private, **more).check()
    phases = [Phase(None, parse({"name": "parameter_server", "backup": 1})[0].strategy)]
    with pytest.raises(ConfigError, match="fixed servers only"):
        JobSpec("w:W", {"name": "parameter_server", "backup": 1}, workers=4, server_group="g").check(phases)


def test_the_page_of_limits_shows_the_table():
    path = ROOT / "scripts" / "write_refusals.py"
    spec = importlib.util.spec_from_file_location("write_refusals", path)
    written = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(written)
    page = written.FILE.read_text(encoding="utf-8")
    assert page == written.limits_page(page), "run scripts/write_refusals.py"


def test_nothing_else_says_that_two_features_cannot_be_combined():
    found = set()
    for path in sorted((ROOT / "rayps").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        raised = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "ConfigError"]
        if any("cannot be combined" in ast.unparse(each) for each in raised if each.args):
            found.add(str(Path(path).relative_to(ROOT)))
    assert found == set(ELSEWHERE)
