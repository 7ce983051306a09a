"""Exclude the clients because of which secure rounds are void, and say so (`rayps.federated.remote.blamed_clients`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rayps_client.values import Keywords

from rayps.federated.remote.blamed_clients import VOID_ROUNDS, Refusals, counted
from rayps.federated.remote.mailbox import Mailbox, RoundOrder

COMPARE_KEYS = "Compare their keys, and revoke the token of the one that is wrong (`rayps token revoke`)"
_SHOWN = 5  # the largest number of refusals in a message


@dataclass(frozen=True, slots=True)
class ExclusionNotice:
    """What an event says: that a client is excluded, or that the evidence is undecided."""

    text: str
    facts: Keywords


def exclude_blamed(
    mailbox: Mailbox, order: RoundOrder, refusals: Refusals, summed: frozenset[int]
) -> list[ExclusionNotice]:
    """Count a secure round, and exclude the clients that are blamed for too many. Return what events are to say.

    `summed`: the clients whose updates are in the round's sum; none if the round is void.
    """
    before = mailbox.void_counts()
    counts, decision = counted(before, order.serial, refusals, summed)
    found = []
    for number in sorted(decision.excluded):
        why = f"{VOID_ROUNDS} rounds were void because of it; in the last one {_about(number, refusals, order.sampled)}"
        mailbox.exclude(number, why)
        name = order.sampled[number]
        found.append(
            ExclusionNotice(
                f"{name} is asked no more: {why}. It is asked again when it joins with another token or certificate",
                {"round": order.round, "excluded": name},
            )
        )
    if decision.undecided:
        found.append(
            ExclusionNotice(
                f"{VOID_ROUNDS} rounds in a row were void because clients refuse each other, and it is undecided which "
                f"of them is wrong, so that none is excluded: {refusals_text(refusals, order.sampled)}. {COMPARE_KEYS}",
                {"round": order.round, "excluded": None},
            )
        )
    if (counts.blamed, counts.undecided) != (before.blamed, before.undecided):
        mailbox.write_void_counts(counts)
    return found


def refusals_text(refusals: Refusals, names: Mapping[int, str]) -> str:
    """Return which clients have refused which, and in which stage; "" if none has."""
    return _shown([_refused(who, refusals, names) for who in sorted(refusals.refused) if refusals.refused_by(who)])


def _about(number: int, refusals: Refusals, names: Mapping[int, str]) -> str:
    """Return who has refused a client, and whom it has refused."""
    by = [who for who in sorted(refusals.refused) if number in refusals.refused_by(who)]
    parts = []
    if by:
        stages = ", ".join(sorted({refusals.refused[who].stage for who in by}))
        parts.append(f"{_shown([names[who] for who in by])} refused its message ({stages})")
    if refusals.refused_by(number):
        parts.append(f"it refused {_refused(number, refusals, names).partition(' refused ')[2]}")
    return ", and ".join(parts)


def _refused(number: int, refusals: Refusals, names: Mapping[int, str]) -> str:
    whom = _shown([names[each] for each in sorted(refusals.refused_by(number))])
    return f"{names[number]} refused {whom} ({refusals.refused[number].stage})"


def _shown(parts: list[str]) -> str:
    more = len(parts) - _SHOWN
    return ", ".join(parts[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
