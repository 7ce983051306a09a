"""What a job asks of its real clients, read from its strategy. Requests of clients need it, also while a job runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from rayps.federated.remote.secure_options import SecureOptions
from rayps.federated.strategy_interface import Federation
from rayps.strategies.catalogue import federations
from rayps.strategies.job import JobSpec

_STRATEGIES = 256  # the largest number of strategies whose terms are in memory


@dataclass(frozen=True, slots=True)
class ClientTerms:
    """What a job asks of clients that are processes elsewhere; a job without such clients asks nothing."""

    remote: bool = False  # whether the job has such clients
    members: bool = False  # whether they need certificates of their federation
    secure: tuple[SecureOptions, ...] = ()  # how their updates are summed under masks, in each phase that does so

    @property
    def verify(self) -> bool:
        """Whether clients check each other's keys before a secure round."""
        return any(each.verify for each in self.secure)


def terms_of(spec: JobSpec) -> ClientTerms:
    """Return what a job asks of its real clients. Jobs with the same strategy share the result.

    Raises:
        ConfigError: the strategy cannot be parsed.
    """
    return _terms_of(json.dumps(spec.strategy))


@lru_cache(_STRATEGIES)
def _terms_of(strategy: str) -> ClientTerms:
    return terms_in(federations(json.loads(strategy)))  # none of a user's own, which cannot have real clients


def terms_in(found: Sequence[Federation]) -> ClientTerms:
    """Return what a job with these federated strategies asks of its real clients."""
    joining = [each.joining for each in found if each.joining is not None]
    secure = tuple(each.secure for each in found if each.secure is not None)
    return ClientTerms(bool(joining), any(each.members for each in joining), secure)
