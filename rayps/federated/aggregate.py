"""One round's replies to one update: screen, clip, rule. What every worker takes in becomes the same on all of them.

    a client's w_k          from `Trainer`, or from a process outside of the cluster
    [attack]                who plays an attacker spoils its update, as if it had come so
    screen                  what is not finite, or too large to be counted, is left out: the reply is rejected by name
    clip                    w_k - w_t is shortened to the norm `clip`
       local privacy        noise of each client's own belongs here: clipped, and still with the client
    meet                    rule "mean": n_k w_k are added up in fixed point (`exact`), over all workers in one sum
       secure aggregation   its masks belong here: limbs are integers modulo 2^64, and only their sum is read
    rule                    the others need every update at once: rows in cohort order, gathered on each worker
       central privacy      its noise belongs here, on the sum of clipped updates, over a divisor fixed beforehand
    server                  `Federated.server` with `Met.mean`, `Met.delta`, `Met.sums`

The mean takes memory for one model (as fixed point: 4 times its bytes, float64: 3) however many clients reply, a robust
rule or an omniscient attacker n times that of an update. Either way the bits depend on neither the number of workers,
nor which of them a client trained on, nor the order. A single reply to the mean is passed on as it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rayps.federated.attacks import OWN, agreed, counted, spoilt
from rayps.federated.choices import Attack, Rule, attack_of, rule_of
from rayps.federated.exact import NOT_FINITE, TOO_LARGE, Exact
from rayps.federated.rules import Matrix, aggregate, clip_factor

BEFORE = "rule.before"  # in the server's memory: the last round's result, where a rule begins with it
_CODES = {None: 1, NOT_FINITE: 1 << 20, TOO_LARGE: 1 << 40}  # what workers tell each other of a client; they add up


@dataclass(slots=True)
class Met:
    """What a round has come to; the same on every worker."""

    mean: Tensor | None  # of the w_k; None: no result, or replies began from several models
    delta: Tensor | None  # the mean, or the rule's result, of the w_k - w_t
    sums: dict[str, Tensor]  # of what clients sent beside, unweighted
    count: int = 0  # replies that counted
    weight: float = 0.0  # theirs
    rejected: list[tuple[int, str]] = field(default_factory=list)  # client, why
    skipped: str | None = None  # why the model stays as it is


class Aggregate:
    """The rounds of one worker's aggregation; all workers of a job make it alike and call it alike."""

    def __init__(
        self, rule: Any, clip: float | None, attack: Any, size: int, dtype: torch.dtype, *,
        seed: int, clients: int, extras: Mapping[str, tuple[int, torch.dtype]] | None = None, least: int = 1,
        asynchronous: bool = False,
    ) -> None:  # fmt: skip
        """For updates of `size` elements of `dtype`, from a job of so many `clients`.

        Args:
            rule, attack: as text, in wire form, or read (`choices`).
            extras: what clients send beside: by name, its length and dtype.
            least: replies that a round needs.
            asynchronous: replies may have begun from older models, so that only their updates are added up.
        """
        self.rule, self.clip = rule if isinstance(rule, Rule) else rule_of(rule), clip
        self.attack: Attack | None = attack if isinstance(attack, Attack) else attack_of(attack)
        self.size, self.dtype, self.least, self._seed = size, dtype, max(1, least), seed
        self._extras = dict(extras or {})
        self._attackers = frozenset() if self.attack is None else self.attack.attackers(seed, clients)
        self.gathers = self.rule.robust or (self.attack is not None and self.attack.omniscient)
        self._whole = not (asynchronous or self.gathers or clip is not None)  # w_k are added up, not w_k - w_t
        self._asynchronous = asynchronous
        self._places = 0

    def begin(self, round: int, clients: Sequence[int], w_t: Tensor) -> None:
        """A round in which these clients reply, in cohort order, the same on all workers. w_t stays until `meet`."""
        if len(clients) > self._places or not self._places:
            self._lay_out(max(1, len(clients)))
        for each in (self._main, *self._beside.values()):
            each.clear()
        self._codes = [0] * self._places
        self._round, self._w_t = round, w_t.detach().cpu()
        self._place = {int(client): place for place, client in enumerate(dict.fromkeys(clients))}
        self._rows: list[tuple[int, Tensor, float]] = []

    def _lay_out(self, places: int) -> None:
        """All that is added up stands in one vector of int64, so that workers meet in one sum."""
        kinds = {"": (0 if self.gathers else self.size, self.dtype), **self._extras}
        rooms = [Exact.room(size, dtype) for size, dtype in kinds.values()]
        self._home = torch.zeros(sum(rooms) + places, dtype=torch.int64)
        parts = torch.split(self._home, [*rooms, places])
        made = [Exact(size, dtype, home) for (size, dtype), home in zip(kinds.values(), parts, strict=False)]
        self._main, self._beside = made[0], dict(zip(self._extras, made[1:], strict=True))
        self._told, self._places = parts[-1], places

    def flips(self, client: int) -> bool:
        """Whether this client trains on `attack.labels` in place of its labels."""
        return self.attack is not None and self.attack.flips_labels and client in self._attackers

    # ---- replies

    def take(
        self, client: int, reply: Tensor, base: Tensor, weight: float, extra: Mapping[str, Tensor] | None = None
    ) -> str | None:  # fmt: skip
        """Take in a client's reply w_k, which began from `base`: None, or the reason why it is left out.

        The reply may change afterwards. Raises ConfigError: its length or weight cannot be.
        """
        why = self._screened(client, reply.detach().cpu(), base.detach().cpu(), weight, extra or {})
        self._codes[self._place[client]] += _CODES[why]
        return why

    def _screened(
        self, client: int, reply: Tensor, base: Tensor, weight: float, extra: Mapping[str, Tensor]
    ) -> str | None:
        given = {name: extra[name].detach().cpu().reshape(-1) for name in self._extras}
        refusals = (self._beside[name].refusal(each) for name, each in given.items())
        why = next((reason for reason in refusals if reason is not None), None) or self._added(
            client, reply, base, weight
        )
        if why is None:
            for name, each in given.items():
                self._beside[name].add(each)
        return why

    def _added(self, client: int, reply: Tensor, base: Tensor, weight: float) -> str | None:
        attack = self.attack if client in self._attackers else None
        if attack is not None:
            weight = counted(attack, weight)
        if self._whole and (attack is None or attack.name not in OWN):
            return self._main.add(reply, weight)
        update = reply - base
        if attack is not None:
            update = spoilt(attack, update, self._seed, self._round, client)
        if self._whole:
            return self._main.add(base + update, weight)
        if self.clip is not None or self.gathers:
            norm = float(torch.linalg.vector_norm(update, dtype=torch.float64))
            if not math.isfinite(norm):
                return NOT_FINITE if not torch.isfinite(update).all() else TOO_LARGE
            factor = clip_factor(norm, self.clip)
            update = update * factor if factor < 1 else update.clone()
        if not self.gathers:
            return self._main.add(update, weight)
        why = self._main.add(update[:0], weight)  # counts it, and its weight
        if why is None:
            self._rows.append((self._place[client], update, weight))
        return why

    # ---- together

    def meet(self, ring: Any, memory: MutableMapping[str, Tensor] | None = None) -> Met:
        """The round's result. `memory` is the server's, where a rule with a memory keeps it."""
        self._told.copy_(torch.tensor(self._codes))
        for each in (self._main, *self._beside.values()):
            _ = each.limbs  # settled: they stand in _home
        ring.sum(self._home)
        met = Met(None, None, {name: each.total() for name, each in self._beside.items()}, self._main.count,
                  float(self._main.weight), self._rejected())  # fmt: skip
        if met.count < self.least:
            came = met.count + len(met.rejected)
            needed = f"{self.least} {'is' if self.least == 1 else 'are'} needed"
            met.skipped = f"{met.count} of {came} replies could be used, and {needed}" if came else "no reply came"
        else:
            met.skipped = self.rule.lacking(met.count)
        if self.gathers and met.count:
            rows, weights, clients = self._gathered(ring)
            if met.skipped is None:
                self._take_rule(met, rows, weights, clients, {} if memory is None else memory)
        elif met.skipped is None:
            self._main.pass_on(ring)
            self._take_mean(met, self._main)
        return met

    def _rejected(self) -> list[tuple[int, str]]:
        told = zip(self._place, self._told.tolist(), strict=False)
        return [(client, why) for client, code in told for why in (NOT_FINITE, TOO_LARGE)
                for _ in range(code // _CODES[why] % (1 << 20))]  # fmt: skip

    def _take_mean(self, met: Met, exact: Exact) -> None:
        w_t = self._w_t
        if self._whole:
            met.mean = exact.mean()
            met.delta = (exact.mean(dtype=torch.float64) - w_t.double()).to(self.dtype)
        else:
            met.delta = exact.mean()
            met.mean = None if self._asynchronous else w_t + met.delta

    def _take_rule(
        self, met: Met, rows: Matrix, weights: list[float], clients: list[int], memory: MutableMapping[str, Tensor]
    ) -> None:
        self._conspire(rows, clients)
        if not self.rule.robust:
            exact = Exact(self.size, self.dtype)
            for row, weight in zip(rows, weights, strict=True):
                exact.add(torch.from_numpy(row).to(self.dtype), weight)
            self._take_mean(met, exact)
            return
        before = memory[BEFORE].cpu().numpy() if BEFORE in memory else None
        seed = int(np.random.SeedSequence([self._seed, self._round]).generate_state(1, np.uint64)[0])
        result = torch.from_numpy(aggregate(self.rule, rows, before, seed))
        if self.rule.name == "centered_clipping":
            memory[BEFORE] = result
        met.delta = result.to(self.dtype)
        met.mean = None if self._asynchronous else (self._w_t.double() + result).to(self.dtype)

    def _conspire(self, rows: Matrix, clients: list[int]) -> None:
        """Omniscient attackers change their rows, once the honest ones are known."""
        if self.attack is None or not self.attack.omniscient:
            return
        bad = np.array([client in self._attackers for client in clients])
        if bad.any() and not bad.all():
            rows[bad] = agreed(self.attack, rows[~bad], int(bad.sum()))

    def _gathered(self, ring: Any) -> tuple[Matrix, list[float], list[int]]:
        """Everyone's rows in cohort order, halves as float32; their weights and clients."""
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        most = int(ring.max(torch.tensor([len(self._rows)])))
        mine, head = torch.zeros(most, self.size, dtype=wide), torch.full((most, 2), -1.0, dtype=torch.float64)
        for at, (place, update, weight) in enumerate(self._rows):
            mine[at] = update
            head[at] = torch.tensor([place, weight], dtype=torch.float64)
        self._rows = []
        heads, everyone = ring.all_gather(head).view(-1, 2), ring.all_gather(mine).view(-1, self.size)
        places = heads[:, 0].tolist()
        order = sorted((at for at, place in enumerate(places) if place >= 0), key=lambda at: places[at])
        clients = list(self._place)
        return everyone[order].numpy(), heads[order, 1].tolist(), [clients[int(places[at])] for at in order]
