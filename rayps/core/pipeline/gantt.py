"""A schedule's timeline as a Gantt chart: text for a terminal, SVG for a page. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape
from typing import NamedTuple

from rayps.core.pipeline.schedule import Action
from rayps.core.pipeline.simulate import Timeline

NAMES = {"F": "forward", "B": "backward", "W": "gradient of the weights", "·": "waits"}
WIDEST = 6  # most columns per unit of time, so that the chart of a small schedule stays small

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_FILL = {"F": " ", "B": "─", "W": "═"}  # pattern behind a label, so that kinds differ without colour too
_ANSI = {"F": (24, 31), "B": (29, 65), "W": (130, 136)}  # background of even and odd chunks, of 256 colours
_GREY = "\x1b[38;5;244m"
_OFF = "\x1b[0m"

_ROW, _BAR, _LEFT, _RIGHT, _TOP = 34, 26, 74, 144, 58  # pixels
_STYLE = """
  svg { --ground: #ffffff; --ink: #15191d; --soft: #5a646e; --wait: #f0f2f4; --line: #dde2e6;
        --F0: #0e6a8a; --F1: #8cc3d6; --B0: #d9822b; --B1: #e8ae74; --W0: #3d8f5f; --W1: #86bf9c;
        --on0: #ffffff; --on1: #15191d }
  @media (prefers-color-scheme: dark) {
    svg { --ground: #15191e; --ink: #e6eaee; --soft: #9ca7b2; --wait: #1f252b; --line: #2c343c;
          --F0: #4fb3d1; --F1: #2f7f98; --B0: #f0a856; --B1: #b3762f; --W0: #5cc48c; --W1: #3a8a60;
          --on0: #0b1014; --on1: #ffffff } }
  text { font: 12px -apple-system, "Segoe UI", Roboto, "Liberation Sans", Arial, sans-serif; fill: var(--ink);
         font-variant-numeric: tabular-nums }
  .title { font-size: 15px; font-weight: 600 } .soft { fill: var(--soft) } .in { font-size: 11px }
  .mid { text-anchor: middle } .end { text-anchor: end } .ground { fill: var(--ground) } .wait { fill: var(--wait) }
  .tick { stroke: var(--line) } rect.action { stroke: var(--ground); stroke-width: 1 }
""".strip()


class Bar(NamedTuple):
    """One action in one worker's row of the chart."""

    action: Action
    chunk: int  # number among the chunks of this worker
    start: float
    end: float


def draw_text(timeline: Timeline, width: int = 100, *, colour: bool = False, unit: str = "") -> str:
    """Return the chart in at most `width` columns, with one line for each worker.

    With `colour` the chart has ANSI codes, for a terminal only. `unit` is the unit of time, such as " s". Without
    `unit`, time is in units of the simulation.
    """
    heads = [f"stage {rank} " for rank in range(len(timeline.rows))]
    margin = max(map(len, heads))
    room, makespan = max(width - margin - 1, 10), float(timeline.makespan) or 1.0
    scale = room / makespan
    if scale >= 1 and not unit:
        scale = min(int(scale), WIDEST)
    longest = max((end - start for row in timeline.rows for action, start, end in row if action.kind == "F"), default=1)
    dense = longest * scale < 1.99  # no room for numbers
    lines = []
    for head, bars in zip(heads, make_bars(timeline), strict=True):
        lines.append(f"{head:>{margin}}│{''.join(_draw_cells(bars, makespan, scale, (dense, colour)))}")
    end = f"{makespan:.4g}{unit}"
    length = round(makespan * scale)
    lines.append(" " * margin + "└" + "─" * length)
    lines.append(" " * margin + " 0" + end.rjust(length - 1))
    lines.append(" " * (margin + 1) + _write_key(timeline, dense, colour))
    return "\n".join(lines)


def draw_svg(timeline: Timeline, title: str, *, unit: str = "", scale: float | None = None) -> str:
    """Return the chart as an SVG document for light and dark pages. `scale` is in pixels per unit of time."""
    makespan = float(timeline.makespan) or 1.0
    scale = min(28.0, 960 / makespan) if scale is None else scale
    wide, count = makespan * scale, len(timeline.rows)
    width, bottom = max(_LEFT + wide + _RIGHT, 560.0), _TOP + count * _ROW
    parts = [f'<text class="title" x="16" y="26">{escape(title)}</text>', *_draw_legend(timeline, width)]
    for tick in _choose_ticks(makespan):
        x = _LEFT + tick * scale
        parts.append(f'<line class="tick" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 4}" y2="{bottom + 2}"/>')
        parts.append(f'<text class="soft mid" x="{x:.1f}" y="{bottom + 18}">{tick:g}{escape(unit)}</text>')
    for rank, bars in enumerate(make_bars(timeline)):
        y = _TOP + rank * _ROW + (_ROW - _BAR) / 2
        base = y + _BAR / 2 + 4
        parts.append(f'<text class="end" x="{_LEFT - 10}" y="{base:.1f}">stage {rank}</text>')
        parts.append(f'<rect class="wait" x="{_LEFT}" y="{y:.1f}" width="{wide:.1f}" height="{_BAR}" rx="3"/>')
        parts += [_draw_bar(bar, y, scale, unit) for bar in bars]
        summary = f"idle {float(timeline.idles[rank]):.0%}, holds {timeline.peaks[rank]}"
        parts.append(f'<text class="soft" x="{_LEFT + wide + 10:.1f}" y="{base:.1f}">{summary}</text>')
    height = bottom + 32
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}" role="img" aria-label="{escape(title)}">\n<style>{_STYLE}</style>\n'
        f'<rect class="ground" width="100%" height="100%"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def make_bars(timeline: Timeline) -> list[list[Bar]]:
    """Return one row of bars for each worker, with times as floats and each worker's chunks numbered from 0."""
    count = len(timeline.rows)
    return [[Bar(a, a.chunk // count, float(start), float(end)) for a, start, end in row] for row in timeline.rows]


def _draw_cells(bars: list[Bar], makespan: float, scale: float, style: tuple[bool, bool]) -> Iterator[str]:
    at, (dense, colour) = 0, style
    chunked = any(bar.chunk for bar in bars)
    for bar in bars:
        lo, hi = max(at, round(bar.start * scale)), round(bar.end * scale)
        if hi > lo:
            yield _paint_grey("·" * (lo - at), colour)
            yield _paint(_choose_label(bar, hi - lo, dense, chunked), bar.action.kind, bar.chunk, colour)
            at = hi
    yield _paint_grey("·" * (round(makespan * scale) - at), colour)


def _choose_label(bar: Bar, width: int, dense: bool, chunked: bool) -> str:
    kind, micro = bar.action.kind, bar.action.micro
    if dense:
        words = [kind.lower() if bar.chunk % 2 else kind]
    else:
        words = [f"{kind}{micro}", kind]
        words[:0] = [f"{kind}{micro}{_LETTERS[bar.chunk % 26]}"] if chunked else []
    return next((word for word in words if len(word) <= width), kind).ljust(width, _FILL[kind])


def _write_key(timeline: Timeline, dense: bool, colour: bool) -> str:
    """Return the legend of the text chart."""
    kinds = [kind for kind in "FBW" if any(a.kind == kind for row in timeline.rows for a, _, _ in row)]
    words = [f"{_paint(kind, kind, 0, colour)} {NAMES[kind]}" for kind in kinds]
    if any(bar.chunk for bars in make_bars(timeline) for bar in bars):
        words.append("f b: in a worker's second chunk" if dense else "F3b: micro-batch 3 in a worker's second chunk")
    elif not dense:
        words[0] = f"{_paint('F3', 'F', 0, colour)} forward of micro-batch 3"
    return ", ".join([*words, f"{_paint_grey('·', colour)} idle"])


def _paint(word: str, kind: str, chunk: int, colour: bool) -> str:
    return f"\x1b[38;5;231;48;5;{_ANSI[kind][chunk % 2]}m{word}{_OFF}" if colour else word


def _paint_grey(word: str, colour: bool) -> str:
    return f"{_GREY}{word}{_OFF}" if colour and word else word


def _draw_bar(bar: Bar, y: float, scale: float, unit: str) -> str:
    kind, chunk, micro = bar.action
    x, wide = _LEFT + bar.start * scale, (bar.end - bar.start) * scale
    tooltip = f"{NAMES[kind]} of micro-batch {micro}, chunk {chunk}: {bar.start:.4g} to {bar.end:.4g}{unit}"
    label = ""
    if wide >= 7 * len(str(micro)) + 3:
        at = f'x="{x + wide / 2:.1f}" y="{y + _BAR / 2 + 4:.1f}" style="fill:var(--on{bar.chunk % 2})"'
        label = f'<text class="in mid" {at}>{micro}</text>'
    return (
        f'<g><title>{escape(tooltip)}</title><rect class="action" x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" '
        f'height="{_BAR}" rx="3" fill="var(--{kind}{bar.chunk % 2})"/>{label}</g>'
    )


def _draw_legend(timeline: Timeline, width: float) -> Iterator[str]:
    used = sorted(
        {(bar.action.kind, bar.chunk % 2) for bars in make_bars(timeline) for bar in bars}, key=_make_sort_key
    )
    chunked = any(odd for _, odd in used)
    x, y = 16.0, 46.0
    for kind, odd in used:
        name = NAMES[kind] + (f", {('even', 'odd')[odd]} chunk" if chunked else "")
        yield f'<rect x="{x:.1f}" y="{y - 10:.1f}" width="12" height="12" rx="3" fill="var(--{kind}{odd})"/>'
        yield f'<text class="soft" x="{x + 18:.1f}" y="{y:.1f}">{name}</text>'
        x += 40 + 6.2 * len(name)
    yield f'<rect class="wait" x="{x:.1f}" y="{y - 10:.1f}" width="12" height="12" rx="3"/>'
    yield f'<text class="soft" x="{x + 18:.1f}" y="{y:.1f}">waits</text>'


def _make_sort_key(kind_and_chunk: tuple[str, int]) -> tuple[int, int]:
    return "FBW".index(kind_and_chunk[0]), kind_and_chunk[1]


def _choose_ticks(makespan: float) -> Iterator[float]:
    """Return 0 and up to eight round numbers after it."""
    power = 10.0 ** math.floor(math.log10(makespan / 8))
    step = next(step for step in (power, 2 * power, 5 * power, 10 * power) if makespan / step <= 8 + 1e-9)
    yield from (round(i * step, 12) for i in range(int(makespan / step + 1e-9) + 1))
