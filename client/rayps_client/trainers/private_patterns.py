"""The option `private` of a strategy: which layers stay with a client. The service parses it too, without numpy."""

from __future__ import annotations

from rayps_client.errors import ConfigError
from rayps_client.values import Json


def private_patterns(given: Json) -> tuple[str, ...]:
    """Return the option `private` of a strategy as a tuple of names and patterns; None means that nothing is private.

    A whole number is the name of a layer, as torch.nn.Sequential numbers them. Raises ConfigError if the option is
    neither a name nor a list of names.
    """
    names = [] if given is None else given if isinstance(given, (list, tuple)) else [given]
    for name in names:
        if isinstance(name, bool) or not isinstance(name, (str, int)) or name == "":
            raise ConfigError(
                f'private is {given!r}: give the name of a layer ("head"), or a list of names and glob patterns '
                '(["head", "*.bias"]; in text\nprivate=(head,*.bias), and "2.0.*" for a name that would be a number)',
                field="private",
            )
    return tuple(str(name) for name in names)
