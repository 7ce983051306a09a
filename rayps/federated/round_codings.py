"""How the rounds of a job with real clients code parameters and updates."""

from __future__ import annotations

from rayps_client.exchange.coded_vectors import VectorCoding
from rayps_client.exchange.signed_orders import OrderFacts
from rayps_client.exchange.upload_coding import UpdateCode, download_of, update_coding

from rayps.federated.remote.client_options import RealClients


class RoundCodings:
    """The codings of a job's rounds."""

    def __init__(self, real: RealClients) -> None:
        self.download: VectorCoding | None = download_of(real.download)
        self.update: VectorCoding | None = update_coding({"upload": real.upload, "download": real.download})

    def update_code(self, facts: OrderFacts, client: int) -> UpdateCode | None:
        """Return the coding of a client's update in the round of an order. None: the client sends its parameters."""
        if self.update is None:
            return None
        return UpdateCode.of(self.update, facts["seed"], facts["phase"] + facts["round"], client)
