"""The options `upload` and `download`: in how few bytes the parameters travel between a job and its real clients.

    upload      how clients code their updates: int8, top_k:0.05 or mask:0.1
    download    how w_t is coded for the clients: int8

`rayps_client.exchange.upload_coding` says what each does. A decoded update is added to w_t, so that clip, screening and
rules have a reply as without coding.
"""

from __future__ import annotations

from rayps_client.errors import ConfigError
from rayps_client.exchange.coding_names import TOP_K, download_name, upload_name

from rayps.core.strategy.text import quoted
from rayps.federated.remote.client_options import RealClients


def check_codings(real: RealClients, asynchronous: str | None) -> None:
    """Check the options `upload` and `download`. `asynchronous`: the strategy's name if its rounds are; else None.

    Raises:
        ConfigError: an option cannot be read, the clients are simulated, updates are summed under masks, or rounds are
            asynchronous and updates are coded by top_k.
    """
    upload = upload_name(real.upload)
    download_name(real.download)
    for name, value in (("upload", real.upload), ("download", real.download)):
        if value is not None and real.clients is None:
            raise ConfigError(
                f"{name} is {value!r}, but the clients are simulated, and nothing is sent to them: give "
                f"clients=remote, or leave {name} out",
                field=name,
            )
    if upload is not None and upload[0] == TOP_K and asynchronous is not None:
        raise ConfigError(
            f"upload is {quoted(real.upload)}, but under {asynchronous} a client may reply several times from the same "
            "round, and what top_k leaves out is stored by round: give upload=int8 or upload=mask:SHARE",
            field="upload",
        )
    if real.upload is not None and real.secure is not None:
        raise ConfigError(
            f"upload is {quoted(real.upload)}, "
            "but secure sums need whole numbers in the same places from every client: "
            "which elements top_k sends would be seen, int8 has scales of each client, and each client has a mask of "
            "its own. Leave upload out, and give fewer bits in secagg(bits=...)",
            field="upload",
        )
