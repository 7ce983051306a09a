"""The names of the gradient compressions. The codecs are in `rayps.comm.compress`."""

from __future__ import annotations

from rayps_client.errors import ConfigError

COMPRESSIONS = ("fp16", "bf16", "int8", "top_k", "auto")
TOP_K = 0.01  # default fraction of the elements that top_k sends


def compression_of(given: object) -> tuple[str, float]:
    """Parse the option `compression`: return its name, and the fraction of the elements that top_k sends.

    Raises:
        ConfigError: `given` is none of fp16, bf16, int8, top_k, top_k:FRACTION and auto.
    """
    name, colon, share = given.partition(":") if isinstance(given, str) else ("", "", "")
    try:
        fraction = float(share) if colon else TOP_K
    except ValueError:
        fraction = 0.0
    if name not in COMPRESSIONS or not 0 < fraction <= 1 or (colon and name != "top_k"):
        raise ConfigError(
            f"compression is {given!r}: give none, fp16, bf16, int8, auto, top_k (the largest {TOP_K:.0%} of the "
            "elements) or top_k:FRACTION with a fraction above 0 and up to 1",
            field="compression",
        )
    return name, fraction
