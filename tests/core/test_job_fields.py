"""What is declared by hand follows the table of a job's fields: `rayps.train`, `JobSpec`, the command, the page."""

import importlib.util
import inspect
import typing

import folders
import pytest
import typer
from rayps_api.schemas import JobIn

import rayps
from rayps.cli.main import train as command
from rayps.core.job.job_fields import BY_NAME, FIELDS, JOB_FIELDS, TABLE, Kind, Where
from rayps.strategies.job import JobSpec

# of `rayps train` alone: where the workload stands, `params` and `resources` in parts, and how it prints
OF_THE_COMMAND = {"target", "changes", "cpus_per_worker", "gpus_per_worker", "output"}
ANNOTATIONS = {Kind.LINE: "str", Kind.TEXT: "str", Kind.WHOLE: "int", Kind.NUMBER: "float", Kind.FLAG: "bool"}
ANNOTATIONS |= {Kind.AMOUNTS: "dict[str, float]"}


def of(where):
    return [each for each in TABLE if where in each.where]


def argument(field):
    """How a field is declared as an argument: its annotation and its default."""
    if field.argument:
        return field.argument
    none = " | None" if field.default is None else ""
    return f"{ANNOTATIONS[field.kind]}{none} = {field.default!r}"


def test_each_field_is_named_once_and_described():
    assert len(BY_NAME) == len(TABLE)
    assert all(field.text.endswith(".") for field in TABLE)


def test_the_arguments_of_train_are_those_of_the_table():
    given = dict(inspect.signature(inspect.unwrap(rayps.train)).parameters)
    assert given.pop("workload").kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    assert {name: f"{each.annotation} = {each.default!r}" for name, each in given.items()} == {
        each.name: argument(each) for each in of(Where.TRAIN)
    }


def test_the_options_of_the_command_are_those_of_the_table():
    given = inspect.signature(command).parameters
    hints = typing.get_type_hints(command, include_extras=True)
    declared = {each.name: each for each in of(Where.COMMAND)}
    assert set(given) - OF_THE_COMMAND == set(declared)
    for name, field in declared.items():
        option = next(each for each in hints[name].__metadata__ if isinstance(each, typer.models.OptionInfo))
        assert option.help == field.text, name
        default = "None" if name == "profile" else argument(field).rpartition("= ")[2].strip("'")
        assert str(given[name].default) == default, name  # "1" of workers is a text


@pytest.mark.parametrize("field", JOB_FIELDS, ids=lambda field: field.name)
def test_a_specification_has_each_field_with_its_default(field):
    """In JSON; a specification's own strategy is in wire form, and a missing workload is the empty text."""
    given = JobSpec().to_dict()
    assert set(given) == FIELDS
    defaults = {"strategy": {"name": "all_reduce"}, "workload": "", "env": {}}
    assert given[field.name] == defaults.get(field.name, field.default)


def test_a_request_has_each_field_with_its_default():
    given = JobIn().model_dump()
    assert given.pop("origin") is None
    assert given == {field.name: field.default for field in JOB_FIELDS}


def test_a_request_does_not_share_its_defaults():
    assert JobIn().model_dump()["params"] is not BY_NAME["params"].default
    one = JobIn()
    one.params["lr"] = 1
    assert JobIn().params == {}


def test_the_page_has_the_types_of_the_table():
    path = folders.TESTS.parent / "scripts" / "write_job_fields.py"
    spec = importlib.util.spec_from_file_location("write_job_fields", path)
    written = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(written)
    assert written.FILE.read_text(encoding="utf-8") == written.page_types(), "run scripts/write_job_fields.py"
