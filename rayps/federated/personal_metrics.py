"""Evaluate each client's personal model on the client's rows of the evaluation data: metrics `personal_*`.

A client's personal model is the model that the strategy stores for the client (Ditto's v_k), or w after some epochs on
the client's data (`finetune`), or w with the client's private layers or buffers (`buffers="keep"`). The clients that
are in both the training and the evaluation data are divided among the workers, and each worker evaluates its part.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from rayps_client.trainers.module_modes import evaluating

from rayps.core.job.user_code import user_code
from rayps.core.metrics import Totals, add_totals
from rayps.data.base import Data
from rayps.data.clients import Clients
from rayps.data.partition_rules import Ints
from rayps.federated.client import Task
from rayps.federated.personal_model import ROWS, load_personal
from rayps.federated.simulated_rows import SimulatedRows

if TYPE_CHECKING:
    from rayps.federated.engine import FederatedEngine


def personal(engine: FederatedEngine, trained: Clients, data: Data, rows: SimulatedRows) -> Totals:
    """Return a dict from metric to its total over the rows of this worker's clients in the evaluation data `data`.

    `trained` are the clients of the training data, and `rows` their rows. The dict is empty if `data` is not divided
    into clients.
    """
    w, sums = engine.w, Totals()
    if not getattr(data, "divided", False):
        return sums
    clients, trainer = data.clients, engine.trainer
    vector, buffers, rng = w.flat.vector.clone(), trainer.copy_buffers(), torch.get_rng_state()
    for other, name in enumerate(clients.names):
        k = trained.find(name)
        if k is None or (engine.home_ranks[k] if engine.home_ranks is not None else k % w.size) != w.rank:
            continue
        state, own_buffers = engine.state_of(k)
        t = engine.at(w.position)
        task = Task(w.plan.seed, t, k, vector, w.shared, state, buffers | own_buffers, engine.tick(t))
        load_personal(trainer, engine.federation, task, partial(rows.of, k))
        _evaluate(engine, clients, clients.rows(other), sums)
    trainer.load(vector, buffers)
    torch.set_rng_state(rng)
    return sums


def _evaluate(engine: FederatedEngine, clients: Clients, rows: Ints, sums: Totals) -> None:
    w = engine.w
    with evaluating(w.flat.model), torch.no_grad(), user_code("evaluate"):
        for lo in range(0, len(rows), ROWS):
            batch = clients.batch(rows[lo : lo + ROWS]).to(w.device)
            with user_code("evaluate"):  # entered for each batch: it renews the deadline of user code
                found = w.part.evaluate(batch)
            add_totals(sums, {f"personal_{name}": total for name, total in found.items()})
