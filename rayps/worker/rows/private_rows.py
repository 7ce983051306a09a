"""The rows that one worker draws in each step of DP-SGD, and the release of its part of the sum.

Row i belongs to worker i mod N, which draws it with the probability q in each step, independently of all others and of
earlier steps. So no worker needs to know what another one has drawn, and nothing is sent. Which rows are drawn is in no
order, record, event or page.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from rayps_client.errors import StaleGeneration
from torch import Tensor

from rayps.core.failpoint import passing
from rayps.core.rows.step_rows import RowBlock
from rayps.data.base import Data
from rayps.privacy.account import PrivacyAccount
from rayps.privacy.ledger import open_ledger
from rayps.privacy.mechanism import ROW
from rayps.privacy.noise import KeyedNoise, NoiseSource, SecretNoise
from rayps.privacy.row_level import RowPrivacy
from rayps.tensors.random_state import seed_torch
from rayps.worker.plan import WorkerPlan

COARSE = 1 / 8  # relative number of releases between two at which a worker computes epsilon


def draws_of(data: Data, plan: WorkerPlan) -> tuple[RowDraws, int]:
    """Return how a worker draws rows of `data` under a plan, and how many rows it stacks at most."""
    privacy = privacy_under(plan)
    draws = RowDraws(data.rows(), privacy.batch / privacy.rows, source_of(privacy, plan.seed))
    return draws, privacy.spec.physical_batch or data.batch_size


class RowDraws:
    """Draws rows of `rows`, each with `probability` in each step, from `source`: a `RowCut` of row numbers."""

    def __init__(self, rows: int, probability: float, source: NoiseSource) -> None:
        self._rows, self._probability, self._source = rows, probability, source

    def places(self, block: RowBlock) -> tuple[list[int], ...]:
        """Return the row numbers that the worker draws for a block, which is that of its rank and of the step.

        With seeded noise, all workers together draw the same rows for any number of workers.
        """
        step, rank, size = block.step, block.part, block.parts
        own = np.arange(rank, self._rows, size, dtype=np.int64)
        if isinstance(self._source, KeyedNoise):
            chances = self._source.uniform(self._rows, step)[rank::size]
        else:
            chances = self._source.uniform(len(own), step)
        return (own[chances < self._probability].tolist(),)


class RowReleases:
    """Charges each release and adds the noise to a worker's part of the sum. Only rank 0 does so.

    `stopped` returns whether the plan was ended from outside; nothing is charged after that.
    """

    def __init__(self, plan: WorkerPlan) -> None:
        assert plan.private is not None, "the driver gives each private plan what it must know"
        self.privacy, self.stopped = privacy_under(plan), _never
        self._source = source_of(self.privacy, plan.seed)
        self._rank, self._ledger = plan.rank, plan.private.ledger
        self._account: PrivacyAccount | None = None

    def begin(self, stopped: Callable[[], bool]) -> None:
        """Open the ledger on rank 0, before the first step.

        Raises:
            ConfigError: this machine has no such ledger, or cannot write it.
            StaleGeneration: a worker of the generation before has recorded a release since the driver read the ledger.
        """
        self.stopped = stopped
        if self._rank:
            return
        ledger, privacy = open_ledger(self._ledger, ROW), self.privacy
        self._account = PrivacyAccount(privacy.spec, privacy.mechanism, ledger, coarse=COARSE)
        if self._account.releases != privacy.releases:
            self.close()
            raise StaleGeneration(
                f"the ledger {ledger.path} has another release than the driver has read: the generation begins again",
                peer="driver",
            )

    def release(self, step: int, part: Tensor) -> dict[str, float]:
        """Charge the release of `step`, then add the noise to `part` [size], float64, in place.

        Return the numbers for the round's point. Only rank 0 does this; others return {}, and change nothing.

        Raises:
            OSError: the ledger cannot be written. Nothing may then leave.
            StaleGeneration: the plan was ended.
        """
        account = self._account
        if account is None:
            return {}
        if self.stopped():
            raise StaleGeneration(f"the plan was ended before step {step}", peer="driver")
        account.charge(step)
        noise = self._source.normal(part.numel(), self.privacy.std, step)
        part += torch.from_numpy(noise).to(part.device)
        passing("privacy: noised, not released")
        return {"epsilon": account.epsilon, "releases": account.releases}

    def seed_step(self, step: int) -> None:
        """Set torch's random state, from which the model's dropout is drawn in `step`, from the secret source.

        Which random numbers a row gets depends on how many rows were drawn before it. If they could be drawn again, the
        sum would depend on a single row by more than the clip.
        """
        seed_torch(int(self._source.uniform(1, step, self._rank, 1)[0] * 2**53))

    def close(self) -> None:
        """Close the ledger."""
        account, self._account = self._account, None
        if account is not None:
            account.ledger.close()


def privacy_under(plan: WorkerPlan) -> RowPrivacy:
    """Return the row-level privacy of a plan, which must have it."""
    rows = None if plan.private is None else plan.private.rows
    assert rows is not None, "the driver gives each private plan what it must know"
    return rows


def source_of(privacy: RowPrivacy, seed: int) -> NoiseSource:
    """Return the source of noise and draws: a secret one, or that of the job's seed if the options ask for it."""
    return SecretNoise() if privacy.spec.proves else KeyedNoise.of_seed(seed)


def _never() -> bool:
    return False
