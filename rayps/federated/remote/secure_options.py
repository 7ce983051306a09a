"""The option `secure`: real clients whose updates the service sees as one sum: `secure=secagg(clip=1.0)`.

clip             largest L2 norm of an update, which is scaled down to it; the whole numbers of the sum follow from it
bits=16          bits of an element of an update, before it is multiplied by the client's number of samples
max_weight=1000  largest weight: a client with more samples counts as one with so many; 1: all clients count equally,
                 and nothing tells how many samples one has
threshold=0.5    more than this fraction of a client and its neighbours must survive, or the round is void; a client's
                 vector can be unmasked only by so many of them together
neighbours=auto  clients with which each client exchanges masks; auto: all of them, or for many clients as few as
                 `rayps_client.secure.graph` finds safe. A number below its bound is refused, for the smallest round;
                 rounds with more clients use the bound where it is larger
verify=false     whether clients check each other's keys and the survivors with keys of their own (--peers)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rayps_client.errors import ConfigError
from rayps_client.secure.graph import least_neighbours
from rayps_client.secure.noise_sizes import margin_of, rounding
from rayps_client.secure.secure_facts import MOST_BITS, MOST_WEIGHT, SecureFacts, levels_of, word_bits
from rayps_client.values import Json, Keywords, is_number

from rayps.core.strategy.text import form, quote
from rayps.privacy.noise_shares import NoiseShares

SECAGG = "secagg"
AUTO = "auto"
LEAST = 2  # the sum of a single client is its update


@dataclass(frozen=True, slots=True)
class SecureOptions:
    """The options of `secure=secagg(...)`."""

    clip: float
    bits: int = 16
    max_weight: int = 1000
    threshold: float = 0.5
    neighbours: int | str = AUTO
    verify: bool = False

    def facts(
        self, clients: int, least: int, private_size: int | None = None, shares: NoiseShares | None = None
    ) -> SecureFacts:
        """Return what the order of a round of `clients` clients says, of which `least` must survive.

        `shares`: the noise that the clients add, or None. It is sized for the survivors that it names.

        `private_size`: with differential privacy, the number of the model's parameters. Rounding to the nearest step
        moves a vector by at most `rounding(size)` steps, so an update is then scaled down to a norm that is less than
        `clip` by this: the rounded one does not exceed `clip`.

        Raises:
            ConfigError: the sum of so many clients does not fit into 64 bits, or steps are too large for `clip`.
        """
        norm = self.clip
        if private_size is not None:
            norm -= self.clip / levels_of(self.bits) * rounding(private_size)
            if norm <= 0:
                raise ConfigError(
                    f"{self.bits} bits are too few for privacy with {private_size} parameters: rounding would exceed "
                    "clip; raise bits in secure=secagg(bits=...)",
                    field="secure",
                )
        noise = 0 if shares is None else shares.sigma
        word_bits(clients, self.max_weight, self.bits, margin_of(noise, clients))
        return {
            "clip": self.clip,
            "bits": self.bits,
            "max_weight": self.max_weight,
            "clients": clients,
            "threshold": self.threshold,
            "least": max(LEAST, least, 0 if shares is None else shares.least),
            "verify": self.verify,
            "norm": norm,
            "counts": private_size is None,
            "noise": noise,
        }

    @property
    def degree(self) -> int | None:
        """The number of a client's neighbours, or None for auto."""
        return None if isinstance(self.neighbours, str) else self.neighbours

    def too_few_neighbours(self, clients: int) -> tuple[bool, str]:
        """Return whether the number of neighbours is below the bound for `clients` clients, and what to do about it."""
        least, degree = least_neighbours(clients, self.threshold), self.degree
        return degree is not None and degree < least, (
            f"with neighbours={degree} the clients that remain when others drop out, or collude with the server, may "
            f"fall into parts, whose sums would be seen: of {clients} clients each needs {least} neighbours; give "
            f"neighbours={least} or more, or leave it out"
        )


def secure_of(given: Json) -> SecureOptions | None:
    """Parse the option `secure`. Return None for None: the service sees each update.

    Raises:
        ConfigError: the text is not of the form `secagg(clip=1.0,...)`, or a value is invalid.
    """
    if given is None:
        return None
    facts = form(given) if isinstance(given, str) else given
    if not isinstance(facts, Mapping) or facts.get("name", SECAGG) != SECAGG:
        raise ConfigError(
            f"secure is {quote(given)}: give secagg(clip=1.0), with the largest norm of an update, or leave secure out",
            field="secure",
        )
    options: Keywords = {key: value for key, value in facts.items() if key != "name"}
    for key in options:
        if key not in SecureOptions.__dataclass_fields__:
            known = ", ".join(SecureOptions.__dataclass_fields__)
            raise ConfigError(f"secure: secagg has no option {key!r}: its options are {known}", field="secure")
    if options.get("clip") is None:
        raise ConfigError(
            "secure: secagg needs clip, the largest norm of an update, from which the whole numbers of the sum follow: "
            "write\nsecagg(clip=1.0)",
            field="secure",
        )
    found = SecureOptions(**options)
    _check_number(found, "clip", found.clip, 0.0, None)
    _check_whole(found, "bits", 2, MOST_BITS)
    _check_whole(found, "max_weight", 1, MOST_WEIGHT)
    _check_number(found, "threshold", found.threshold, 0.5, 1.0)
    if not isinstance(found.verify, bool):
        raise ConfigError(f"secure: verify is {found.verify!r}: give true or false", field="secure")
    if found.neighbours != AUTO:
        _check_whole(found, "neighbours", 2, None, " or auto")
    return found


def _check_whole(options: SecureOptions, name: str, least: int, most: int | None, other: str = "") -> None:
    value = getattr(options, name)
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (most is not None and value > most):
        limit = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise ConfigError(f"secure: {name} is {value!r}: give a whole number {limit}{other}", field="secure")


def _check_number(options: SecureOptions, name: str, value: Json, least: float, below: float | None) -> None:
    fits = is_number(value) and (value > least if below is None else least <= value < below)
    if not fits:
        limit = f"above {least:g}" if below is None else f"from {least:g} to below {below:g}"
        raise ConfigError(f"secure: {name} is {value!r}: give a number {limit}", field="secure")
