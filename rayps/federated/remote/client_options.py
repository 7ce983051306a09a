"""A strategy's options for real clients: how they join, what they send, and whether they evaluate.

    upload      how clients code their updates: int8, top_k:0.05 or mask:0.1
    download    how w_t is coded for the clients: int8

`rayps_client.exchange.upload_coding` says what each does. A decoded update is added to w_t, so that clip, screening and
rules have a reply as without coding.
"""

from __future__ import annotations

from dataclasses import dataclass

from rayps_client.exchange.coding_names import download_name, upload_name
from rayps_client.values import Json

from rayps.core.strategy import options


@dataclass(frozen=True)
class RealClients:
    """The options of a federated strategy that apply to real clients only.

    Args:
        clients: how the job waits for real clients (`rayps.federated.remote.join_options`); None: simulated clients.
        secure: `secagg(...)`, so that the server sees sums only (`rayps.federated.remote.secure_options`).
        upload, download: in how few bytes parameters travel.
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
        upload_name(self.upload)
        download_name(self.download)
