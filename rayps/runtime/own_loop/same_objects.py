"""Check that a wrapped model and optimizer still are those that rayps steps, after the user's code has run.

A parameter whose data was replaced by a tensor of the same kind (`p.data = p.data.clamp(min=0)`) is put back into the
vector, with the new elements. All else that rayps would not see is an error: another dtype or device, a parameter in
place of another, groups that servers do not have.
"""

from __future__ import annotations

import torch
from rayps_client.errors import WorkloadError
from torch import nn
from torch.optim import Optimizer

from rayps.runtime.own_loop.remote_optimizer import StateMarks
from rayps.tensors.flat import FlatModel


class SameObjects:
    """Compares a flat model and an optimizer with what they were when this object was made.

    `remote`: servers take the steps, with the groups as they are now.
    """

    def __init__(self, flat: FlatModel, optimizer: Optimizer, *, remote: bool) -> None:
        """Take note of the objects. Raises WorkloadError if the optimizer steps parameters of another model."""
        self._flat, self._optimizer, self._remote = flat, optimizer, remote
        self._places = [(p, p.data_ptr()) for p in flat.parameters]
        self._known = list(flat.model.parameters())
        self._ids = {id(p) for p in self._known}
        self.has_put_back = False  # whether data was put back, until the caller sets it to False
        self._taken: str | None = None  # a parameter with which another optimizer was wrapped after this one
        self._state = StateMarks(optimizer, map_names(flat)) if remote else None
        self._check_stepped()
        self._note_groups()

    def exclude(self, model: nn.Module) -> None:
        """Make a further step of this optimizer an error, if another one was wrapped with some of its parameters."""
        names = map_names(self._flat)
        self._taken = next((names[id(p)] for p in model.parameters() if id(p) in names), self._taken)

    def note_state(self) -> None:
        """Take note of the optimizer's state after a step of its own."""
        if self._state is not None:
            self._state.record()

    def check_data(self) -> None:
        """Put parameters whose data was replaced back into the vector. Raises WorkloadError if they do not fit."""
        for i, (p, address) in enumerate(self._places):
            if p.data_ptr() != address:
                self._put_back(i, p)

    def check(self) -> None:
        """Check the parameters' data, the model's parameters and the optimizer's groups.

        Raises:
            WorkloadError: one of them was changed, or was wrapped again. The error names the parameter and the way out.
        """
        if self._taken is not None:
            raise WorkloadError(
                f"the parameter {self._taken!r} was given to rayps.wrap twice, with two optimizers, but only "
                "under all_reduce can two optimizers step one wrapped model: else each one's servers or averages have "
                "all its parameters, and undo the other's steps:\nmake one optimizer "
                "with two parameter groups; or wrap each part of the model with its optimizer, such as "
                "rayps.wrap(model[0], first) and rayps.wrap(model[1], second); or use all_reduce",
                parameter=self._taken,
            )
        self.check_data()
        self._check_model()
        groups = self._optimizer.param_groups
        if self._groups is groups and self._stepped == _stepped(self._optimizer):
            if self._state is not None:
                self._state.check()
            return
        if self._remote:
            what = "add_param_group" if self._groups is groups else "load_state_dict"
            names = self._flat.layout.names
            raise WorkloadError(
                f"optimizer.{what} was called after rayps.wrap, but servers step {names[0]!r} and the other "
                f"parameters, with the groups and the state that the optimizer had at wrap: call {what} before wrap, "
                "or use all_reduce"
            )
        self._check_stepped()
        self._note_groups()

    def _note_groups(self) -> None:
        self._groups, self._stepped = self._optimizer.param_groups, _stepped(self._optimizer)

    def _check_stepped(self) -> None:
        """Raise WorkloadError if the optimizer steps a parameter that learns and is not the model's."""
        for number, group in enumerate(self._optimizer.param_groups):
            for p in group["params"]:
                if p.requires_grad and id(p) not in self._ids:
                    raise WorkloadError(
                        f"group {number} of the optimizer has a parameter of shape {tuple(p.shape)} that the wrapped "
                        "model did not have at rayps.wrap, so that its gradient is not averaged: make it a part of "
                        "the model, and call wrap after that"
                    )

    def _check_model(self) -> None:
        open_modules: list[nn.Module] = [self._flat.model]
        seen = set[int]()
        while open_modules:
            module = open_modules.pop()
            seen.add(id(module))
            for p in module._parameters.values():
                if p is not None and id(p) not in self._ids and p.requires_grad:
                    name = next(name for name, each in self._flat.model.named_parameters() if each is p)
                    raise WorkloadError(
                        f"the parameter {name!r} of the model is not the one that rayps.wrap was given, so that nobody "
                        "steps it or averages its gradient: change the model's modules before wrap, and change a "
                        "parameter after it in place, by p.copy_(...) in torch.no_grad()"
                    )
            open_modules += [each for each in module._modules.values() if each is not None and id(each) not in seen]

    def _put_back(self, i: int, p: nn.Parameter) -> None:
        entry, vector, given = self._flat.layout.entries[i], self._flat.vector, p.data
        if (given.dtype, given.device, tuple(given.shape)) != (vector.dtype, vector.device, entry.shape):
            raise WorkloadError(
                f"the parameter {entry.name!r} was {_describe_kind(vector)} {list(entry.shape)} at rayps.wrap, and is "
                f"{_describe_kind(given)} {list(given.shape)} now: convert and move the model before wrap, and make "
                "the "
                "optimizer after that"
            )
        view = vector[entry.lo : entry.hi].view(entry.shape)
        if self._remote and not torch.equal(view, given):
            raise WorkloadError(
                f"the data of the parameter {entry.name!r} was replaced after rayps.wrap, but servers hold the "
                "parameters, and the next pull would drop the change: use all_reduce"
            )
        view.copy_(given)  # not p.copy_: in the midst of a backward, torch refuses a write that it counts for p
        p.data = view
        self.has_put_back = True


def map_names(flat: FlatModel) -> dict[int, str]:
    """Return the names of the parameters in the vector by the ids of the parameters."""
    return {id(p): name for p, name in zip(flat.parameters, flat.layout.names, strict=True)}


def _describe_kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"


def _stepped(optimizer: Optimizer) -> list[int]:
    return [id(p) for group in optimizer.param_groups for p in group["params"]]
