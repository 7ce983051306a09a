"""What a private job's epsilon means, in words: against whom it holds, and what it assumes. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rayps_client.values import JsonObject, Keywords

from rayps.core.job.records import Event, Point
from rayps.privacy.accountant import NAMES
from rayps.privacy.mechanism import CLIENT, NEIGHBOURS, Mechanism
from rayps.privacy.noise_shares import NoiseShares
from rayps.privacy.options import ALL, DISTRIBUTED, FIXED, POISSON, TREE, PrivacySpec

_SAMPLING = {
    POISSON: "Each {unit} is drawn independently with the probability {probability:.4g} in each round. Who was drawn "
    "is in no record.",
    FIXED: "{drawn} of {units} {unit}s are drawn in each round. Who was drawn is in no record.",
    ALL: "Any {unit} may take part in any round: sampling adds nothing to the protection.",
    DISTRIBUTED: "Any {unit} may take part in any round: sampling adds nothing to the protection.",
    TREE: "A {unit} takes part at most once in the {restart} rounds of a tree: sampling adds nothing to the "
    "protection.",
}
_EVERYONE = "Every {unit} takes part in every round: sampling adds nothing to the protection."
_SEEDED = "its noise was drawn from the job's seed (noise=seeded), so whoever knows the seed can remove it."


@dataclass(frozen=True, slots=True)
class Setting:
    """The facts of a job that its claim depends on. `unit` is "client" or "row"."""

    unit: str
    units: int  # how many there are
    real_clients: bool = False
    masked: bool = False  # whether the server sees only the sum of the clients' updates
    divided: bool = False  # whether a unit is a row, and workers hold the rows
    restart: int | None = None
    servers: bool = False  # whether workers push their parts of a sum to servers
    started_from: bool = False  # whether the first parameters come from a file
    answers: bool = False  # whether the job computes statistics, and trains no model
    void: str | None = None  # why the job proves nothing, whatever it releases: see `void`


def claim(spec: PrivacySpec, mechanism: Mechanism, setting: Setting) -> JsonObject:
    """Return what is claimed as JSON-ready data, without the numbers that grow: `with_releases` adds those."""
    return {
        "delta": spec.delta,
        "budget": spec.epsilon,
        "unit": setting.unit,
        "noise_multiplier": mechanism.noise_multiplier,
        "mechanism": mechanism.to_wire(),
        "neighbours": NEIGHBOURS[mechanism.kind].format(unit=setting.unit),
        "accountant": NAMES[mechanism.kind],
        "proves": (why := _not_proven(spec, setting)) is None,
        "not_proven": why,  # why the claim proves nothing; None if it proves what it says
        "holds_against": _holds_against(setting, mechanism.shares),
        "trusted": _trusted(setting, mechanism.shares),
        "assumes": _assumes(spec, mechanism, setting),
    }


def with_releases(facts: Keywords, epsilon: float, releases: int) -> JsonObject:
    """Return a claim with the number of releases, epsilon, and the claim as a sentence."""
    if not facts["proves"]:
        sentence = f"This run proves nothing: {facts.get('not_proven') or _SEEDED}"
    elif not releases:
        sentence = "This run's ledger has no release: nothing was disclosed so far."
    else:
        s = "" if releases == 1 else "s"
        sentence = (
            f"The releases in this run's ledger ({releases} noised sum{s}), and all that is computed from them, are "
            f"({epsilon:.4g}, {facts['delta']:g})-differentially private, where two data sets are neighbours if "
            f"{facts['neighbours']}."
        )
    return {**facts, "claim": sentence, "epsilon": epsilon, "releases": releases}


def claim_of_run(events: Iterable[Event], points: Iterable[Point]) -> JsonObject | None:
    """Return the claim of a run from its journal: the last event `privacy`, and epsilon of all rounds that were run.

    If that event has epsilon and the number of releases, these are of the ledger, and are taken.
    Return None if the run is not private.
    """
    facts = None
    for event in events:
        if event["kind"] == "privacy" and "neighbours" in event:
            facts = {key: value for key, value in event.items() if key not in ("seq", "time", "kind", "message")}
    if facts is None:
        return None
    if "releases" in facts:
        return with_releases(facts, facts["epsilon"], facts["releases"])
    rounds = [point for point in points if point.get("epsilon") is not None]
    epsilon = max((float(point["epsilon"]) for point in rounds), default=0.0)
    return with_releases(facts, epsilon, max((int(point["releases"]) for point in rounds), default=0))


def void(spec: PrivacySpec, strategy: object) -> str | None:
    """Return why a phase with `spec` under `strategy` proves nothing, whatever it releases; None if it can prove."""
    return own_strategy(strategy) or (None if spec.proves else _SEEDED)


def own_strategy(strategy: object) -> str | None:
    """Return why a user's own strategy proves nothing: its code sees what was drawn; None for a strategy of rayps."""
    kind = type(strategy)
    if kind.__module__.partition(".")[0] == "rayps":
        return None
    return (
        f"{kind.__name__} is a strategy of your own, whose code sees the drawn rows or clients and may publish what "
        "depends on them without noise (metrics, events, parameters); use a strategy of rayps for a claim."
    )


def delta_too_large(delta: float, units: int, unit: str) -> str | None:
    """Return why a claim with `delta` about so many units proves nothing; None if `delta` is small enough."""
    if delta * units < 1:
        return None
    return (
        f"delta={delta:g} is not below 1 / {units}, the number of {unit}s, so that the claim allows the disclosure of "
        f"all data of a {unit}; give delta={0.1 / units:.1g} or less."
    )


def _not_proven(spec: PrivacySpec, setting: Setting) -> str | None:
    if setting.void is not None or not spec.proves:
        return setting.void or _SEEDED
    return delta_too_large(spec.delta, setting.units, setting.unit)


def _holds_against(setting: Setting, shares: NoiseShares | None) -> list[str]:
    found = [
        f"whoever has the {'answers' if setting.answers else 'final model'} or a checkpoint",
        "whoever reads the job's metrics, events and pages, whose values come from the noised sums or from evaluation "
        "data that is assumed to be public",
    ]
    if shares is not None:
        found.append("the service and whoever reads its disk, as long as the service follows the protocol")
        if shares.colluding:
            clients = "client" if shares.colluding == 1 else "clients"
            found.append(f"up to {shares.colluding} {clients} of a round, even if they work together with the service")
    elif setting.unit == CLIENT:
        found.append("the other clients, even if they work together")
    return found


def _trusted(setting: Setting, shares: NoiseShares | None) -> str:
    if shares is not None:
        return (
            f"The clients are trusted to add the noise: of the {shares.asked} that a round asks, at least "
            f"{shares.asked - shares.colluding} add their share as agreed and tell it to nobody. At least "
            f"{shares.least} are in each sum, so {shares.count} such shares. The service adds no noise, and sees only "
            "sums that have it; it is trusted to follow the protocol of secure aggregation, and to ask for the agreed "
            "noise."
        )
    if setting.masked:
        return "The server sees only the sum of the clients' updates, and is trusted to add the noise to that sum."
    if setting.unit == CLIENT:
        return "The workers and the service see each client's update before the noise, and are trusted."
    if setting.servers:
        return "The workers read the rows, and the servers add the workers' parts of a sum; both are trusted."
    return "The workers read the rows and compute their gradients, and are trusted."


def _assumes(spec: PrivacySpec, mechanism: Mechanism, setting: Setting) -> list[str]:
    everyone = mechanism.kind == POISSON and mechanism.probability >= 1
    sampling = (_EVERYONE if everyone else _SAMPLING[mechanism.kind]).format(
        unit=setting.unit,
        probability=mechanism.probability,
        drawn=mechanism.drawn,
        units=mechanism.units,
        restart=setting.restart,
    )
    found = [
        sampling,
        f"The number of {setting.unit}s ({setting.units}) and all options of the job are public, and were chosen "
        "without looking at the data.",
        "The evaluation data is public, or contains none of the units.",
        "The same data is used in no other job; epsilons of several jobs add up.",
        "Times are not protected: how long a round takes is visible.",
    ]
    if setting.unit == CLIENT:
        found.append("All of a person's rows belong to one client.")
    if setting.real_clients:
        found.append("Who has joined, and the number of samples that each client reported, is visible in the service.")
    if (warning := delta_too_large(spec.delta, setting.units, setting.unit)) is not None:
        found.append(f"WARNING: {warning}")
    if setting.started_from:
        found.append("The job's first parameters were public, or are charged in the account of the job that made them.")
    return found
