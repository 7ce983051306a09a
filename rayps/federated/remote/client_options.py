"""A strategy's options for real clients: how they join, what they send, and whether they evaluate."""

from __future__ import annotations

from dataclasses import dataclass

from rayps_client.values import Json

from rayps.core.strategy import options


@dataclass(frozen=True)
class RealClients:
    """The options of a federated strategy that apply to real clients only.

    Args:
        clients: how the job waits for real clients (`rayps.federated.remote.join_options`); None: simulated clients.
        secure: `secagg(...)`, so that the server sees sums only (`rayps.federated.remote.secure_options`).
        upload, download: in how few bytes parameters travel (`rayps.federated.remote.coding_options`).
        client_evaluation: whether clients evaluate the model on their own rows at each evaluation.
        metric_bound: metrics of clients are limited to [-metric_bound, metric_bound] under masks or with noise.
    """

    clients: Json = None
    secure: Json = None
    upload: str | None = None
    download: str | None = None
    client_evaluation: bool = False
    metric_bound: float = 1.0

    def __post_init__(self) -> None:
        options.flag(self, "client_evaluation")
        options.number(self, "metric_bound", above=0)
