"""Evaluate each client's personal model on the client's rows of the evaluation data: metrics `personal_*`.

A client's personal model is the model that the strategy stores for the client (Ditto's v_k), or w after some epochs on
the client's data (`finetune`), or w with the client's private layers or buffers (`buffers="keep"`). The clients that
are in both the training and the evaluation data are divided among the workers, and each worker evaluates its part.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from rayps.core.metrics import Totals, add_totals
from rayps.core.user_code import user_code
from rayps.data.clients import Clients
from rayps.data.partition_rules import Ints
from rayps.federated.client import Task
from rayps.federated.personal_model import ROWS, load_personal
from rayps.federated.reply_source import SimulatedReplies

if TYPE_CHECKING:
    from rayps.federated.engine import FederatedEngine


def personal(engine: FederatedEngine) -> Totals:
    """Return a dict from metric to its total over the rows of this worker's clients.

    The dict is empty if clients have no personal models, or if the evaluation data is not divided into clients.
    """
    w, strategy = engine.w, engine.strategy
    side = engine.side
    sums: Totals = {}
    if engine.clients is None or not side.measured:
        return sums
    if engine.evaluation_data is None:
        with user_code("evaluation_data"):
            engine.evaluation_data = w.workload.evaluation_data()
    data = engine.evaluation_data
    if not getattr(data, "divided", False):
        return sums
    clients, trainer = data.clients, engine.trainer
    vector, buffers, rng = w.flat.vector.clone(), trainer.copy_buffers(), torch.get_rng_state()
    for other, name in enumerate(clients.names):
        k = engine.clients.find(name)
        if k is None or (engine.home_ranks[k] if engine.home_ranks is not None else k % w.size) != w.rank:
            continue
        state, own_buffers = engine.state_of(k)
        t = engine.at(w.position)
        task = Task(w.plan.seed, t, k, vector, w.shared, state, buffers | own_buffers, engine.tick(t))
        assert isinstance(engine.source, SimulatedReplies), "only simulated clients are evaluated here"
        load_personal(trainer, strategy, task, partial(engine.source.rows.of, k))
        _evaluate(engine, clients, clients.rows(other), sums)
    trainer.load(vector, buffers)
    torch.set_rng_state(rng)
    return sums


def _evaluate(engine: FederatedEngine, clients: Clients, rows: Ints, sums: Totals) -> None:
    w = engine.w
    w.flat.model.eval()
    with torch.no_grad(), user_code("evaluate"):
        for lo in range(0, len(rows), ROWS):
            batch = clients.batch(rows[lo : lo + ROWS]).to(w.device)
            with user_code("evaluate"):  # entered for each batch: it renews the deadline of user code
                found = w.part.evaluate(batch)
            add_totals(sums, {f"personal_{name}": total for name, total in found.items()})
    w.flat.model.train()
