"""The options `upload` and `download`: in how few bytes the parameters travel between a job and its real clients.

    upload      how clients code their updates: int8, top_k:0.05 or mask:0.1
    download    how w_t is coded for the clients: int8

`rayps_client.upload_coding` says what each does. A decoded update is added to w_t, so that clip, screening and rules
have a reply as without coding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rayps_client.coded_vectors import VectorCoding
from rayps_client.upload_coding import UpdateCode, download_of, update_coding, upload_of

from rayps.core.errors import ConfigError
from rayps.core.strategy_families import has_remote_clients
from rayps.federated.remote.signed_orders import OrderFacts

if TYPE_CHECKING:
    from rayps.federated.strategy_interface import FederatedView


class RoundCodings:
    """The codings of a job's rounds."""

    def __init__(self, strategy: FederatedView) -> None:
        self.download: VectorCoding | None = download_of(strategy.download)
        self.update: VectorCoding | None = update_coding({"upload": strategy.upload, "download": strategy.download})

    def update_code(self, facts: OrderFacts, client: int) -> UpdateCode | None:
        """Return the coding of a client's update in the round of an order. None: the client sends its parameters."""
        if self.update is None:
            return None
        return UpdateCode.of(self.update, facts["seed"], facts["phase"] + facts["round"], client)


def check_codings(strategy: FederatedView) -> None:
    """Check the options `upload` and `download` of a federated strategy.

    Raises:
        ConfigError: an option cannot be read, the clients are simulated, or updates are summed under masks.
    """
    upload_of(strategy.upload)
    download_of(strategy.download)
    for name, value in (("upload", strategy.upload), ("download", strategy.download)):
        if value is not None and not has_remote_clients(strategy):
            raise ConfigError(
                f"{name} is {value!r}, but the clients are simulated, and nothing is sent to them: give "
                f"clients=remote, or leave {name} out",
                field=name,
            )
    if strategy.upload is not None and strategy.secure is not None:
        raise ConfigError(
            f"upload is {strategy.upload!r}, but secure sums need whole numbers in the same places from every client: "
            "which elements top_k sends would be seen, int8 has scales of each client, and each client has a mask of "
            "its own. Leave upload out, and give fewer bits in secagg(bits=...)",
            field="upload",
        )
