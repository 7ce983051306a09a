"""Parameters of a workload: which fields can be set, each type with good and bad values, and what __init__ sees."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Optional, Union

import pytest
import torch
from rayps_client import parameters
from rayps_client.errors import ConfigError, WorkloadError
from rayps_client.parameters import REQUIRED, checked, create, declared, differing, effective
from rayps_client.values import Json

import rayps
from rayps.workload.base import load


class Base(rayps.Workload):
    def model(self) -> torch.nn.Module:
        return torch.nn.Linear(1, 1)

    def data(self) -> Any:
        return rayps.data.tensors(torch.ones(4, 1), torch.ones(4, 1), batch_size=2)

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        return torch.nn.functional.mse_loss(model(batch.x), batch.y)


class Work(Base):
    lr: float = 0.1
    layers: list[int] = [64, 32]  # noqa: RUF012
    betas: tuple[float, float] = (0.9, 0.99)
    sizes: tuple[int, ...] = ()
    act: Literal["relu", "tanh", 3] = "relu"
    decay: Optional[float] = None  # noqa: UP045  the older form
    warm: Union[int, str] = 5  # noqa: UP007
    either: float | int = 1.5
    table: list[list[int]] = []  # noqa: RUF012
    noted: Annotated[int, "rows"] = 7
    n = 3
    dropout = 0.5
    mode = "fast"
    flag = True
    both: ClassVar[int] = 3
    rates: dict[str, float] = {}  # noqa: RUF012
    options: Mapping[str, Json] = {}
    net: torch.nn.Module | None = None
    unknown: NotThere = 3  # type: ignore[name-defined]  # noqa: F821
    rows = [1, 2]  # noqa: RUF012
    _hidden: float = 1.0
    bare: float

    @property
    def double(self) -> float:
        return 2 * self.lr

    @staticmethod
    def helper() -> int:
        return 1


def test_the_fields_of_the_user_and_of_the_base_class_are_parameters() -> None:
    found = declared(Work)
    base = declared(rayps.Workload)
    own = {"clip_norm", "schedule_every", "compile", "accumulate", "precision", "sync_batchnorm", "evaluation_batches"}
    own.add("checkpoint_activations")
    assert own == set(base)
    assert list(found) == [
        *base,
        *("lr", "layers", "betas", "sizes", "act", "decay", "warm", "either", "table", "noted"),
        *("n", "dropout", "mode", "flag", "rates", "options"),
    ]
    assert found["lr"].default == 0.1 and found["n"].type is int and found["flag"].type is bool


GOOD = [
    *[("lr", value, float(value)) for value in (1, 0, -3, 0.3, 1e-9)],
    ("layers", [], []),
    ("layers", [1, 2], [1, 2]),
    ("layers", (1, 2), [1, 2]),
    ("betas", [0, 0.5], (0.0, 0.5)),
    ("sizes", [1, 2, 3], (1, 2, 3)),
    ("act", "tanh", "tanh"),
    ("act", 3, 3),
    ("decay", None, None),
    ("decay", 1, 1.0),
    ("warm", 3, 3),
    ("warm", "x", "x"),
    ("either", 3, 3),
    ("either", 3.0, 3.0),
    ("table", [[1], [2, 3]], [[1], [2, 3]]),
    ("noted", 2, 2),
    ("n", 10**30, 10**30),
    ("dropout", 1, 1.0),
    ("mode", "", ""),
    ("flag", False, False),
    ("clip_norm", 2, 2.0),
    ("clip_norm", None, None),
    ("schedule_every", "epoch", "epoch"),
    ("rates", {}, {}),
    ("rates", {"head": 1, "body": 0.1}, {"head": 1.0, "body": 0.1}),
    ("options", {"a": {"b": [1, None]}}, {"a": {"b": [1, None]}}),
    *[("compile", value, value) for value in (True, False, "eager", {"mode": "max-autotune", "dynamic": True})],
]
BAD = [
    *[("lr", value) for value in ("0.3", True, None, [0.1], {"a": 1}, math.inf, math.nan, 10**400)],
    *[("layers", value) for value in (1, "12", [1.0], [True], ["1"], [None], {"a": 1}, None)],
    *[("betas", value) for value in ([0.9], [0.9, 0.9, 0.9], ["a", 0.9], 0.9)],
    *[("sizes", value) for value in (3, [1.5], "123")],
    *[("act", value) for value in ("gelu", 3.0, True, None, ["relu"])],
    *[("decay", value) for value in ("none", False, [])],
    *[("warm", value) for value in (1.5, True, None)],
    *[("either", value) for value in ("1", True)],
    *[("table", value) for value in ([1], [["a"]], [[True]])],
    *[("noted", value) for value in (1.0, True)],
    *[("n", value) for value in (3.0, "3", True, None)],
    *[("mode", value) for value in (3, None, True, ["a"])],
    *[("flag", value) for value in (0, 1, "true", None)],
    *[("clip_norm", value) for value in ("1", True)],
    *[("rates", value) for value in (0.1, [0.1], {"a": "b"}, {"a": True}, {1: 0.1}, {"a": math.nan}, None)],
    *[("options", value) for value in ("a", [], None, {1: 2}, {"a": math.inf})],
    *[("compile", value) for value in (1, 0.5, None, [True], {1: 2})],
]


@pytest.mark.parametrize(("name", "given", "expected"), GOOD)
def test_a_value_of_the_type_is_taken(name: str, given: Any, expected: Any) -> None:
    found = checked(Work, {name: given})[name]
    assert found == expected and type(found) is type(expected)
    assert getattr(create(Work, {name: given}), name) == expected


@pytest.mark.parametrize(("name", "given"), BAD)
def test_a_value_of_another_type_is_refused(name: str, given: Any) -> None:
    with pytest.raises(ConfigError, match=rf"params\.{name} is .*, and Work\.{name} is .*: give ") as caught:
        checked(Work, {name: given})
    assert caught.value.data["field"] == f"params.{name}"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("lrr", "did you mean 'lr'"),
        ("zzzzzz", "its parameters are clip_norm"),
        ("model", "model is a method"),
        ("helper", "helper is a method"),
        ("double", "double is a property"),
        ("_hidden", "a private name"),
        ("__class__", "a private name"),
        ("net", "its type .*Module.* cannot be set"),
        ("both", "its type .*ClassVar.* cannot be set"),
        ("rows", "annotate the field"),
        ("bare", "a field with a default"),
    ],
)
def test_other_names_are_refused_with_the_way_out(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"Work has no parameter '{name}': .*{text}"):
        checked(Work, {name: 1})


def test_a_subclass_changes_the_default_and_keeps_the_type() -> None:
    class Sub(Work):
        lr = 1
        mode = None  # type: ignore[assignment]

    assert declared(Sub)["lr"].type is float
    assert checked(Sub, {"lr": 2}) == {"lr": 2.0}
    with pytest.raises(ConfigError, match=r"params\.lr is 'x'"):
        checked(Sub, {"lr": "x"})


def test_a_method_that_hides_a_field_is_no_parameter() -> None:
    class Sub(Work):
        def lr(self) -> float:  # type: ignore[override]
            return 1.0

    assert "lr" not in declared(Sub)


def test_init_sees_the_parameters() -> None:
    class Sub(Work):
        def __init__(self) -> None:
            self.seen = self.lr, self.n

    assert create(Sub, {"lr": 0.3}).seen == (0.3, 3)
    assert Sub.lr == 0.1, "the class is not changed"


def test_an_argument_of_init_gets_the_parameter() -> None:
    class Sub(Work):
        def __init__(self, lr: float = 0.2, other: int = 4) -> None:
            self.lr, self.other = lr, other

    made = create(Sub, {"lr": 0.3, "n": 5})
    assert (made.lr, made.n, made.other) == (0.3, 5, 4)
    assert create(Sub, {}).lr == 0.2
    with pytest.raises(ConfigError, match="give the class a field with a default"):
        create(Sub, {"other": 5})


def test_init_that_replaces_a_given_value_is_refused() -> None:
    class Sub(Work):
        def __init__(self) -> None:
            self.lr = 0.05

    assert create(Sub, {}).lr == 0.05
    with pytest.raises(ConfigError, match=r"params.lr is 0.3, and __init__ of Sub replaces it by 0.05"):
        create(Sub, {"lr": 0.3})


def test_a_dataclass_gets_its_fields_as_arguments() -> None:
    @dataclasses.dataclass
    class Data(Base):
        lr: float = 0.1
        layers: list[int] = dataclasses.field(default_factory=lambda: [4])
        made: int = dataclasses.field(default=0, init=False)

        def __post_init__(self) -> None:
            self.rate = self.lr * 2

    assert set(declared(Data)) - set(declared(rayps.Workload)) == {"lr", "layers"}
    made = create(Data, {"lr": 0.25, "layers": [1], "clip_norm": 1})
    assert (made.lr, made.layers, made.rate, made.clip_norm) == (0.25, [1], 0.5, 1.0)
    assert create(Data, {}).layers == [4]


def test_a_frozen_dataclass_and_a_field_without_a_default() -> None:
    @dataclasses.dataclass(frozen=True)
    class Data(Base):
        width: int
        lr: float = 0.1

    assert declared(Data)["width"].default is REQUIRED
    made = create(Data, {"width": 3, "schedule_every": "epoch"})
    assert (made.width, made.lr, made.schedule_every) == (3, 0.1, "epoch")


def test_all_values_and_those_that_are_not_the_defaults_of_the_base_class() -> None:
    class Sub(Base):
        lr: float = 0.1
        most: float = math.inf
        betas: tuple[float, float] = (0.9, 0.99)

    made = create(Sub, {"clip_norm": 1})
    everything = effective(made)
    assert everything["lr"] == 0.1 and everything["most"] == "inf" and everything["betas"] == [0.9, 0.99]
    assert everything["clip_norm"] == 1.0 and everything["schedule_every"] == "step"
    assert differing(made, rayps.Workload) == {"clip_norm": 1.0, "lr": 0.1, "most": "inf", "betas": [0.9, 0.99]}
    assert differing(create(Base, {}), rayps.Workload) == {}


FILE = """
import torch, rayps

class W(rayps.Workload):
    lr: float = 0.1

    def model(self):
        return torch.nn.Linear(3, 1)

    def data(self):
        x = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
        return rayps.data.tensors(x, x.sum(1, keepdim=True), batch_size=10)

    def loss(self, model, batch):
        return torch.nn.functional.mse_loss(model(batch.x), batch.y)

    def optimizer(self, params):
        return torch.optim.SGD(params, lr=self.lr)
"""


def test_a_workload_by_name_takes_parameters(tmp_path: Path) -> None:
    (tmp_path / "work.py").write_text(FILE)
    assert load("work.py:W", str(tmp_path), {"lr": 1}).lr == 1.0  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="did you mean 'lr'"):
        load("work.py:W", str(tmp_path), {"lrs": 1})
    (tmp_path / "needs.py").write_text(FILE + "    def __init__(self, lr, depth):\n        self.lr = lr\n")
    with pytest.raises(WorkloadError, match="depth"):
        load("needs.py:W", str(tmp_path), {"lr": 1})


def test_shown_is_short() -> None:
    assert [parameters.shown(value) for value in (True, None, 0.1, "a")] == ["true", "null", "0.1", "'a'"]
    assert len(parameters.shown("x" * 1000)) == 60
