"""Combine the replies of one round into one update: screen, clip, apply the rule. The result is equal on all workers.

    a client's w_k          from `Trainer`, or from a process outside of the cluster
    [attack]                simulated attackers replace their update before it is screened
    screen                  a reply is rejected if it is not finite, is too large for the sum, or has buffers that no
                            model can have (`statistics`); the client is reported
    clip                    w_k - w_t is scaled down to the norm `clip`
       (local privacy)      a client would add its noise here, to its own clipped update
    sum                     rule "mean": the n_k w_k are added in fixed point (`exact_sum`), in one sum over all workers
       (secure aggregation) not here: real clients send masked whole numbers (`secure_rounds`), and their sum is the
                            round's result: there is no reply to screen, and no rule but the mean
    rule                    the other rules need all updates at once: they are gathered on each worker, as the rows of a
                            matrix in cohort order; buffers and `sums` of the clients are combined by the same rule,
                            each as a matrix of its own
       [central privacy]    one worker adds noise to its part of the sum of clipped updates, before the parts are added;
                            the sum is divided by a number that is fixed beforehand (`rayps.federated.private_rounds`)
    server                  `Federated.server` with `RoundAggregate.mean`, `RoundAggregate.delta`, `RoundAggregate.sums`

The steps in parentheses are not implemented. The mean takes memory for one model however many clients reply (in fixed
point: 4 times the model's bytes, for float64 3 times). A robust rule or an omniscient attack takes the memory of all n
updates. The bits of the result depend neither on the number of workers, nor on which worker trained a client, nor on
the order of replies. Under the mean, a single reply is returned unchanged.

Under the mean, buffers are averaged with the samples as weights, and `sums` are plain sums. Under a robust rule, the
buffers are combined by that rule. (geometric_median and centered_clipping measure distances, in which a count would
outweigh the statistics, so under these two integer buffers are combined by the median.) centered_clipping starts from
the buffers before the round. Each vector of `sums` is n times the rule's result for its n rows, so that SCAFFOLD's c is
still an estimate of the mean of all c_i. krum, multi_krum and bulyan choose clients by their updates alone
(`RoundAggregate.chosen`), and use nothing of the other clients. Under robust rules the numbers of samples have no
effect: `RoundAggregate.weight` is the number of replies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from rayps_client.errors import ConfigError
from rayps_client.values import Json
from torch import Tensor

from rayps.comm.ring.ring import Ring
from rayps.federated.population.attack_spec import AttackSpec, attack_of
from rayps.federated.rules.attacks import OWN, false_buffers, false_count, false_sums, false_update, omniscient_update
from rayps.federated.rules.buffer_statistics import NEGATIVE, BufferStatistics
from rayps.federated.rules.client_report import UpdateReports
from rayps.federated.rules.exact_sum import NOT_FINITE, TOO_LARGE, ExactSum, refusal
from rayps.federated.rules.gather_replies import Gathering, Replies
from rayps.federated.rules.robust_rules import AggregationRule, rule_of
from rayps.federated.rules.rule_arithmetic import (
    Matrix,
    Picks,
    Vector,
    aggregate,
    aggregate_others,
    clip_factor,
    median,
    members,
    picks,
)

BITS = "privacy.bits"  # name, among the sums, of the updates below the clip minus half of all, for adaptive clipping
BEFORE = "rule.before"  # name, in the server's memory, of the last round's result, for a rule that starts from it
_REASONS = (NOT_FINITE, TOO_LARGE, NEGATIVE)  # reasons for a rejection; workers sum how often each occurred, per client
_UPDATE, _BUFFERS = "", "buffers"  # names of two parts of a reply; the other names are those of `sums`


@dataclass(slots=True)
class RoundAggregate:
    """The result of a round, equal on every worker."""

    mean: Tensor | None  # mean of the w_k; None if there is no result, or replies started from different models
    delta: Tensor | None  # the mean of the w_k - w_t, or a robust rule's result for them; None if there is no result
    sums: dict[str, Tensor]  # from the name of a vector in the replies' `sums` to its unweighted sum
    count: int = 0  # number of usable replies
    weight: float = 0.0  # total samples of the usable replies; under a robust rule, the number of usable replies
    rejected: list[tuple[int, str]] = field(default_factory=list)  # (client, reason)
    # as `BufferStatistics` packs them; None if clients send no buffers, or there is no result
    buffers: Tensor | None = None
    chosen: list[int] | None = None  # the clients that krum, multi_krum or bulyan chose; None under other rules
    skipped: str | None = None  # why the round has no result, so that the model is unchanged; None if it has one
    void: bool = False  # whether a secure round could not be summed; then `skipped` says why
    noise: float = 0.0  # standard deviation of the noise on each element of `delta`


class _ReplySums:
    """The sums over a round's replies, in one vector of int64, so that one all-reduce adds up all workers' parts."""

    def __init__(self, kinds: Mapping[str, tuple[int, torch.dtype]], places: int) -> None:
        """Allocate the sums for a round of at most `places` clients.

        `kinds` is a dict from a sum's name to its length and dtype.
        """
        limbs, counts = [ExactSum.count_limbs(size, dtype) for size, dtype in kinds.values()], len(_REASONS) * places
        self._memory = torch.zeros(sum(limbs) + counts, dtype=torch.int64)
        parts = torch.split(self._memory, [*limbs, counts])
        self.others = {
            name: ExactSum(size, dtype, memory)
            for (name, (size, dtype)), memory in zip(kinds.items(), parts, strict=False)
        }
        self.main = self.others.pop(_UPDATE)
        self.counts = parts[-1]  # how often each reason occurred, for each client of the cohort
        self.places = places

    def clear(self) -> None:
        """Set all sums to zero."""
        for each in (self.main, *self.others.values()):
            each.clear()

    def sum_over_ranks(self, ring: Ring, refused: Sequence[int]) -> None:
        """Add the sums of all ranks. `refused` has this worker's counts of rejections, in the order of `counts`."""
        self.counts.copy_(torch.tensor(refused))
        for each in (self.main, *self.others.values()):
            _ = each.limbs  # brings the limbs, which are views of _memory, up to date
        ring.sum(self._memory)


@dataclass(slots=True)
class _OpenRound:
    """A round whose replies are being collected on this worker."""

    round: int
    w_t: Tensor
    buffers: Tensor | None  # the model's buffers before the round, packed
    place: dict[int, int]  # each client's position in the cohort
    sums: _ReplySums
    below: bool = True  # whether the last update was not scaled down by the clip
    refused: list[int] = field(init=False)  # on this worker: how often each reason occurred, for each position

    def __post_init__(self) -> None:
        self.refused = [0] * (len(_REASONS) * self.sums.places)

    def refuse(self, client: int, why: str) -> None:
        """Count the rejection of a client's reply."""
        self.refused[_REASONS.index(why) * self.sums.places + self.place[client]] += 1

    def rejected(self) -> list[tuple[int, str]]:
        """Return (client, reason) for each rejected reply. Valid after `_ReplySums.sum_over_ranks`."""
        counts = self.sums.counts.view(len(_REASONS), self.sums.places).T.tolist()
        return [
            (client, why)
            for client, times in zip(self.place, counts, strict=False)
            for why, count in zip(_REASONS, times, strict=True)
            for _ in range(count)
        ]


class Aggregate:
    """Combines the replies of each round, on one worker. All workers of a job must make the same calls."""

    def __init__(
        self,
        rule: Json | AggregationRule,
        clip: float | None,
        attack: Json | AttackSpec,
        size: int,
        dtype: torch.dtype,
        *,
        seed: int,
        clients: int,
        extras: Mapping[str, tuple[int, torch.dtype]] | None = None,
        least: int = 1,
        asynchronous: bool = False,
        statistics: BufferStatistics | None = None,
        divisor: float | None = None,
        reports: UpdateReports | None = None,
    ) -> None:
        """Prepare for updates of `size` elements of `dtype`, in a job with `clients` clients.

        Args:
            rule, attack: as text, in wire form, or parsed.
            clip: the largest norm of an update; None means that updates are not clipped.
            seed: the job's seed.
            extras: a dict from the name of a vector in a reply's `sums` to its length and dtype.
            statistics: the layout of the buffers that clients send; None if they send none.
            least: the fewest replies with which a round changes the model.
            asynchronous: whether replies may have started from older models, so that only w_k - w_t can be summed.
            divisor: the number by which the sum of a private job's updates is divided; None: the job is not private.
                The result then says nothing about single replies: not how many there were, nor which were rejected.
                Neither does the size of what workers exchange.
            reports: what sees each update before it is clipped; None: nothing does.
        """
        self.rule, self.clip = rule_of(rule), clip
        self.attack: AttackSpec | None = attack if isinstance(attack, AttackSpec) else attack_of(attack)
        self.size, self.dtype, self.least, self._seed = size, dtype, max(1, least), seed
        self._extras, self._statistics = dict(extras or {}), statistics
        self._attackers = frozenset() if self.attack is None else self.attack.attackers(seed, clients)
        self.gathers = self.rule.robust or (self.attack is not None and self.attack.omniscient)
        self._sums_models = not (
            asynchronous or self.gathers or clip is not None or divisor is not None
        )  # sums w_k, not w_k - w_t
        self._asynchronous, self._divisor, self._reports = asynchronous, divisor, reports
        self._sums: _ReplySums | None = None  # allocated for the largest round so far
        gathered: dict[str, tuple[int, torch.dtype]] = {_UPDATE: (size, dtype)}
        if self.rule.robust:
            gathered |= self._extras
            gathered |= {} if statistics is None else {_BUFFERS: (statistics.size, torch.float64)}
        self._gathering = Gathering(gathered if self.gathers else {})

    def begin(self, round: int, clients: Sequence[int], w_t: Tensor, buffers: Tensor | None = None) -> None:
        """Start a round with these clients, the cohort. Their order must be the same on all workers.

        `w_t` must not change until `combine` has returned. `buffers` are the model's packed buffers before the round;
        None if the model has no buffers.
        """
        places = max(1, len(clients) if self._divisor is None else 0)  # what is sent must not show how many clients
        if self._sums is None or places > self._sums.places:
            self._sums = _ReplySums(self._kinds(), places)
        self._sums.clear()
        place = {int(client): place for place, client in enumerate(dict.fromkeys(clients))}
        self._now = _OpenRound(round, w_t.detach().cpu(), buffers, place, self._sums)
        self._gathering.clear()

    def _kinds(self) -> dict[str, tuple[int, torch.dtype]]:
        """Return a dict from each sum's name to its length and dtype."""
        kinds = {_UPDATE: (0 if self.gathers else self.size, self.dtype)}
        if not self.rule.robust:
            kinds |= self._extras
            if self._statistics is not None:  # one more element: the sum of the samples, by which buffers are weighted
                kinds[_BUFFERS] = (self._statistics.size + 1, torch.float64)
        return kinds

    def flips(self, client: int) -> bool:
        """Return whether this client trains on false labels (`attack.labels`)."""
        return self.attack is not None and self.attack.flips_labels and client in self._attackers

    # ---- replies

    def add_reply(
        self,
        client: int,
        reply: Tensor,
        base: Tensor,
        weight: float,
        extra: Mapping[str, Tensor] | None = None,
        *,
        buffers: Tensor | None = None,
        samples: float = 1.0,
    ) -> str | None:
        """Add a client's reply: its w_k (`reply`), which was trained from `base`.

        Return None, or the reason why the reply is rejected. `extra` are the reply's `sums`, and `buffers` are its
        packed buffers, of `samples` samples. The caller may overwrite all arguments afterwards. Raises ConfigError if a
        vector's length or the weight is invalid.
        """
        attack = self.attack if client in self._attackers else None
        names = [name for name in self._extras if name != BITS]
        sent = {name: (extra or {})[name].detach().cpu().reshape(-1) for name in names}
        for name, each in sent.items():
            if each.numel() != self._extras[name][0]:
                raise ConfigError(
                    f"the vector {name!r} in the reply of client {client} has {each.numel()} elements, expected "
                    f"{self._extras[name][0]}"
                )
        if self._statistics is not None:
            assert buffers is not None, "a job whose clients send buffers"
            sent[_BUFFERS] = buffers
        if attack is not None:
            weight, samples = false_count(attack, weight), false_count(attack, samples)
            sent = {
                name: false_buffers(attack, each) if name == _BUFFERS else false_sums(attack, each)
                for name, each in sent.items()
            }
        why = self._refusal(sent, samples)
        if why is None:
            why = self._add_update(client, (reply.detach().cpu(), base.detach().cpu()), weight, sent)
        if why is not None and self._divisor is None:
            self._now.refuse(client, why)
        elif why is None and not self.rule.robust:
            for name, each in self._weighted(sent, samples).items():
                self._now.sums.others[name].add(each)
            if BITS in self._extras:
                self._now.sums.others[BITS].add(torch.tensor([0.5 if self._now.below else -0.5], dtype=torch.float64))
        return why

    def _refusal(self, sent: Mapping[str, Tensor], samples: float) -> str | None:
        """Return the reason why the `sums` or buffers of a reply cannot be used, or None if they can be used."""
        for each in (sent if self.rule.robust else self._weighted(sent, samples)).values():
            why = refusal(each)
            if why is not None:
                return why
        return None if self._statistics is None else self._statistics.refusal(sent[_BUFFERS])

    def _weighted(self, sent: Mapping[str, Tensor], samples: float) -> dict[str, Tensor]:
        """Return the vectors of a reply as the mean adds them: buffers times the samples, followed by the samples.

        The other vectors are returned as sent.
        """
        if _BUFFERS not in sent or self._statistics is None:
            return dict(sent)
        count = torch.tensor([float(samples)], dtype=torch.float64)
        return {**sent, _BUFFERS: torch.cat([sent[_BUFFERS] * samples, count])}

    def _add_update(
        self, client: int, vectors: tuple[Tensor, Tensor], weight: float, sent: Mapping[str, Tensor]
    ) -> str | None:
        """Add the update w_k - base of `vectors` = (w_k, base), or store the update for a robust rule.

        Return None, or the reason why the reply is rejected.
        """
        (reply, base), main = vectors, self._now.sums.main
        attack = self.attack if client in self._attackers else None
        if self._sums_models and (attack is None or attack.name not in OWN):
            if self._reports is not None:
                self._reports.see(reply, base, weight)
            return main.add(reply, weight)
        update = reply - base
        if attack is not None:
            update = false_update(attack, update, self._seed, self._now.round, client)
        if self._reports is not None:
            self._reports.see(update, torch.zeros_like(update), weight)
        if self._sums_models:
            return main.add(base + update, weight)
        if self.clip is not None or self.gathers:
            norm = float(torch.linalg.vector_norm(update, dtype=torch.float64))
            if not math.isfinite(norm):
                return NOT_FINITE if not torch.isfinite(update).all() else TOO_LARGE
            self._now.below = self.clip is None or norm <= self.clip
            factor = clip_factor(norm, self._bound(update.dtype))
            update = update * factor if factor < 1 else update.clone()
        if not self.gathers:
            return main.add(update, weight)
        why = main.add(update[:0], weight)  # counts the reply and its weight
        if why is None:
            more = {name: each.clone() for name, each in sent.items()} if self.rule.robust else {}
            self._gathering.add(self._now.place[client], weight, {_UPDATE: update, **more})
        return why

    def _bound(self, dtype: torch.dtype) -> float | None:
        """Return the norm to which updates are scaled down.

        In a private job it is smaller than `clip` by more than the scaled update's rounding errors can add.
        """
        if self.clip is None or self._divisor is None:
            return self.clip
        return self.clip * (1 - (1e-6 if dtype in (torch.float32, torch.float64) else 2**-6))

    def add_noise(self, noise: Tensor, others: Mapping[str, Tensor]) -> None:
        """Add noise, float64, to this worker's part of the sum of updates; `others`: the same for sums by name."""
        self._now.sums.main.add_noise(noise)
        for name, each in others.items():
            self._now.sums.others[name].add_noise(each)

    # ---- collective

    def combine(self, ring: Ring, memory: MutableMapping[str, Tensor] | None = None) -> RoundAggregate:
        """Combine the replies of all workers, and return the round's result. All workers must call this method.

        `memory` is the server's memory, in which a rule may store its last result.
        """
        main = self._now.sums.main
        self._now.sums.sum_over_ranks(ring, self._now.refused)
        if self._divisor is not None:
            return self._private(main, self._divisor)
        outcome = RoundAggregate(None, None, {}, main.count, float(main.weight), self._now.rejected())
        if self.rule.robust:
            outcome.weight = float(outcome.count)
        if outcome.count < self.least:
            came = outcome.count + len(outcome.rejected)
            needed = f"{self.least} {'is' if self.least == 1 else 'are'} needed"
            outcome.skipped = (
                f"{outcome.count} of {came} replies could be used, and {needed}" if came else "no reply came"
            )
        else:
            outcome.skipped = self.rule.lacking(outcome.count)
        if self.gathers and outcome.count:
            replies = self._gathering.gather(ring, list(self._now.place))
            if outcome.skipped is None:
                self._apply_rule(outcome, replies, {} if memory is None else memory)
        elif outcome.skipped is None:
            main.share_single_reply(ring)
            self._set_mean(outcome, main)
        if not self.rule.robust:
            self._set_other_sums(outcome)
        return outcome

    def _private(self, main: ExactSum, divisor: float) -> RoundAggregate:
        """Return the result of a private round, which has nothing but the noised sums."""
        delta = main.total(torch.float64) / divisor
        sums = {name: each.total() for name, each in self._now.sums.others.items()}
        mean = (self._now.w_t.double() + delta).to(self.dtype)
        return RoundAggregate(mean, delta.to(self.dtype), sums, round(divisor), divisor)

    def _set_other_sums(self, outcome: RoundAggregate) -> None:
        """Set the `sums` and buffers of the result `outcome`, if the rule is the mean."""
        outcome.sums = {name: each.total() for name, each in self._now.sums.others.items() if name != _BUFFERS}
        if self._statistics is not None and outcome.skipped is None:
            total = self._now.sums.others[_BUFFERS].total()
            outcome.buffers = total[:-1] / total[-1]

    def _set_mean(self, outcome: RoundAggregate, exact: ExactSum) -> None:
        w_t = self._now.w_t
        if self._sums_models:
            outcome.mean = exact.mean()
            outcome.delta = (exact.mean(dtype=torch.float64) - w_t.double()).to(self.dtype)
        else:
            outcome.delta = exact.mean()
            outcome.mean = None if self._asynchronous else w_t + outcome.delta

    def _apply_rule(self, outcome: RoundAggregate, replies: Replies, memory: MutableMapping[str, Tensor]) -> None:
        rows, clients = replies.rows, replies.clients
        self._replace_attackers(rows[_UPDATE], clients)
        if not self.rule.robust:
            exact = ExactSum(self.size, self.dtype)
            for row, weight in zip(rows[_UPDATE], replies.weights, strict=True):
                exact.add(torch.from_numpy(row).to(self.dtype), weight)
            self._set_mean(outcome, exact)
            return
        seed = int(np.random.SeedSequence([self._seed, self._now.round]).generate_state(1, np.uint64)[0])
        chosen = picks(self.rule, rows[_UPDATE], seed) if self.rule.selects else None
        before = memory[BEFORE].cpu().numpy() if BEFORE in memory else None
        result = torch.from_numpy(aggregate(self.rule, rows[_UPDATE], before, seed, chosen=chosen))
        if self.rule.remembers:
            memory[BEFORE] = result
        outcome.delta = result.to(self.dtype)
        outcome.mean = None if self._asynchronous else (self._now.w_t.double() + result).to(self.dtype)
        if chosen is not None:
            outcome.chosen = [clients[row] for row in members(self.rule, len(clients), chosen, seed)]
        for name, (_, dtype) in self._extras.items():
            before = memory[f"{BEFORE}/{name}"].cpu().numpy() if f"{BEFORE}/{name}" in memory else None
            made = torch.from_numpy(aggregate_others(self.rule, rows[name], before, seed, chosen=chosen))
            if self.rule.remembers:
                memory[f"{BEFORE}/{name}"] = made
            outcome.sums[name] = (made * len(clients)).to(dtype)
        if self._statistics is not None:
            outcome.buffers = torch.from_numpy(self._combine_buffers(rows[_BUFFERS], seed, chosen))

    def _combine_buffers(self, x: Matrix, seed: int, chosen: Picks | None) -> Vector:
        assert self._statistics is not None, "a job whose clients send buffers"
        buffers = self._now.buffers
        before = None if buffers is None else buffers.numpy()
        if not self.rule.by_distance:
            return aggregate_others(self.rule, x, before, seed, chosen=chosen)
        floats = self._statistics.floats
        center = None if before is None else before[:floats]
        return np.concatenate([aggregate_others(self.rule, x[:, :floats], center, seed), median(x[:, floats:])])

    def _replace_attackers(self, rows: Matrix, clients: list[int]) -> None:
        """Replace the rows of omniscient attackers by the vector that they compute from the honest clients' rows."""
        if self.attack is None or not self.attack.omniscient:
            return
        bad = np.array([client in self._attackers for client in clients])
        if bad.any() and not bad.all():
            rows[bad] = omniscient_update(self.attack, rows[~bad], int(bad.sum()))
