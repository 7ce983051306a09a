"""A strategy's options for combining replies: rule, clipping, and how many replies a round needs."""

from __future__ import annotations

from dataclasses import dataclass

from rayps_client.errors import ConfigError
from rayps_client.values import Json, is_number

from rayps.federated.population import options
from rayps.federated.rules.robust_rules import AggregationRule, rule_of


@dataclass(frozen=True)
class Aggregation:
    """The options by which the replies of a round are combined into one update.

    Each client's update is clipped to the norm `clip`, then `rule` combines the updates. A round with fewer than
    `min_replies` replies leaves the model unchanged. A round ends after `enough` replies. With `over_selection` s, a
    round that needs n replies asks (1 + s) n clients, and ends with n replies.
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
                f"clip is {self.clip!r}: give the largest norm of an update, a number above 0, or none", field="clip"
            )

    @property
    def chosen_rule(self) -> AggregationRule:
        """The rule, parsed from its text or wire form."""
        return rule_of(self.rule)

    def count_asked(self, needed: int, clients: int) -> int:
        """Return how many of `clients` clients a round asks if it needs `needed` replies."""
        return min(clients, int(needed * (1 + self.over_selection) + 0.5))

    def check_min_replies(self, asked: int, clients: int) -> None:
        """Check `min_replies` for rounds that ask `asked` of `clients` clients.

        Raises ConfigError if `min_replies` is above `asked`.
        """
        if self.min_replies > asked:
            raise ConfigError(
                f"min_replies is {self.min_replies}, but a round asks only {asked} of {clients} clients: no round "
                "would ever change the model; lower min_replies, or raise fraction",
                field="min_replies",
            )
