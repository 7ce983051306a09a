"""Backup workers: the result is that of a plain loop on the rows that were applied, each of which was applied once."""

import random
from collections import Counter

import pytest
import torch
from small_work import Small, distance, plain, train, vector

import rayps
from rayps import AllReduce
from rayps.comm.ring.agree_members import MemberAgreement
from rayps.core.portions import Portions

EXACT = 1e-12


@pytest.fixture
def log(monkeypatch):
    """The members of each step, as rank 0 has learned them. `log.script(step, holders, needed)` replaces arrivals."""

    class Log(dict):
        script = None

    found, agree = Log(), MemberAgreement.agree

    def recorded(self, step, needed, ready):
        if found.script is None:
            members = agree(self, step, needed, ready)
        else:
            members = found.script(step, needed)
            if self._mesh.rank in members:
                self._mesh.await_early(self._wakeup.fileno(), lambda: (self._wakeup.clear(), ready())[1])
        if self._mesh.rank == 0:
            found[step] = members
        return members

    monkeypatch.setattr(MemberAgreement, "agree", recorded)
    return found


def replayed(work, members, shares, workers, *, seed=0, start=0):
    """One process, on the rows that the members of each step had: model, losses, and how often each row was applied.

    `members` is a dict from the step to its members.
    """
    torch.manual_seed(seed)
    model, counts, losses = work.model(), Counter(), []
    optimizer = work.optimizer(list(model.parameters()))
    data = work.data()
    steps = data.steps(shares)
    for step in sorted(members):
        epoch, index = divmod(step, steps)
        if index == 0:
            portions = Portions.at(0, shares=shares, workers=workers, steps=steps)
            read = [list(data.batches(rank=r, size=shares, seed=seed, epoch=epoch)) for r in range(shares)]
        parts = [read[portions.held[rank] % shares][portions.held[rank] // shares] for rank in members[step]]
        whole = [part for part in parts if part.size]
        x, y = torch.cat([part.x for part in whole]), torch.cat([part.y for part in whole])
        counts.update((epoch, row) for row in map(tuple, x.tolist()))
        optimizer.zero_grad()
        loss = ((model(x) - y) ** 2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        portions = portions.after(members[step])
    return model, losses, counts


def losses(result):
    return result.history.column("loss").to_pylist()


def late_in_turn(step, needed):
    """The members of 3 of 4 workers, one of which is late in turn. In the last of 4 steps of an epoch all count."""
    return None


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
@pytest.mark.parametrize(("workers", "backup", "n"), [(4, 1, 36), (3, 1, 25), (5, 2, 50)])
def test_the_result_is_that_of_the_rows_that_were_applied(log, optimizer, workers, backup, n):
    work = Small(n=n, batch=3, optimizer=optimizer, jitter=0.003)
    result = train(work, AllReduce(backup=backup), workers=workers, epochs=2, seed=5)
    model, expected, counts = replayed(work, log, workers - backup, workers, seed=5)
    assert distance(result.model(), model) < EXACT
    assert losses(result) == pytest.approx(expected, abs=EXACT)
    assert len(counts) == 2 * n and set(counts.values()) == {1}  # each row once in each epoch
    assert sum(result.history.column("samples").to_pylist()) == 2 * n
