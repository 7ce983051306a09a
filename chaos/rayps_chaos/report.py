"""The report of a run of chaos: the faults and what followed, the recoveries by kind, the checks, the verdict. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from rayps_client.values import JsonObject

from rayps_chaos.history import HistoryCheck, JobHistory
from rayps_chaos.measure_recovery import FaultCost, InjectedFault, KindCost, by_kind, costs, usual_round


@dataclass(frozen=True, slots=True)
class ChaosReport:
    """What a run of chaos found. `goodput` is None if there was no run without faults to compare with."""

    job: str
    seed: int
    strategy: str
    faults: tuple[FaultCost, ...]
    skipped: tuple[InjectedFault, ...]
    kinds: tuple[KindCost, ...]
    checks: tuple[HistoryCheck, ...]
    usual_round: float  # median seconds between two rounds
    seconds: float  # from the submission to the end
    goodput: float | None  # rounds per second of wall time, as a share of those of the run without faults
    left_out: tuple[str, ...] = field(default_factory=tuple)  # wanted faults that this machine or job cannot have

    @property
    def good(self) -> bool:
        """Whether all checks hold."""
        return all(check.good for check in self.checks)

    def to_dict(self) -> JsonObject:
        """Return the report as JSON-ready data."""
        return {
            "job": self.job,
            "seed": self.seed,
            "strategy": self.strategy,
            "good": self.good,
            "faults": [
                {
                    "at": cost.fault.at,
                    "fault": str(cost.fault.planned.fault),
                    "target": cost.fault.planned.target,
                    "seconds": cost.fault.planned.seconds,
                    "done": cost.fault.words,
                    "recovery": cost.recovery,
                    "trained_again": cost.trained_again,
                    "repeated": cost.repeated,
                    "followed": list(cost.followed),
                }
                for cost in self.faults
            ],
            "skipped": [
                {"fault": str(each.planned.fault), "target": each.planned.target, "why": each.skipped}
                for each in self.skipped
            ],
            "kinds": [asdict(kind) for kind in self.kinds],
            "checks": [asdict(check) for check in self.checks],
            "usual_round": self.usual_round,
            "seconds": self.seconds,
            "goodput": self.goodput,
            "left_out": list(self.left_out),
        }


def pace(history: JobHistory) -> float | None:
    """Return the job's rounds per second of wall time, from the first point to the last; None with too few points.

    A repeated round counts once.
    """
    times = [point["time"] for point in history.points if point["kind"] == "round"]
    if len(times) < 2 or times[-1] <= times[0]:
        return None
    rounds = len({number for _, number in history.numbers}) - 1
    return rounds / float(times[-1] - times[0])


def make_report(
    history: JobHistory,
    injected: Sequence[InjectedFault],
    checks: Sequence[HistoryCheck],
    *,
    seed: int,
    strategy: str,
    left_out: Sequence[str] = (),
    without_faults: JobHistory | None = None,
) -> ChaosReport:
    """Return the report of a job. `without_faults`: the history of the same job without faults."""
    found = costs(history, injected)
    ours, theirs = pace(history), None if without_faults is None else pace(without_faults)
    return ChaosReport(
        history.job,
        seed,
        strategy,
        tuple(found),
        tuple(each for each in injected if each.skipped is not None),
        tuple(by_kind(found)),
        tuple(checks),
        usual_round(history),
        history.ended - history.begun,
        ours / theirs if ours is not None and theirs is not None else None,
        tuple(left_out),
    )
