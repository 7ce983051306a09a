"""The texts of the options `upload` and `download`. `rayps_client.exchange.upload_coding` has what they stand for."""

from __future__ import annotations

from rayps_client.errors import ConfigError

INT8, TOP_K, MASK = "int8", "top_k", "mask"
_SHARES = {TOP_K: 0.05, MASK: 0.1}  # the share of the elements that is sent by default


def upload_name(given: object) -> tuple[str, float] | None:
    """Return the name of the coding of the option `upload` and its share of the elements; None for None.

    Raises:
        ConfigError: it is none of int8, top_k, top_k:SHARE, mask and mask:SHARE.
    """
    if given is None:
        return None
    name, colon, text = given.partition(":") if isinstance(given, str) else ("", "", "")
    try:
        fraction = float(text) if colon else _SHARES.get(name, 1.0)
    except ValueError:
        fraction = 0.0
    if name not in (INT8, *_SHARES) or not 0 < fraction <= 1 or (colon and name == INT8):
        raise ConfigError(
            f"upload is {given!r}: give int8, top_k:SHARE or mask:SHARE with the share of the elements that are sent, "
            "above 0 and up to 1 (top_k:0.05), or leave upload out",
            field="upload",
        )
    return name, fraction


def download_name(given: object) -> str | None:
    """Return the name of the coding of the option `download`, or None for None.

    Raises:
        ConfigError: it is not int8.
    """
    if given not in (None, INT8):
        raise ConfigError(f"download is {given!r}: give int8, or leave download out", field="download")
    return None if given is None else INT8
