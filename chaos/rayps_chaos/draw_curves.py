"""Draw the curves of `rayps_chaos.curves` as SVG: one panel for each quantity, one line for each process. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from rayps_chaos.curves import UseSample

_PANELS = (("memory_mb", "memory, MB"), ("descriptors", "open descriptors, or files"), ("threads", "threads"))
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _GAP = 900, 180, 60, 150, 40, 46  # pixels
_HUES = ("#0e6a8a", "#d9822b", "#3d8f5f", "#8a3ea8", "#b3404a", "#5a646e", "#6b8e23", "#c2a000")
_STYLE = """
  svg { --ground: #ffffff; --ink: #15191d; --soft: #5a646e; --line: #dde2e6 }
  @media (prefers-color-scheme: dark) { svg { --ground: #15191e; --ink: #e6eaee; --soft: #9ca7b2; --line: #2c343c } }
  text { font: 12px -apple-system, "Segoe UI", Roboto, "Liberation Sans", Arial, sans-serif; fill: var(--ink) }
  .soft { fill: var(--soft) } .end { text-anchor: end } .ground { fill: var(--ground) } .frame { stroke: var(--line) }
  polyline { fill: none; stroke-width: 1.5 }
""".strip()


def svg(samples: Sequence[UseSample], title: str) -> str:
    """Return the picture. A process that was started again continues the line of its name after a gap."""
    names = list(dict.fromkeys(sample.name for sample in samples))
    span = max([sample.at for sample in samples], default=0.0) or 1.0
    width = _LEFT + _WIDTH + _RIGHT
    height = _TOP + len(_PANELS) * (_HEIGHT + _GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">',
        f"<style>{_STYLE}</style>",
        f'<rect class="ground" width="{width}" height="{height}"/>',
        f'<text x="{_LEFT}" y="22">{escape(title)}</text>',
    ]
    for row, (quantity, label) in enumerate(_PANELS):
        parts += _panel(samples, names, span, (quantity, label, _TOP + row * (_HEIGHT + _GAP)))
    return "\n".join([*parts, "</svg>"])


def _panel(samples: Sequence[UseSample], names: list[str], span: float, what: tuple[str, str, int]) -> list[str]:
    quantity, label, top = what
    largest = max([float(getattr(sample, quantity)) for sample in samples], default=0.0) or 1.0
    bottom = top + _HEIGHT
    parts = [
        f'<text class="soft" x="{_LEFT}" y="{top - 4}">{label}</text>',
        f'<text class="soft end" x="{_LEFT - 6}" y="{top + 10}">{largest:.4g}</text>',
        f'<text class="soft end" x="{_LEFT - 6}" y="{bottom}">0</text>',
        f'<text class="soft end" x="{_LEFT + _WIDTH}" y="{bottom + 16}">{span / 60:.1f} min</text>',
        f'<line class="frame" x1="{_LEFT}" y1="{bottom}" x2="{_LEFT + _WIDTH}" y2="{bottom}"/>',
    ]
    ends: list[tuple[float, str, str]] = []
    for number, name in enumerate(names):
        hue, curves = _HUES[number % len(_HUES)], dict[int, list[str]]()
        last = 0.0
        for sample in (each for each in samples if each.name == name):
            last = bottom - _HEIGHT * float(getattr(sample, quantity)) / largest
            curves.setdefault(sample.pid, []).append(f"{_LEFT + _WIDTH * sample.at / span:.1f},{last:.1f}")
        parts += [f'<polyline stroke="{hue}" points="{" ".join(curve)}"/>' for curve in curves.values()]
        ends.append((last, name, hue))
    before = float("-inf")
    for y, name, hue in sorted(ends):
        before = max(y, before + 13)
        parts.append(f'<text x="{_LEFT + _WIDTH + 6}" y="{before + 4:.1f}" style="fill:{hue}">{escape(name)}</text>')
    return parts
