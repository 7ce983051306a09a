"""How users write the workers of a job: one number, a range, and the options beside them; and what errors say."""

from __future__ import annotations

from pathlib import Path

import pytest
from rayps_client.errors import ConfigError

from rayps.core.strategy.elastic import ElasticWorkers
from rayps.service import job_file
from rayps.strategies.catalogue import parse, wire
from rayps.strategies.job import JobSpec, elastic_fields


@pytest.mark.parametrize("workers", [(2, 8), [2, 8], "2..8"])
def test_the_forms_of_a_range_are_equal(workers) -> None:
    assert elastic_fields(workers, {"cooldown": 5}) == {"workers": 2, "elastic": ElasticWorkers(8, cooldown=5)}


def test_options_that_a_fixed_number_has_need_no_most() -> None:
    assert elastic_fields(4, {"balance": True}) == {"workers": 4, "elastic": ElasticWorkers(4, balance=True)}
    assert elastic_fields(4, {"global_batch": 64}) == {"workers": 4, "elastic": ElasticWorkers(4, global_batch=64)}
    with pytest.raises(ConfigError, match="elastic lacks most"):
        elastic_fields(4, {"cooldown": 5})


@pytest.mark.parametrize("workers", ["2..", "8..2", [1], [1, 2.5], [0, 3], [2, 4, 8]])
def test_other_forms_are_refused_with_the_way_out(workers) -> None:
    with pytest.raises(ConfigError, match=r"the least and the most of an elastic job") as caught:
        elastic_fields(workers, None)
    assert caught.value.data["field"] == "workers"


@pytest.mark.parametrize("name", sorted(ElasticWorkers.__dataclass_fields__))
def test_an_option_beside_workers_is_told_where_it_belongs(name: str, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(f"workload: a.py:A\nworkers: [1, 2]\n{name}: 3\n")
    with pytest.raises(ConfigError, match=f"write it into elastic, as in elastic: {{{name}: ...}}"):
        job_file.read(file)
    with pytest.raises(ConfigError, match="write it into elastic"):
        JobSpec.from_dict({"workload": "a.py:A", name: 3})
    with pytest.raises(ConfigError, match=f"--elastic {name}="):
        parse(f"all_reduce:{name}=3")


def test_a_job_file_has_a_range_in_plain_text(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("workload: a.py:A\nworkers: 2..4\nelastic: {gain: 0.2}\n")
    spec = JobSpec.from_dict(job_file.read(file, ["elastic.cooldown=7"]))
    assert spec.workers == 2 and spec.elastic == ElasticWorkers(4, gain=0.2, cooldown=7)


@pytest.mark.parametrize(
    ("strategy", "text"),
    [
        ("hogwild", "share one vector in memory: give a fixed number of workers"),
        ("admm", "each worker keeps its rows: give a fixed number"),
        ("parameter_server:staleness=auto", "the staleness bound moves: use parameter_server in one phase"),
        ("parameter_server:staleness=0,backup=1", "with backup: give a fixed number"),
        ("all_reduce:backup=1", "with backup: give a fixed number"),
    ],
)
def test_strategies_of_a_fixed_number_are_refused_when_the_job_is_submitted(strategy: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        JobSpec.from_dict({"workload": "a.py:A", "strategy": wire(parse(strategy)), "workers": [1, 3]})


def test_options_of_workers_in_step_are_refused_for_others_when_the_job_is_submitted() -> None:
    strategy = wire(parse("parameter_server:staleness=2"))
    with pytest.raises(ConfigError, match="leave out global_batch"):
        JobSpec.from_dict(
            {"workload": "a.py:A", "strategy": strategy, "workers": [1, 3], "elastic": {"global_batch": 12}}
        )
