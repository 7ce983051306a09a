"""Draw small line charts as SVG, with logarithmic axes, on which a power law is a straight line."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

_COLOURS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
)  # colour-blind readers can tell them apart
_WIDTH, _HEIGHT = 420, 330
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 118, 34, 40  # margins around the plot, in pixels
_FEW = 8  # up to this number of x values, the axis shows each of them


@dataclass(frozen=True, slots=True)
class ChartLine:
    """A line of a chart: measured points (x, y), and expected points. A point with y = 0 is not drawn."""

    name: str
    measured: Sequence[tuple[float, float]]
    expected: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart: lines under one title. `across` is the label of the x axis, `up` that of the y axis."""

    title: str
    across: str
    up: str
    lines: Sequence[ChartLine]
    even: bool = False  # True: the y axis is linear, not logarithmic, for values that differ little


def draw_page(charts: Sequence[Chart], columns: int = 2) -> str:
    """Return the charts as one SVG, in `columns` columns: measured points as dots, expected points as lines."""
    rows = -(-len(charts) // columns)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{columns * _WIDTH}" height="{rows * _HEIGHT}" '
        'font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for i, chart in enumerate(charts):
        parts.append(
            f'<g transform="translate({i % columns * _WIDTH},{i // columns * _HEIGHT})">{_draw_chart(chart)}</g>'
        )
    return "\n".join([*parts, "</svg>\n"])


def _draw_chart(chart: Chart) -> str:
    points = [point for line in chart.lines for point in (*line.measured, *line.expected) if point[1] > 0]
    if not points:
        return _draw_text(_LEFT, 18, f"{chart.title}: nothing was measured", bold=True)
    xs = sorted({x for x, _ in points})
    few = len(xs) <= _FEW
    across = _Axis(xs, _LEFT, _WIDTH - _RIGHT, 2.0 if few else 10.0)
    up = (_Even if chart.even else _Axis)([y for _, y in points], _HEIGHT - _BOTTOM, _TOP, 10.0)
    parts = [
        _draw_text(_LEFT, 18, chart.title, bold=True),
        _draw_text(across.middle, _HEIGHT - 8, chart.across, "middle"),
        _draw_text(6, _TOP - 6, chart.up),
    ]
    for tick in xs if few else across.ticks():
        parts.append(_draw_text(across.at(tick), _HEIGHT - _BOTTOM + 15, f"{tick:g}", "middle"))
    for tick in up.ticks():
        y = up.at(tick)
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(_draw_text(_LEFT - 6, y + 4, f"{tick:g}", "end"))
    for i, line in enumerate(chart.lines):
        parts += _draw_line(line, _COLOURS[i % len(_COLOURS)], across, up)
        parts.append(
            _draw_text(_WIDTH - _RIGHT + 10, _TOP + 12 + 15 * i, line.name, colour=_COLOURS[i % len(_COLOURS)])
        )
    return "".join(parts)


def _draw_line(line: ChartLine, colour: str, across: _Axis, up: _Axis | _Even) -> list[str]:
    path = " ".join(f"{across.at(x):.1f},{up.at(y):.1f}" for x, y in line.expected if y > 0)
    dots = [
        f'<circle cx="{across.at(x):.1f}" cy="{up.at(y):.1f}" r="3.5" fill="{colour}"/>'
        for x, y in line.measured
        if y > 0
    ]
    return [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.3"/>', *dots]


def _draw_text(
    x: float, y: float, words: str, anchor: str = "start", *, bold: bool = False, colour: str = "#222"
) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}"{weight}>{html.escape(words)}</text>'


class _Axis:
    """A logarithmic axis from pixel `start` to pixel `end` for the range of `values`."""

    def __init__(self, values: Sequence[float], start: float, end: float, base: float) -> None:
        self._base, self._start, self._end = base, start, end
        self._low, self._high = math.log(min(values), base), math.log(max(values), base)
        if self._high - self._low < 0.5:
            self._low, self._high = self._low - 0.25, self._high + 0.25

    @property
    def middle(self) -> float:
        return (self._start + self._end) / 2

    def at(self, value: float) -> float:
        share = (math.log(value, self._base) - self._low) / (self._high - self._low)
        return self._start + share * (self._end - self._start)

    def ticks(self) -> list[float]:
        """Return the values 1, 2 and 5 times a power of ten that are within the axis."""
        powers = range(math.floor(self._low) - 1, math.ceil(self._high) + 1)
        steps = [step * 10.0**power for power in powers for step in (1, 2, 5)]
        return [tick for tick in steps if self._low - 1e-9 <= math.log10(tick) <= self._high + 1e-9]


class _Even:
    """A linear axis from pixel `start` to pixel `end` for the range of `values`."""

    def __init__(self, values: Sequence[float], start: float, end: float, base: float) -> None:
        self._start, self._end, self._low, self._high = start, end, min(values), max(values)
        wide = max(self._high - self._low, 1e-9)
        power = base ** math.floor(math.log(wide, base))
        self._step = next(step * power for step in (0.1, 0.2, 0.5, 1.0, 2.0) if wide <= 6 * step * power)

    def at(self, value: float) -> float:
        return self._start + (value - self._low) / max(self._high - self._low, 1e-9) * (self._end - self._start)

    def ticks(self) -> list[float]:
        """Return the multiples of a round step that are within the axis."""
        first, last = math.ceil(self._low / self._step), math.floor(self._high / self._step)
        return [i * self._step for i in range(first, last + 1)]
