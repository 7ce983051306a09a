"""What a phase cost, measured from its points beside its formulas: one event at its end."""

from __future__ import annotations

from collections import defaultdict
from statistics import fmean, median
from typing import Any

from rayps.costs import Costs, amount
from rayps.grid import Grid
from rayps.metrics import Point

_WARM = 1  # rounds of each worker that do not count: memory is still being made, and rings formed


class Tally:
    """Hears a phase's points of single workers; `event()` says what its steps cost."""

    def __init__(self, strategy: str, costs: Costs) -> None:
        self._strategy, self._costs = strategy, costs
        self._points: dict[int, list[Point]] = defaultdict(list)
        self._seen: dict[int, int] = defaultdict(int)

    def hear(self, points: list[Point]) -> None:
        """Take in points of single ranks, before they are merged."""
        for point in points:
            if point["kind"] == "round":
                rank = point["rank"]
                self._seen[rank] += 1
                kept = self._points[rank]
                if self._seen[rank] == _WARM + 1:
                    kept.clear()
                kept.append({key: value for key, value in point.items() if isinstance(value, (int, float))})
                del kept[:-_KEPT]

    def event(self) -> dict[str, Any]:
        """The phase's costs a step, measured and by formula; see `measured`."""
        found = measured(self._points, self._costs.grid)
        return {
            "kind": "costs",
            "message": words(self._costs, found),
            "strategy": self._strategy,
            "measured": found,
            "formula": self._costs.to_dict(),
        }


_KEPT = 1_000  # newest rounds of each worker


def measured(points: dict[int, list[Point]], grid: Grid) -> dict[str, Any]:
    """What a step took, from points of each rank.

    bytes, messages: of all workers. idle: the share of the engines' time in which they waited, in all and by stage.
    activations: the most held at once, by stage. compute: each worker's seconds, and imbalance: how much the longest
    is above the mean. exposed: the share of a step that communication and waiting add to the compute.
    hidden: the share of the gradients' bytes that left while backward went on. What is not known is left out.
    """
    ranks = sorted(rank for rank in points if points[rank])
    if not ranks:
        return {}
    found: dict[str, Any] = {"rounds": max(len(points[rank]) for rank in ranks)}
    for key in ("bytes", "messages"):
        if all(key in point for rank in ranks for point in points[rank]):
            found[key] = sum(fmean(point[key] for point in points[rank]) for rank in ranks)
    seconds = {key: [_middle(points[rank], key) for rank in ranks] for key in ("seconds", "compute", "idle", "busy")}
    work = seconds["busy"] if None not in seconds["busy"] else seconds["compute"]
    known = [each for each in work if each is not None]
    if known and fmean(known) > 0:
        found |= {"compute": known, "imbalance": max(known) / fmean(known) - 1}
        found["slowest"] = ranks[known.index(max(known))]
    whole = sum(each for each in seconds["seconds"] if each is not None)
    if whole > 0 and known:
        found["exposed"] = max(0.0, 1 - sum(known) / whole)
    if None not in seconds["idle"] and None not in seconds["busy"]:
        stages: dict[int, list[tuple[float, float]]] = defaultdict(list)
        for rank, idle, busy in zip(ranks, seconds["idle"], seconds["busy"], strict=True):
            stages[grid.at(rank).stage].append((idle or 0.0, busy or 0.0))
        found["idle"] = _share([pair for stage in stages.values() for pair in stage])
        found["idles"] = [_share(stages[stage]) for stage in sorted(stages)]
    held = [(grid.at(rank).stage, point["activations"]) for rank in ranks for point in points[rank]
            if "activations" in point]  # fmt: skip
    if held:
        found["activations"] = [max(n for at, n in held if at == s) for s in sorted({at for at, _ in held})]
    hidden = [point["hidden"] for rank in ranks for point in points[rank] if "hidden" in point]
    if hidden:
        found["hidden"] = fmean(hidden)
    return found


def words(costs: Costs, found: dict[str, Any]) -> str:
    """One sentence of what was measured, with the formula's value beside each."""
    said = []
    if "bytes" in found:
        said.append(f"a step sends {amount(found['bytes'])}{_beside(costs.bytes, amount)}")
    if "messages" in found:
        said.append(f"{found['messages']:.4g} messages{_beside(costs.messages, '{:.4g}'.format)}")
    if "idle" in found:
        said.append(f"stages wait {found['idle']:.1%} of the time{_beside(costs.idle, lambda x: f'{float(x):.1%}')}")
    if "activations" in found:
        wanted = f" ({'/'.join(map(str, costs.peaks))} by formula)" if costs.peaks else ""
        said.append(f"they hold {'/'.join(map(str, found['activations']))} activations at most{wanted}")
    if len(found.get("compute", ())) > 1:
        said.append(f"worker-{found['slowest']} computes {found['imbalance']:.0%} longer than the mean")
    if "hidden" in found:
        said.append(f"{found['hidden']:.0%} of the gradients leave while backward goes on")
    return "; ".join(said) or "no step was measured"


def _beside(formula: Any, write: Any) -> str:
    return "" if formula is None else f" ({write(formula)} by formula)"


def _middle(points: list[Point], key: str) -> float | None:
    values = [point[key] for point in points if key in point]
    return median(values) if values else None


def _share(pairs: list[tuple[float, float]]) -> float:
    whole = sum(idle + busy for idle, busy in pairs)
    return sum(idle for idle, _ in pairs) / whole if whole else 0.0
