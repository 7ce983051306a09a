"""Client-level differential privacy of federated rounds: who takes part, the clip, the noise, the record, the budget.

McMahan, Ramage, Talwar, Zhang, "Learning Differentially Private Recurrent Language Models", ICLR 2018, algorithm 1
(DP-FedAvg with a fixed divisor). In round t, with the clip C and the noise multiplier z:

    a cohort S is drawn; each client of S sends  D_k = w_k - w_t, scaled down to the norm C
    the workers add the D_k in fixed point; rank 0 also adds  N(0, (z C)^2)  to its part of the sum, so that no worker
    has the sum without noise if there are at least two
    D = (sum_S D_k + noise) / m,  where m is fixed: the expected number of clients

All clients have equal weight, and an empty cohort is legal. Rank 0 draws the cohort from a secret generator and sends
it to the other workers; it is in no order, event, metric or checkpoint. A round that is repeated draws anew. Before the
noised sum can leave, its release is recorded in the ledger (`rayps.privacy.ledger`). If the budget does not allow one
more release, the phase ends.

With noise_by=clients, real clients have added shares of the noise before the sum was unmasked: the release is then
recorded before they are asked to unmask it, and no noise is added here.

With tree noise (`rayps.privacy.tree_noise`), the clients of a tree's rounds are parts of one random order of all
clients, so that each takes part at most once in a tree.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from rayps_client.values import JsonObject

from rayps.comm.ring.ring import Ring
from rayps.core.failpoint import passing
from rayps.federated.combine_replies import BITS, Aggregate, RoundAggregate
from rayps.federated.population.cohort import Ints, first
from rayps.federated.private_job import PrivateJob
from rayps.privacy import accountant
from rayps.privacy.account import PrivacyAccount
from rayps.privacy.adaptive_clip import next_clip, update_noise
from rayps.privacy.claim import claim
from rayps.privacy.ledger import ReleaseLedger
from rayps.privacy.mechanism import CLIENT, Mechanism, Spent
from rayps.privacy.noise import Floats, KeyedNoise, NoiseSource, SecretNoise
from rayps.privacy.noise_shares import NoiseShares
from rayps.privacy.options import FIXED, POISSON, SEEDED, TREE
from rayps.privacy.tree_noise import tree_noise

CLIP = "privacy.clip"  # name, in the server's memory, of the adaptive clip


class _Releases:
    """What rank 0 alone has: the account, the noise, and who takes part."""

    def __init__(self, job: PrivateJob, mechanism: Mechanism, folder: Path, seed: int) -> None:
        """Open the ledger. Raises ConfigError if it cannot be used."""
        self.job, self.ledger = job, ReleaseLedger(folder, CLIENT)
        self.account = PrivacyAccount(job.spec, mechanism, self.ledger, job.restart)
        self.source: NoiseSource = KeyedNoise.of_seed(seed) if job.spec.noise == SEEDED else SecretNoise()
        seeded_tree = job.kind == TREE and job.spec.noise != SEEDED
        self.tree_source: NoiseSource = KeyedNoise(self.ledger.key()) if seeded_tree else self.source
        self._seed = seed

    def cohort(self, round: int) -> Ints:
        """Draw the clients of a round, sorted."""
        job = self.job
        everyone = np.arange(job.clients, dtype=np.int64)
        if job.kind == POISSON:
            return everyone[self.source.uniform(job.clients, round) < job.fraction]
        if job.kind == FIXED:
            order = np.argsort(self.source.uniform(job.clients, round), kind="stable")
            return np.sort(order[: job.drawn]).astype(np.int64)
        if job.kind == TREE:
            tree, leaf = self.account.leaf
            order = np.argsort(self.tree_source.uniform(job.clients, tree), kind="stable")
            return np.sort(order[leaf * job.drawn : (leaf + 1) * job.drawn]).astype(np.int64)
        return first(self._seed, round, everyone, job.drawn)

    def noise(self, size: int, clip: float, round: int) -> tuple[torch.Tensor, float]:
        """Record the release of a round. Return the noise for the sum of updates, and for the number of bits."""
        tree, leaf = self.account.charge(round)
        z, bits = self.account.mechanism.noise_multiplier, 0.0
        if self.job.kind == TREE:
            drawn = tree_noise(self.tree_source, size, z * clip, tree=tree, leaf=leaf)
        else:
            if self.job.spec.adaptive:
                bits = float(self.source.normal(1, self.job.bit_noise, round, 1)[0])
                z = update_noise(z, self.job.bit_noise)
            drawn = self.source.normal(size, z * clip, round)
        return torch.from_numpy(drawn), bits


class PrivateRounds:
    """The private part of a worker's federated rounds. All workers make the same calls."""

    def __init__(self, job: PrivateJob, ring: Ring, folder: Path, seed: int) -> None:
        """Prepare. Raises ConfigError on rank 0 if the ledger cannot be used or the options do not fit."""
        self.job, self._ring, self._mechanism = job, ring, job.solved()
        self._releases = _Releases(job, self._mechanism, folder, seed) if ring.rank == 0 else None
        self._asked: set[int] = set()  # real clients that were asked in this tree
        self.epsilon, self.releases = 0.0, 0  # of all releases so far, since the last call of `exhausted`

    def exhausted(self) -> str | None:
        """Return why no other release is allowed, or None. All workers call this method; not all get the numbers.

        The call also sets `epsilon` and `releases`, which are then equal on all workers.
        """
        facts, mine = torch.zeros(3, dtype=torch.float64), None
        if self._releases is not None:
            account = self._releases.account
            mine = account.exhausted
            facts = torch.tensor([mine is not None, account.epsilon, account.releases], dtype=torch.float64)
        over, self.epsilon, releases = self._ring.broadcast(facts).tolist()
        self.releases = int(releases)
        return (mine or "the privacy budget is spent") if over else None

    def claim(self) -> JsonObject:
        """Return what is claimed, without the numbers of releases and epsilon. On rank 0 only."""
        assert self._releases is not None, "rank 0 has the account"
        return claim(self.job.spec, self._releases.account.mechanism, self.job.setting)

    def summary(self, rounds: int) -> str:
        """Return what is planned for the next `rounds` rounds, as text. On rank 0 only."""
        assert self._releases is not None, "rank 0 has the account"
        account, spec = self._releases.account, self.job.spec
        restart = self.job.restart
        whole = accountant.epsilon({account.mechanism: Spent().plus(rounds, restart)}, spec.delta)
        noise, s = account.mechanism.noise_multiplier, "" if rounds == 1 else "s"
        text = (
            f"each round adds noise of {noise:.4g} times the clip; epsilon of {rounds} round{s} is {whole:.4g} at "
            f"delta {spec.delta:g}"
        )
        if self.shares is not None:
            text += (
                f"; each of {self.shares.asked} clients adds a share of {self.shares.sigma} steps, and "
                f"{self.shares.count} of these suffice"
            )
        if account.releases:
            text += f", beside the {account.epsilon:.4g} that {account.releases} earlier releases have cost"
        if spec.epsilon is not None and whole > spec.epsilon:
            most = accountant.releases_within(account.mechanism, spec.epsilon, spec.delta, restart)
            text += f"; the number that the budget {spec.epsilon:g} allows is {most}"
        why = self.claim()["not_proven"]
        return text if why is None else f"{text}. It proves nothing: {why}"

    def cohort(self, round: int) -> Ints:
        """Return the clients of a round, sorted. Rank 0 draws them, and all workers receive them."""
        words = torch.zeros(-(-self.job.clients // 64), dtype=torch.int64)
        if self._releases is not None:
            mask = np.zeros(len(words) * 64, dtype=np.uint8)
            mask[self._releases.cohort(round)] = 1
            words = torch.from_numpy(np.packbits(mask).view(np.int64))
        found = np.unpackbits(self._ring.broadcast(words).numpy().view(np.uint8))
        return np.flatnonzero(found).astype(np.int64)

    def eligible(self, clients: Ints) -> Ints:
        """Return those of these connected real clients that a round may ask: under tree noise, once in a tree."""
        if self._releases is None or self.job.kind != TREE:
            return clients
        if self._releases.account.starts_a_tree:
            self._asked.clear()
        return np.asarray([client for client in clients.tolist() if client not in self._asked], dtype=np.int64)

    def asked(self, clients: Iterable[int]) -> None:
        """Remember which real clients a round has asked."""
        self._asked.update(clients)

    def clip(self, memory: dict[str, torch.Tensor]) -> float:
        """Return the clip of this round. `memory` is the server's memory, which has the adaptive clip."""
        if not self.job.spec.adaptive:
            return float(self.job.spec.clip)
        return float(memory[CLIP]) if CLIP in memory else self.job.spec.first_clip

    def noise(self, clip: float) -> float:
        """Return the standard deviation of the noise on each element of a round's result; of one node of a tree."""
        z, spec = self._mechanism.noise_multiplier, self.job.spec
        return (update_noise(z, self.job.bit_noise) if spec.adaptive else z) * clip / self.job.divisor

    def release(self, aggregate: Aggregate, clip: float, round: int) -> None:
        """Record the release of a round, and add the noise to this worker's sums, on rank 0.

        If the clients have added the noise, `charge` was called before the sum was unmasked, and nothing is left to do.

        Raises OSError if the ledger cannot be written; nothing is released then.
        """
        if self._releases is None or self.shares is not None:
            return
        noise, bits = self._releases.noise(aggregate.size, clip, round)
        aggregate.add_noise(noise, {BITS: torch.tensor([bits], dtype=torch.float64)} if self.job.spec.adaptive else {})
        passing("privacy: noise added, not released")

    @property
    def shares(self) -> NoiseShares | None:
        """The noise that the clients add; None if the server adds it. On rank 0, which alone has real clients."""
        return None if self._releases is None else self._releases.account.mechanism.shares

    def charge(self, round: int) -> None:
        """Record the release of a sum that has the clients' noise, before clients are asked to unmask it.

        Raises OSError if the ledger cannot be written; the sum must then not be unmasked.
        """
        assert self._releases is not None, "rank 0 has the account"
        self._releases.account.charge(round)

    def release_metrics(self, total: Floats, norm: float, round: int) -> Floats:
        """Return the sum of the clients' metrics with noise. `norm`: the largest norm of what one client adds to it.

        The release is recorded before. If the clients have added the noise, both was done before the sum was unmasked.

        Raises OSError if the ledger cannot be written; nothing is released then.
        """
        if self.shares is not None:
            return total
        assert self._releases is not None, "rank 0 has the account"
        self._releases.account.charge(round)
        std = self._releases.account.mechanism.noise_multiplier * norm
        found: Floats = np.rint((total + self._releases.source.normal(len(total), std, round, 2)) / (std * 1e-6))
        return found * (std * 1e-6)

    def follow(self, outcome: RoundAggregate, memory: dict[str, torch.Tensor]) -> None:
        """Store the adaptive clip of the next round in the server's memory."""
        spec = self.job.spec
        if spec.adaptive:
            bits = float(outcome.sums.pop(BITS))
            clip = next_clip(self.clip(memory), bits, self.job.expected, spec.quantile, spec.clip_lr)
            memory[CLIP] = torch.tensor([clip], dtype=torch.float64)

    def close(self) -> None:
        """Close the ledger."""
        if self._releases is not None:
            self._releases.ledger.close()
