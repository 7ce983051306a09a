"""Draw a division into clients as SVG: for each client a bar, and below the bar a square for each label. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rayps.data.clients import ClientSummary

_CELL, _BARS, _LEFT, _TOP, _SIDE = 14, 80, 84, 58, 16  # pixels
_STYLE = """
  svg { --ground: #ffffff; --ink: #15191d; --soft: #5a646e; --empty: #f0f2f4; --bar: #d9822b; --cell: #0e6a8a }
  @media (prefers-color-scheme: dark) {
    svg { --ground: #15191e; --ink: #e6eaee; --soft: #9ca7b2; --empty: #1f252b; --bar: #f0a856; --cell: #4fb3d1 } }
  text { font: 12px -apple-system, "Segoe UI", Roboto, "Liberation Sans", Arial, sans-serif; fill: var(--ink);
         font-variant-numeric: tabular-nums }
  .title { font-size: 15px; font-weight: 600 } .soft { fill: var(--soft) } .end { text-anchor: end }
  .ground { fill: var(--ground) } .empty { fill: var(--empty) } .bar { fill: var(--bar) } .cell { fill: var(--cell) }
""".strip()


def picture(summary: ClientSummary) -> str:
    """Return the picture of `Clients.summary()` as SVG, with colors for light and dark pages.

    The more rows of a label a client has, the more opaque is the square.
    """
    names, labels = summary["names"], summary["labels"]
    title = f"{summary['clients']} clients, {summary['rows']} rows: {summary['rule']}"
    subtitle = f"rows of a client: {summary['smallest']} to {summary['largest']}, median {summary['median']:g}"
    if summary["clients"] > len(names):
        subtitle += f"; {len(names)} of the clients are shown, the largest first"
    wide = max(_LEFT + len(names) * _CELL + _SIDE, max(9 * len(title), 7 * len(subtitle)) + 2 * _SIDE)
    high = _TOP + _BARS + 8 + len(labels) * _CELL + 24
    parts = [
        f'<text class="title" x="{_SIDE}" y="24">{escape(title)}</text>',
        f'<text class="soft" x="{_SIDE}" y="44">{escape(subtitle)}</text>',
        *_bars(summary),
        *_cells(summary),
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" width="{wide}" height="{high}" '
        f'role="img" aria-label="{escape(title, quote=True)}">\n<style>{_STYLE}</style>\n'
        '<rect class="ground" width="100%" height="100%"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _bars(summary: ClientSummary) -> Iterator[str]:
    bottom, most = _TOP + _BARS, summary["largest"]
    yield f'<text class="soft end" x="{_LEFT - 8}" y="{_TOP + 10}">{most}</text>'
    yield f'<text class="soft end" x="{_LEFT - 8}" y="{bottom}">rows</text>'
    for k, (name, size) in enumerate(zip(summary["names"], summary["sizes"], strict=True)):
        high = max(1.0, size / most * _BARS)
        yield (
            f'<rect class="bar" x="{_LEFT + k * _CELL}" y="{bottom - high:.1f}" width="{_CELL - 2}" '
            f'height="{high:.1f}"><title>client {escape(name)}: {size} rows</title></rect>'
        )


def _cells(summary: ClientSummary) -> Iterator[str]:
    top, most = _TOP + _BARS + 8, max((max(row) for row in summary["counts"]), default=0) or 1
    for i, label in enumerate(summary["labels"]):
        shown = label if len(label) <= 10 else label[:9] + "…"
        yield f'<text class="end" x="{_LEFT - 8}" y="{top + i * _CELL + 11}">{escape(shown)}</text>'
    for k, row in enumerate(summary["counts"]):
        for i, count in enumerate(row):
            kind = f'"cell" opacity="{0.15 + 0.85 * count / most:.2f}"' if count else '"empty"'
            yield (
                f'<rect class={kind} x="{_LEFT + k * _CELL}" y="{top + i * _CELL}" width="{_CELL - 2}" '
                f'height="{_CELL - 2}"><title>client {escape(summary["names"][k])}, label '
                f"{escape(summary['labels'][i])}: {count}</title></rect>"
            )
