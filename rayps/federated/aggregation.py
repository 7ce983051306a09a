"""The aggregation options of a strategy: rule, clipping, and how many replies a round needs. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from rayps.core.errors import ConfigError
from rayps.core.values import Json, is_number
from rayps.federated.population import options
from rayps.federated.robust_rules import AggregationRule, rule_of


@dataclass(frozen=True)
class Aggregation:
    """The options with which the replies of a round become one update.

    Each reply is clipped to the norm `clip`, then `rule` combines them. `min_replies`: a round with fewer leaves the
    model unchanged. `enough`: a round ends after this many replies. `over_selection`: a share s; a round that needs n
    replies asks (1 + s) n clients, and ends with n replies.
    """

    rule: Json | AggregationRule = "mean"
    clip: float | None = None
    min_replies: int = 1
    enough: int | None = None
    over_selection: float = 0.0

    def __post_init__(self) -> None:
        options.check_replies(self.min_replies, self.enough, self.over_selection)
        rule_of(self.rule)
        if self.clip is not None and (not is_number(self.clip) or self.clip <= 0):
            raise ConfigError(
                f"clip is {self.clip!r}: give the largest norm of an update, above 0, or none", field="clip"
            )

    @property
    def chosen_rule(self) -> AggregationRule:
        """The rule, parsed from its text or wire form."""
        return rule_of(self.rule)

    def asked(self, needed: int, clients: int) -> int:
        """Return how many of `clients` a round asks if it needs the replies of `needed` clients."""
        return min(clients, int(needed * (1 + self.over_selection) + 0.5))

    def must_be_met(self, asked: int, clients: int) -> None:
        """Check `min_replies`. Raises ConfigError: it is more than the clients that a round asks."""
        if self.min_replies > asked:
            raise ConfigError(
                f"min_replies is {self.min_replies}, and a round asks {asked} of {clients} clients: no round would "
                "ever count; lower it, or raise fraction",
                field="min_replies",
            )
