"""Train a real client with rayps's own trainer: every feature of a workload and of a strategy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from rayps_client.errors import ConfigError, WorkloadError
from rayps_client.trainers.local_trainer import LayoutRow, LocalReply, LocalTask
from rayps_client.trainers.local_work import try_batches
from rayps_client.trainers.own_metrics import OwnMetrics, OwnTotal, OwnTotals
from rayps_client.trainers.torch_tensors import raw_of, raws_of, tensor_of, tensors_of
from rayps_client.values import JsonObject

from rayps.core.job.user_code import user_code
from rayps.core.metrics import Totals
from rayps.data.base import Data
from rayps.data.other_files import with_other_files
from rayps.federated.client import ClientRows, Task, Trainer
from rayps.federated.personal_model import load_personal, totals_on, with_own_buffers
from rayps.federated.remote_codec import layout_rows
from rayps.federated.strategy_interface import FederatedView
from rayps.strategies.catalogue import parse
from rayps.strategies.fedavg import FedAvg
from rayps.tensors.flat import FlatModel
from rayps.workload.base import Workload
from rayps.workload.model import apart, model_of
from rayps.workload.statistics_workload import StatisticsWorkload


class WorkloadTrainer:
    """Trains the client of this process in a model of a `rayps.Workload`: a `local_trainer.LocalTrainer`.

    Raises ConfigError if `device` cannot be used, and WorkloadError or DataError if the model or data cannot be built.
    """

    def __init__(self, workload: Workload, data: Data, device: str = "cpu") -> None:
        self.workload = workload
        _check_device(device)
        self._rows = rows_of(data)
        self._evaluation: ClientRows | None = None  # the evaluation rows, once they have been loaded
        with apart():
            model = model_of(workload).to(device)
        self.trainer = Trainer(FlatModel(model), workload, device)

    @property
    def samples(self) -> int:
        """The number of the client's rows."""
        return len(self._rows.numbers)

    def layout(self) -> Sequence[LayoutRow]:
        """Return the names, shapes and dtypes of the model's parameters."""
        return layout_rows(self.trainer.flat.layout)

    def try_out(self) -> str | None:
        """Train on one batch to find errors before the client joins; then restore the model and its buffers.

        Return what to tell the user, as `try_batches` does.

        Raises:
            WorkloadError, DataError: the user's code or data failed.
        """
        rows, trainer = self._rows, self.trainer
        w, buffers = trainer.flat.vector.clone(), trainer.copy_buffers()

        def train(most: int) -> None:
            few = ClientRows(rows.numbers[:most], rows.take, most, False)
            with apart():
                trainer.train(FedAvg(local_steps=1), Task(0, 0, 0, w, {}), few)
                trainer.check_weight.of_pairs(few.take(few.numbers).to(trainer.device))

        notice = try_batches(train, self.samples, rows.batch_size, drop_last=rows.drop_last)
        trainer.load(w, buffers)
        for parameter in trainer.parameters:
            parameter.grad = None
        return notice

    def train(self, task: LocalTask) -> LocalReply:
        """Train the client. Raises WorkloadError or DataError if the user's code or data failed."""
        strategy, given = _strategy_of(task.strategy), self._task(task)
        part = self.trainer.private_layers(strategy.federation.client_side)
        reply = self.trainer.train(strategy, given, self._rows)
        return LocalReply(
            raw_of(reply.w),
            raws_of(reply.sums),
            raws_of(reply.buffers),
            raws_of(reply.state),
            n=reply.n,
            steps=reply.steps,
            samples=reply.samples,
            loss=reply.loss,
            start=raw_of(part.cut(given.w_t)) if part.parameters else None,
        )

    def evaluate(self, task: LocalTask, name: str) -> OwnMetrics:
        """Evaluate the model of a round's start and this client's personal model: `LocalTrainer.evaluate`."""
        if self._evaluation is None:
            self._evaluation = own_evaluation_rows(self.workload, name)
        trainer, rows, given = self.trainer, self._evaluation, self._task(task)
        federation = _strategy_of(task.strategy).federation
        with apart():
            trainer.load(given.w_t, given.buffers)
            shared, personal = self._totals(rows), Totals()
            if federation.client_side.measured:
                load_personal(trainer, federation, with_own_buffers(given), lambda: self._rows)
                personal = self._totals(rows)
        return OwnMetrics(len(rows.numbers), _own_totals(shared), _own_totals(personal))

    def _totals(self, rows: ClientRows) -> Totals:
        model, device = self.trainer.flat.model, self.trainer.device
        return totals_on(self.workload, model, rows.numbers, lambda some: rows.take(some).to(device))

    def _task(self, task: LocalTask) -> Task:
        start, device = task.start, self.trainer.device
        w = tensor_of(start.w).to(device)
        shared, buffers, state = (
            {name: value.to(device) for name, value in tensors_of(raws).items()}
            for raws in (start.shared, start.buffers, task.state)
        )
        return Task(task.seed, task.round, task.client, w, shared, state, buffers, task.tick)


def _own_totals(totals: Totals) -> OwnTotals:
    return {name: OwnTotal(total.value, total.weight, total.how) for name, total in totals.items()}


def own_evaluation_rows(workload: Workload, name: str) -> ClientRows:
    """Return the rows of the workload's evaluation data: those of the client `name` if it is divided and has it.

    Raises:
        WorkloadError, DataError: there are none, or the user's code or data failed.
    """
    data = evaluation_of(workload, None)
    if getattr(data, "divided", False):
        clients = data.clients
        number = clients.find(name)
        if number is not None:
            return ClientRows(clients.rows(number), clients.batch, data.batch_size, False)
    return rows_of(data)


def rows_of(data: Data) -> ClientRows:
    """Return all rows of a data set, as the rows of this one client.

    Raises:
        DataError: there are no rows, or a value cannot be used.
    """
    with user_code("data"):
        data.check()
        count = data.rows()
        mine = data.with_clients(np.zeros(count, dtype=np.int64)).clients
    shuffle = getattr(data, "shuffle", True)
    return ClientRows(mine.rows(0), mine.batch, data.batch_size, shuffle, drop_last=data.drop_last)


def own_data(workload: Workload, path: str | None) -> Data:
    """Return the workload's data; with `path`, the same columns from that Parquet file or folder.

    Raises:
        WorkloadError: data() does not return a data source, or the rows lack a column of a statistic.
        DataError: `path` is given, and the workload's data does not come from Parquet files.
    """
    with user_code("data"):
        data = workload.data()
    if not isinstance(data, Data):
        raise WorkloadError(f"data() returned {type(data).__name__}: return one of rayps.data, e.g. parquet(...)")
    found = data if path is None else with_other_files(data, path)
    if isinstance(workload, StatisticsWorkload):
        workload.check_columns(found)
    return found


def evaluation_of(workload: Workload, path: str | None) -> Data:
    """Return the workload's evaluation data; with `path`, the same columns from that Parquet file or folder.

    Raises WorkloadError or DataError as `own_data` does.
    """
    with user_code("evaluation_data"):
        data = workload.evaluation_data()
    if not isinstance(data, Data):
        raise WorkloadError(f"evaluation_data() returned {type(data).__name__}: return one of rayps.data")
    return data if path is None else with_other_files(data, path)


def _strategy_of(given: JsonObject) -> FederatedView:
    strategy = parse(given)[0].strategy
    assert isinstance(strategy, FederatedView), "the service sends clients only orders of federated strategies"
    return strategy


def _check_device(device: str) -> None:
    """Check that torch can use the device. Raises ConfigError if it cannot."""
    try:
        torch.zeros(1, device=device)
    except Exception as error:  # each kind of device fails in its own way
        cause = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"device {device!r} cannot be used on this machine: {cause}. Give --device cpu", field="device"
        ) from error
