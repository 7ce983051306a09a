#!/usr/bin/env python3
"""Draw the pictures of the documentation as SVG files: `python scripts/draw_pictures.py [NAME...]`.

Each function below `# Pictures` draws one file of `docs/pictures`. What a picture counts (bytes, slices, schedules,
places, cohorts, moves) comes from the functions of the package that the tests check; the algorithms of the ring are run
on recording meshes. The same code always gives the same files: tests/test_pictures.py compares them.
"""

from __future__ import annotations

import argparse
import itertools
import math
import queue
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


import torch

import rayps
from rayps.comm.ring import algorithms
from rayps.core.grid import Grid
from rayps.core.job.job_status import MOVES, Status
from rayps.core.partition import cut_slices, place, place_with_backups
from rayps.core.pipeline.schedule import compute_idle, make_table
from rayps.core.pipeline.simulate import simulate
from rayps.core.strategy.costs import estimate_costs, format_bytes
from rayps.core.strategy.staleness_bound import Clock
from rayps.core.strategy.traffic import Sizes
from rayps.federated.population.cohort import cohort, pack
from rayps.parallel.tensor.plan import plan

FOLDER = ROOT / "docs" / "pictures"
WIDTH = 760
INK, SOFT, LINE = "#1a2027", "#5a646e", "#c9d0d7"
KINDS = {  # fill and outline
    "worker": ("#dce9fb", "#2a62b8"),
    "server": ("#fde7d0", "#c2660f"),
    "driver": ("#def2e4", "#2f7d4f"),
    "data": ("#eef1f4", "#8a949e"),
    "lost": ("#fbdcdc", "#b83232"),
    "plain": ("#ffffff", "#8a949e"),
}
SHADES = ("#2a62b8", "#c2660f", "#2f7d4f", "#8b4fb0", "#b83232", "#0f7d8c", "#8a6d00", "#5a646e")
ELEMENTS = 1_000_000  # of the example's parameter vector, float32
SIZES = Sizes(ELEMENTS)


# Drawing


class Box(NamedTuple):
    """A rectangle on the canvas, in pixels."""

    x: float
    y: float
    width: float
    height: float

    @property
    def middle(self) -> tuple[float, float]:
        """Its centre."""
        return self.x + self.width / 2, self.y + self.height / 2

    def edge(self, towards: tuple[float, float], gap: float = 3.0) -> tuple[float, float]:
        """Where the line from the centre to `towards` leaves the rectangle, `gap` pixels outside."""
        x, y = self.middle
        dx, dy = towards[0] - x, towards[1] - y
        length = math.hypot(dx, dy) or 1.0
        across = (self.width / 2) / abs(dx) if dx else math.inf
        along = (self.height / 2) / abs(dy) if dy else math.inf
        share = min(across, along) + gap / length
        return x + dx * share, y + dy * share


class Canvas:
    """An SVG document under construction; y grows downwards."""

    def __init__(self, height: float, title: str, width: float = WIDTH) -> None:
        self.width, self.height, self.title = width, height, title
        self._parts: list[str] = []

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        anchor: str = "middle",
        size: float = 13,
        bold: bool = False,
        colour: str = INK,
    ) -> None:
        """One line of text; `y` is its base line."""
        weight = ' font-weight="600"' if bold else ""
        self._parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size:g}" fill="{colour}"{weight}>'
            f"{escape(words)}</text>"
        )

    def note(self, x: float, y: float, words: str, anchor: str = "middle") -> None:
        """Small, soft text."""
        self.text(x, y, words, anchor=anchor, size=12, colour=SOFT)

    def caption(self, y: float, words: str) -> None:
        """A line below the picture."""
        self.text(self.width / 2, y, words, size=12)

    def box(self, x: float, y: float, width: float, height: float, kind: str, *lines: str, size: float = 13) -> Box:
        """A box with centred lines; the first is bold if there are several."""
        fill, stroke = KINDS[kind]
        self.rect(x, y, width, height, fill, stroke, radius=6)
        step = size + 4
        top = y + height / 2 - step * (len(lines) - 1) / 2 + size * 0.35
        for number, line in enumerate(lines):
            bold = number == 0 and len(lines) > 1
            self.text(x + width / 2, top + step * number, line, size=size if number == 0 else size - 1, bold=bold)
        return Box(x, y, width, height)

    def rect(
        self, x: float, y: float, width: float, height: float, fill: str, stroke: str = "none", radius: float = 2
    ) -> None:
        """A rectangle."""
        self._parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{height:.1f}" rx="{radius:g}" '
            f'fill="{fill}" stroke="{stroke}"/>'
        )

    def circle(self, x: float, y: float, radius: float, fill: str, stroke: str = "none") -> None:
        """A circle."""
        self._parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" fill="{fill}" stroke="{stroke}"/>')

    def line(
        self,
        start: tuple[float, float],
        end: tuple[float, float],
        colour: str = LINE,
        *,
        dashed: bool = False,
        wide: float = 1.0,
    ) -> None:
        """A line without a head."""
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self._parts.append(
            f'<line x1="{start[0]:.1f}" y1="{start[1]:.1f}" x2="{end[0]:.1f}" y2="{end[1]:.1f}" stroke="{colour}" '
            f'stroke-width="{wide:g}"{dash}/>'
        )

    def arrow(
        self,
        start: tuple[float, float],
        end: tuple[float, float],
        colour: str = SOFT,
        *,
        bend: float = 0.0,
        dashed: bool = False,
        wide: float = 1.6,
    ) -> None:
        """An arrow; `bend` moves its middle to the left of its direction, in pixels."""
        (ax, ay), (bx, by) = start, end
        length = math.hypot(bx - ax, by - ay) or 1.0
        cx, cy = (ax + bx) / 2 + bend * (by - ay) / length * 2, (ay + by) / 2 - bend * (bx - ax) / length * 2
        ux, uy = bx - cx, by - cy
        far = math.hypot(ux, uy) or 1.0
        ux, uy = ux / far, uy / far
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        tip = [(bx, by), (bx - 8 * ux - 4 * uy, by - 8 * uy + 4 * ux), (bx - 8 * ux + 4 * uy, by - 8 * uy - 4 * ux)]
        self._parts.append(
            f'<path d="M {ax:.1f} {ay:.1f} Q {cx:.1f} {cy:.1f} {bx - 6 * ux:.1f} {by - 6 * uy:.1f}" fill="none" '
            f'stroke="{colour}" stroke-width="{wide:g}"{dash}/>'
            f'<polygon points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in tip)}" fill="{colour}"/>'
        )

    def link(
        self, source: Box, target: Box, colour: str = SOFT, *, bend: float = 0.0, dashed: bool = False, aside: float = 0
    ) -> None:
        """An arrow from box to box; `aside` moves it to the left of its direction, in pixels."""
        gap = 7.0 if aside else 3.0
        (ax, ay), (bx, by) = source.edge(target.middle, gap), target.edge(source.middle, gap)
        length = math.hypot(bx - ax, by - ay) or 1.0
        dx, dy = aside * (by - ay) / length, -aside * (bx - ax) / length
        self.arrow((ax + dx, ay + dy), (bx + dx, by + dy), colour, bend=bend, dashed=dashed)

    def svg(self) -> str:
        """The document: on white, with its title for readers that do not see it."""
        body = "\n".join(self._parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width:g}" height="{self.height:g}" '
            f'viewBox="0 0 {self.width:g} {self.height:g}" role="img" '
            'font-family="system-ui, Segoe UI, Roboto, Liberation Sans, Arial, sans-serif">\n'
            f"<title>{escape(self.title)}</title>\n"
            f'<rect width="100%" height="100%" fill="#ffffff"/>\n{body}\n</svg>\n'
        )


# Figures: what the package says


class Send(NamedTuple):
    """One message of a collective."""

    step: int
    source: int
    target: int
    chunk: int  # the part of the vector that begins at the message's first byte, of N parts
    bytes: int


class RecordingMesh:
    """A mesh of threads in place of connections: carries the bytes, and records who sends what to whom."""

    def __init__(self, rank: int, mail: dict[tuple[int, int], queue.Queue[bytes]], vector: torch.Tensor) -> None:
        self.rank, self.size = rank, math.isqrt(len(mail))
        self.sends: list[Send] = []
        self._mail, self._vector, self._step = mail, vector, 0

    def exchange(self, sends: Sequence[tuple[int, Any]], receives: Sequence[tuple[int, Any]]) -> None:
        """Send and receive buffers: one step."""
        for peer, buffer in sends:
            self._send(peer, buffer)
        for peer, buffer in receives:
            memoryview(buffer).cast("B")[:] = self._mail[peer, self.rank].get(timeout=60)
        self._step += 1

    def relay(self, right: int, left: int, first: Iterable[Any], arrivals: Iterable[tuple[Any, Any]]) -> None:
        """Send `first` to the right, then for each arrival from the left what its work returns."""
        for buffer in first:
            self._send(right, buffer)
            self._step += 1
        for buffer, work in arrivals:
            memoryview(buffer).cast("B")[:] = self._mail[left, self.rank].get(timeout=60)
            onward = work()
            if onward is not None:
                self._send(right, onward)
                self._step += 1

    def _send(self, peer: int, buffer: Any) -> None:
        view = memoryview(buffer).cast("B")
        at = torch.frombuffer(view, dtype=torch.uint8).data_ptr() - self._vector.data_ptr()
        chunk = at * self.size // (self._vector.numel() * self._vector.element_size())
        self.sends.append(Send(self._step, self.rank, peer, chunk, len(view)))
        self._mail[self.rank, peer].put(bytes(view))


def sends(algorithm: str, ranks: int) -> list[Send]:
    """All messages of the package's all-reduce among so many ranks, by step and rank; checks the sum."""
    mail: dict[tuple[int, int], queue.Queue[bytes]] = {}
    mail.update({(a, b): queue.Queue() for a in range(ranks) for b in range(ranks)})
    vectors = [torch.full((4 * ranks,), float(rank + 1)) for rank in range(ranks)]
    meshes: list[Any] = [RecordingMesh(rank, mail, vectors[rank]) for rank in range(ranks)]
    run = algorithms.ALGORITHMS[algorithm]
    threads = [
        threading.Thread(target=run, args=(mesh, vector, algorithms.add), daemon=True)
        for mesh, vector in zip(meshes, vectors, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert all(bool((vector == ranks * (ranks + 1) / 2).all()) for vector in vectors), "the sum is wrong"
    return sorted(send for mesh in meshes for send in mesh.sends)


def busiest(strategy: Any, workers: int) -> float:
    """Bytes that the busiest worker sends (or exchanges with servers) in a step, by the package's formula."""
    return sum(cost.busiest or 0.0 for cost in estimate_costs(strategy, workers, SIZES).traffic)


class Turn(NamedTuple):
    """One round of one worker on the simulated clock."""

    start: float
    end: float
    waited: float  # seconds before `start`


def staleness_rounds(staleness: int | None, seconds: Sequence[float], until: float) -> list[list[Turn]]:
    """Rounds of workers that take `seconds` each, under the package's `Clock`: a pull waits until it may be served."""
    done = dict.fromkeys(range(len(seconds)), 0)
    clock = Clock(done, staleness)
    turns: list[list[Turn]] = [[] for _ in seconds]
    free = [0.0] * len(seconds)  # when each worker asked for its next round
    ends: dict[int, float] = {}
    now = 0.0
    while now < until:
        for rank, duration in enumerate(seconds):
            if rank not in ends and clock.may_pull(rank):
                ends[rank] = now + duration
                turns[rank].append(Turn(now, now + duration, now - free[rank]))
        rank = min(ends, key=lambda each: (ends[each], each))
        now = free[rank] = ends.pop(rank)
        done[rank] += 1
    return turns


# Pictures


def ring() -> Canvas:
    """All-reduce around a ring."""
    n = 4
    c = Canvas(430, "All-reduce around a ring of four workers: reduce-scatter, then all-gather")
    x, y, radius = 170, 185, 105
    boxes = []
    for rank in range(n):
        angle = -math.pi / 2 + 2 * math.pi * rank / n
        left, top = x + radius * math.cos(angle) - 46, y + radius * math.sin(angle) - 21
        boxes.append(c.box(left, top, 92, 42, "worker", f"worker {rank}"))
    for rank in range(n):
        c.link(boxes[rank], boxes[(rank + 1) % n], KINDS["worker"][1], bend=14)
    whole = format_bytes(4 * ELEMENTS)
    c.text(x, y - 4, f"{n} chunks of", size=12)
    c.text(x, y + 13, f"{format_bytes(4 * (cut_slices(ELEMENTS, n)[0].stop))}", size=12)
    hops = sends("ring", n)
    steps = 1 + max(send.step for send in hops)
    left, top, wide, high = 420, 78, 76, 40
    c.text(left + wide * n / 2 - 20, 28, "chunk that each worker sends to the next one", bold=True)
    for rank in range(n):
        c.note(left + wide * rank + wide / 2, top - 12, f"worker {rank}")
    for step in range(steps):
        c.note(left - 12, top + high * step + 25, f"hop {step + 1}", "end")
    for send in hops:
        at = (left + wide * send.source + 4, top + high * send.step + 4)
        kind = "worker" if send.step < n - 1 else "driver"
        c.box(*at, wide - 8, high - 8, kind, f"{send.chunk}")
    middle = top + high * (n - 1)
    c.line((left - 60, middle), (left + wide * n, middle), SOFT, dashed=True)
    c.text(
        left + wide * n / 2 - 20,
        top + high * steps + 24,
        "hops 1-3 (reduce-scatter): the receiver adds the chunk",
        size=12,
    )
    c.text(
        left + wide * n / 2 - 20, top + high * steps + 42, "hops 4-6 (all-gather): the receiver copies the sum", size=12
    )
    sent = format_bytes(busiest(rayps.AllReduce(), n))
    c.text(x, 372, f"vector V = {whole}", size=12)
    c.text(x, 392, f"each worker sends 2(N-1)/N V = {sent}", size=12)
    return c


def tree() -> Canvas:
    """All-reduce up and down a binomial tree."""
    n = 8
    c = Canvas(400, "All-reduce along a binomial tree of eight workers")
    hops = sends("tree", n)
    steps = 1 + max(send.step for send in hops)
    left, top, wide, high = 150, 46, (WIDTH - 190) / n, 50
    spots_x = [left + wide * rank + wide / 2 for rank in range(n)]
    for rank in range(n):
        c.text(spots_x[rank], 28, f"worker {rank}", size=12)
        c.line((spots_x[rank], top - 6), (spots_x[rank], top + high * steps + 4))
    for send in hops:
        beside = [each.source for each in hops if each.step == send.step]
        copies = beside.index(send.source) - (len(beside) - 1) / 2 if send.step >= steps // 2 else 0  # these overlap
        y = top + high * send.step + high / 2 + 8 * copies
        up = send.step < steps // 2
        colour = KINDS["worker" if up else "driver"][1]
        direction = 1 if send.target > send.source else -1
        c.circle(spots_x[send.source], y, 4, colour)
        c.arrow((spots_x[send.source] + 5 * direction, y), (spots_x[send.target] - 2 * direction, y), colour, wide=2)
    for step in range(steps):
        what = "add" if step < steps // 2 else "copy"
        c.note(left - 8, top + high * step + high / 2 + 4, f"step {step + 1}: {what}", "end")
    c.caption(top + high * steps + 32, f"2 log2(N) = {steps} steps of the whole vector: few steps, for small vectors")
    return c


def parameter_server() -> Canvas:
    """Workers and shards."""
    n, shards = 4, 2
    c = Canvas(330, "A sharded parameter server: workers push gradients and pull parameters")
    parts = cut_slices(ELEMENTS, shards)
    servers = [
        c.box(130 + 270 * i, 28, 230, 58, "server", f"shard {i}", f"elements {cut.start:,} to {cut.stop - 1:,}")
        for i, cut in enumerate(parts)
    ]
    workers = [c.box(40 + 180 * i, 210, 140, 52, "worker", f"worker {i}", "model, data") for i in range(n)]
    for worker in workers:
        for server in servers:
            c.link(worker, server, KINDS["worker"][1], aside=4)
            c.link(server, worker, KINDS["server"][1], aside=4, dashed=True)
    traffic = {
        cost.what.split()[0]: cost.busiest or 0.0
        for cost in estimate_costs(rayps.ParameterServer(shards=2), n, SIZES).traffic
    }
    c.caption(
        292, f"push (solid): the gradient, cut by range, {format_bytes(traffic['push'])} from each worker in a round"
    )
    c.caption(
        312,
        f"pull (dashed): the parameters, {format_bytes(traffic['pull'])} to each worker; the optimizer runs on the "
        "shards",
    )
    return c


def staleness() -> Canvas:
    """Synchronous, bounded and asynchronous, on one clock."""
    until, seconds = 12.0, (1.0, 1.0, 2.5)
    cases: list[tuple[int | None, str]] = [(0, "staleness=0"), (2, "staleness=2"), (None, "staleness=none")]
    c = Canvas(400, "Rounds of three workers, of which one is slow, under three staleness bounds")
    left, scale, row = 130, (WIDTH - 170) / until, 26
    for number, (bound, name) in enumerate(cases):
        top = 44 + 112 * number
        turns = staleness_rounds(bound, seconds, until)
        rounds = sum(turn.end <= until for line in turns for turn in line)
        waited = sum(turn.waited for line in turns for turn in line)
        c.text(left, top - 10, f"{name}: {rounds} rounds, {waited:g} s of waiting", anchor="start", bold=True)
        for rank, line in enumerate(turns):
            y = top + row * rank
            c.note(left - 10, y + 15, f"worker {rank}", "end")
            c.rect(left, y, until * scale, row - 6, "#eef1f4")
            for index, turn in enumerate(turn for turn in line if turn.start < until):
                wide = (min(turn.end, until) - turn.start) * scale
                fill, stroke = KINDS["server" if rank == 2 else "worker"]
                c.rect(left + turn.start * scale, y, wide - 2, row - 6, fill, stroke)
                c.text(left + turn.start * scale + wide / 2, y + 14, str(index), size=11)
    c.caption(386, "worker 2 takes 2.5 s for a round, the others 1 s; grey: waiting for the slowest worker")
    return c


def server_group() -> Canvas:
    """Consistent hashing before and after a resize."""
    segments = [f"segment-{i}" for i in range(16)]
    three, four = [f"server-{i}" for i in range(3)], [f"server-{i}" for i in range(4)]
    before, after = place(segments, three, bound=1.25), place(segments, four, bound=1.25)
    copies = place_with_backups(segments, four, 1, bound=1.25)
    moved = [a != b for a, b in zip(before, after, strict=True)]
    c = Canvas(330, "Segments of a server group before and after a resize from three to four servers")
    left, wide = 150, (WIDTH - 180) / len(segments)
    rows = [
        ("3 servers", before, None),
        ("4 servers", after, moved),
        ("backup of each", [each[1] for each in copies], None),
    ]
    for number, (name, owners, marks) in enumerate(rows):
        y = 66 + 58 * number
        c.note(left - 12, y + 22, name, "end")
        for i, owner in enumerate(owners):
            outline = INK if marks and marks[i] else "none"
            c.rect(left + wide * i + 1, y, wide - 2, 34, SHADES[owner], outline, 3)
            c.text(left + wide * (i + 0.5), y + 22, str(owner), size=12, bold=True, colour="#ffffff")
            if marks and marks[i]:
                c.text(left + wide * (i + 0.5), y - 4, "moved", size=9, colour=SOFT)
    for i in range(len(segments)):
        c.note(left + wide * (i + 0.5), 54, str(i))
    c.note(left - 12, 54, "segment", "end")
    c.text(left + wide * 8, 28, "server of each segment", bold=True)
    share = sum(moved) / len(moved)
    c.caption(266, f"{sum(moved)} of {len(moved)} segments moved ({share:.0%}); the others stay")
    c.caption(288, "a primary answers pushes and pulls; with replicas=1 it acknowledges a push when the backup has it")
    return c


def pipeline() -> Canvas:
    """Four schedules of the same step."""
    p, m = 4, 8
    cases = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1)]
    colours = {"F": ("#9fc2f2", "#6f9fe0"), "B": ("#f3b27a", "#de8f48"), "W": ("#9ed6b2", "#6db98a")}
    c = Canvas(600, "Four pipeline schedules of four stages and eight micro-batches")
    left, row = 80, 22
    longest = max(float(simulate(make_table(name, p, m, v)).makespan) / v for name, v in cases)
    scale = (WIDTH - left - 20) / longest
    for number, (name, v) in enumerate(cases):
        timeline = simulate(make_table(name, p, m, v))
        top = 50 + 130 * number
        held = ", ".join(str(peak) for peak in timeline.peaks)
        chunks = f", {v} chunks a stage" if v > 1 else ""
        waits = f"idle {float(compute_idle(name, p, m, v)):.0%}; activations held by stage: {held}"
        c.text(left, top - 10, f"{name}{chunks}", anchor="start", bold=True)
        c.note(WIDTH - 20, top - 10, waits, "end")
        unit = scale / v  # a chunk is 1/v of a stage
        for rank, actions in enumerate(timeline.rows):
            y = top + row * rank
            c.note(left - 10, y + 14, f"stage {rank}", "end")
            c.rect(left, y, float(timeline.makespan) * unit, row - 4, "#f0f2f4")
            for action, start, end in actions:
                fill = colours[action.kind][action.chunk // p % 2]
                wide = float(end - start) * unit
                c.rect(left + float(start) * unit, y, wide - 0.8, row - 4, fill)
                if wide > 9:
                    c.text(left + float(start) * unit + wide / 2, y + 13, str(action.micro), size=10)
    for number, (kind, words) in enumerate((("F", "forward"), ("B", "backward"), ("W", "gradient of the weights"))):
        c.rect(left + 150 * number, 574, 14, 14, colours[kind][0])
        c.text(left + 150 * number + 20, 586, words, anchor="start", size=12)
    c.rect(left + 500, 574, 14, 14, "#f0f2f4")
    c.text(left + 520, 586, "waits", anchor="start", size=12)
    return c


def tensor_parallel() -> Canvas:
    """Row-wise, column-wise and alternating partitions of linear layers."""
    features, hidden, size = 4, 8, 2
    model = torch.nn.Sequential(torch.nn.Linear(features, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, features))
    chosen = plan(model, size)
    assert (chosen["0"].split, chosen["2"].split) == ("out", "in")
    c = Canvas(470, "Three partitions of linear layers between two workers")
    unit = 17
    tints = (KINDS["worker"][0], KINDS["server"][0])
    edges = (KINDS["worker"][1], KINDS["server"][1])

    def matrix(x: float, y: float, rows: int, columns: int, axis: str | None, name: str) -> None:
        """A matrix, its parts in the colours of their workers; `axis` is rows, columns, or None for all on both."""
        cuts = cut_slices(rows if axis == "rows" else columns, size)
        for rank, cut in enumerate(cuts):
            if axis == "rows":
                c.rect(x, y + unit * cut.start, unit * columns, unit * (cut.stop - cut.start), tints[rank], edges[rank])
            elif axis == "columns":
                c.rect(x + unit * cut.start, y, unit * (cut.stop - cut.start), unit * rows, tints[rank], edges[rank])
        if axis is None:
            c.rect(x, y, unit * columns, unit * rows, KINDS["data"][0], KINDS["data"][1])
        c.text(x + unit * columns / 2, y + unit * rows / 2 + 5, name)

    def product(top: float, rows: tuple[str | None, str | None, str | None], x: float = 60) -> None:
        """W x = y, with the way in which each is divided."""
        matrix(x, top, hidden, features, rows[0], "W")
        matrix(x + 90, top + unit * 2, features, 1, rows[1], "x")
        c.text(x + 128, top + unit * 4 + 5, "=")
        matrix(x + 150, top, hidden, 1, rows[2], "y")

    c.text(30, 26, "row-wise (out): each worker has some rows of W", anchor="start", bold=True)
    product(44, ("rows", None, "rows"))
    c.note(290, 90, "needs the whole x, gives a part of y", "start")
    c.note(290, 110, "forward: no exchange; backward: the gradients of x are summed", "start")
    c.text(30, 206, "column-wise (in): each worker has some columns of W", anchor="start", bold=True)
    product(224, ("columns", "rows", None))
    c.note(290, 270, "needs a part of x, gives a partial sum of the whole y", "start")
    c.note(290, 290, "forward: the partial sums are added; backward: no exchange", "start")
    c.text(30, 386, "alternating: out, then in", anchor="start", bold=True)
    labels = [
        ("x", "data"),
        ("W1: out", "worker"),
        ("ReLU", "worker"),
        ("W2: in", "worker"),
        ("sum", "driver"),
        ("y", "data"),
    ]
    boxes = [c.box(30 + 122 * i, 400, 92, 34, kind, label) for i, (label, kind) in enumerate(labels)]
    for before, after in itertools.pairwise(boxes):
        c.link(before, after)
    c.note(WIDTH / 2, 456, "the wide layer stays divided: one sum forward and one backward for each pair of layers")
    return c


def grid() -> Canvas:
    """Data, pipeline and tensor parallelism at once."""
    strategy = rayps.AllReduce(replica=rayps.Pipeline(stages=2, stage=rayps.TensorParallel(size=2)))
    layout: Grid = strategy.grid(8)
    c = Canvas(330, "Eight workers as two replicas of two stages of two tensor ranks")
    boxes: dict[int, Box] = {}
    for replica in range(layout.data):
        y = 22 + 134 * replica
        c.rect(20, y, WIDTH - 40, 112, "#fafbfc", LINE, 8)
        c.text(34, y + 62, f"replica {replica}", anchor="start", bold=True)
        for column, rank in enumerate(layout.replica(replica)):
            point = layout.at(rank)
            name = f"stage {point.stage}, tensor rank {point.tensor}"
            boxes[rank] = c.box(120 + 155 * column, y + 32, 140, 50, "worker", f"worker {rank}", name, size=12)
    for rank, box in boxes.items():
        point = layout.at(rank)
        edge = box.y if point.data == 0 else box.y + box.height
        if point.stage == 0:
            target = boxes[layout.rank(point.data, 1, point.tensor)]
            bend = 9 if point.data == 0 else -9
            x = 8 - 16 * point.tensor
            c.arrow((box.x + 70 + x, edge), (target.x + 70 + x, edge - (2 if bend > 0 else -2)), SHADES[1], bend=bend)
        if point.tensor == 0:
            other = boxes[layout.rank(point.data, point.stage, 1)]
            c.arrow((box.x + 142, box.y + 20), (other.x - 2, box.y + 20), SHADES[2])
            c.arrow((other.x - 2, box.y + 32), (box.x + 142, box.y + 32), SHADES[2])
        if point.data == 0:
            other = boxes[layout.along("data", rank)[1]]
            c.line((box.x + 28, box.y + 52), (box.x + 28, other.y - 2), SHADES[3], dashed=True, wide=2)
    legend = [(1, "activations, and their gradients back"), (2, "sums inside layers"), (3, "mean of the gradients")]
    for x, (shade, words) in zip((60, 370, 560), legend, strict=True):
        c.line((x, 282), (x + 24, 282), SHADES[shade], wide=2.5, dashed=shade == 3)
        c.text(x + 32, 286, words, anchor="start", size=12)
    c.note(
        WIDTH / 2,
        314,
        "a column (the same part of the model in all replicas) averages its gradients through its own ring",
    )
    return c


def hybrid() -> Canvas:
    """A dense part in step, sparse tables on servers."""
    c = Canvas(340, "Hybrid: dense parameters by all-reduce, sparse rows on servers")
    servers = [c.box(190 + 220 * i, 28, 160, 52, "server", f"server {i}", "rows of tables") for i in range(2)]
    workers = [c.box(60 + 230 * i, 190, 180, 64, "worker", f"worker {i}", "dense model, optimizer") for i in range(3)]
    for worker in workers:
        for server in servers:
            c.link(worker, server, KINDS["server"][1], aside=4, dashed=True)
            c.link(server, worker, KINDS["server"][1], aside=4, dashed=True)
    for first, second in itertools.pairwise(workers):
        c.link(first, second, KINDS["worker"][1])
    c.arrow((workers[2].x + 90, 257), (workers[0].x + 90, 257), KINDS["worker"][1], bend=16)
    c.caption(306, "solid: the mean of the dense gradients around a ring, every round")
    c.caption(326, "dashed: the rows that a batch touches, pulled ahead and pushed without waiting")
    return c


def downpour() -> Canvas:
    """Replicas that fetch and push every few steps."""
    c = Canvas(340, "Downpour: model replicas with parameter copies, and a parameter server")
    once, often = rayps.Downpour(), rayps.Downpour(n_push=4, n_fetch=4)
    c.box(130, 26, 500, 52, "server", "parameter server", "w, and optionally Adagrad's sums")
    for i in range(3):
        x = 70 + 230 * i
        worker = c.box(x, 170, 160, 64, "worker", f"replica {i}", "own copy of w, steps")
        data = c.box(x + 25, 262, 110, 30, "data", f"data of replica {i}", size=12)
        c.link(data, worker)
        c.arrow((x + 60, 167), (x + 60, 82), KINDS["worker"][1])
        c.arrow((x + 100, 82), (x + 100, 167), KINDS["server"][1], dashed=True)
        if i == 0:
            c.note(x + 52, 128, "push", "end")
            c.note(x + 108, 128, "fetch", "start")
    each, fewer = busiest(once, 3), busiest(often, 3)
    c.caption(
        326,
        f"V = {format_bytes(4 * ELEMENTS)}: {format_bytes(each)} a step with n_push=n_fetch=1, {format_bytes(fewer)} "
        "with 4",
    )
    return c


def hogwild() -> Canvas:
    """Workers of one host on one vector."""
    c = Canvas(240, "Hogwild: the workers of one host update one shared vector without locks")
    for i in range(16):
        c.rect(100 + 35 * i, 28, 33, 34, KINDS["server"][0], KINDS["server"][1])
    c.note(WIDTH / 2, 20, "one parameter vector in shared memory")
    for i, touched in enumerate(((1, 4, 9), (3, 6, 14), (2, 9, 12))):
        worker = c.box(110 + 200 * i, 140, 140, 46, "worker", f"worker {i}")
        for element in touched:
            c.arrow(
                (worker.middle[0], 138),
                (116 + 35 * element, 66),
                KINDS["lost" if element == 9 else "worker"][1],
                wide=1.3,
            )
    sent = format_bytes(busiest(rayps.Hogwild(), 3))
    c.caption(218, f"sent: {sent}. Where two workers write one element at once (red), one update may be lost")
    return c


def local_updates() -> Canvas:
    """Separate steps, then an average."""
    n, period, rounds = 3, 4, 12
    c = Canvas(260, "Local SGD: workers step separately and average their models every four rounds")
    left, wide, row = 110, (WIDTH - 180) / rounds, 34
    for rank in range(n):
        c.note(left - 10, 36 + row * rank + 20, f"worker {rank}", "end")
        for step in range(rounds):
            c.box(left + wide * step + 2, 36 + row * rank + 4, wide - 8, row - 10, "worker", str(step), size=11)
    for step in range(period, rounds + 1, period):
        x = left + wide * step - 2
        c.line((x, 32), (x, 44 + row * n), KINDS["driver"][1], wide=4)
        c.note(x, 26, "mean")
    every, seldom = estimate_costs(rayps.AllReduce(), n, SIZES), estimate_costs(rayps.LocalSGD(period=period), n, SIZES)
    c.caption(
        182,
        f"V = {format_bytes(4 * ELEMENTS)}: all_reduce sends {format_bytes(every.bytes or 0)} a round, "
        f"local_sgd with period={period}: {format_bytes(seldom.bytes or 0)}",
    )
    c.caption(204, "parallel_sgd: one mean, at the end")
    c.caption(224, "diloco: the mean change is the gradient of an outer optimizer (Nesterov)")
    return c


def federated() -> Canvas:
    """One round of federated averaging."""
    clients, fraction, round_, workers = 20, 0.3, 0, 2
    chosen = [int(each) for each in cohort(0, round_, clients, fraction)]
    dealt = [[chosen[int(at)] for at in part] for part in pack([1.0] * len(chosen), workers)]
    c = Canvas(430, "A federated round: cohort, local training, aggregation")
    c.text(
        30,
        26,
        f"1  select: {len(chosen)} of {clients} clients (fraction={fraction:g}, round {round_}, seed 0)",
        anchor="start",
        bold=True,
    )
    for client in range(clients):
        kind = "worker" if client in chosen else "data"
        c.box(30 + 35 * client, 38, 31, 28, kind, str(client), size=11)
    c.text(
        30,
        106,
        "2  train: each worker trains its clients one after another, from the same w",
        anchor="start",
        bold=True,
    )
    for rank, mine in enumerate(dealt):
        c.note(100, 138 + 44 * rank, f"worker {rank}", "end")
        for number, client in enumerate(mine):
            c.box(115 + 150 * number, 118 + 44 * rank, 140, 34, "worker", f"client {client}: w, n", size=12)
    c.text(
        30,
        232,
        "3  reply: updates, numbers of samples; a client that is lost or late does not count",
        anchor="start",
        bold=True,
    )
    c.text(30, 268, "4  aggregate", anchor="start", bold=True)
    stages = [
        ("clip", "worker"),
        ("rule: mean, median, ...", "worker"),
        ("server optimizer", "server"),
        ("new w", "driver"),
    ]
    boxes = [c.box(40 + 175 * i, 282, 150, 44, kind, label, size=12) for i, (label, kind) in enumerate(stages)]
    for before, after in itertools.pairwise(boxes):
        c.link(before, after)
    found = estimate_costs(rayps.FedAvg(), workers, SIZES).traffic[0]
    c.caption(366, "FedAvg: w = sum(n_k w_k) / sum(n_k) over the clients that replied")
    c.caption(
        388,
        f"V = {format_bytes(4 * ELEMENTS)}: {format_bytes(found.busiest or 0)} from each of {workers} workers a round, "
        "whatever the number of clients",
    )
    return c


def admm() -> Canvas:
    """Consensus ADMM."""
    c = Canvas(360, "Consensus ADMM: local models, multipliers, and a common model")
    middle = c.box(270, 26, 220, 66, "driver", "consensus z", "z = prox of g at the mean of x + u")
    for i in range(3):
        x = 60 + 230 * i
        worker = c.box(x - 10, 190, 200, 66, "worker", f"worker {i}", f"own model x{i}, multiplier u{i}")
        data = c.box(x + 35, 284, 110, 28, "data", "rows that stay", size=12)
        c.link(data, worker)
        c.link(worker, middle, KINDS["worker"][1], aside=7)
        c.link(middle, worker, KINDS["driver"][1], aside=7, dashed=True)
    c.note(40, 60, "solid: x + u", "start")
    c.note(40, 80, "dashed: z", "start")
    c.caption(
        336, "x: some steps on f(x) + penalty/2 |x - z + u|²;  u: u + x - z;  repeat until both residuals are small"
    )
    return c


def traffic() -> Canvas:
    """Bytes of the busiest process against the number of workers."""
    counts = (2, 4, 8, 16, 32)
    c = Canvas(400, "Bytes that the busiest process sends in a step, against the number of workers")
    vector = 4.0 * ELEMENTS
    lines = [
        ("ring", [busiest(rayps.AllReduce(), n) for n in counts]),
        ("tree", [vector * max_sends("tree", n) for n in counts]),
        ("star (one master)", [vector * max_sends("star", n) for n in counts]),
        ("2 shards", [shard_bytes(2, n) for n in counts]),
        ("8 shards", [shard_bytes(8, n) for n in counts]),
    ]
    left, right, top, bottom = 90, WIDTH - 190, 40, 330
    low, high = 1e6, 2e8

    def at(n: int, value: float) -> tuple[float, float]:
        x = left + math.log2(n / counts[0]) / math.log2(counts[-1] / counts[0]) * (right - left)
        return x, bottom - math.log(value / low) / math.log(high / low) * (bottom - top)

    for value in (1e6, 2e6, 5e6, 1e7, 2e7, 5e7, 1e8, 2e8):
        c.line((left, at(2, value)[1]), (right, at(2, value)[1]))
        c.note(left - 8, at(2, value)[1] + 4, format_bytes(value), "end")
    for n in counts:
        c.note(at(n, low)[0], bottom + 18, str(n))
    c.note((left + right) / 2, bottom + 40, "workers")
    c.text(left, 22, f"a vector of {format_bytes(vector)}; both axes logarithmic", anchor="start", size=12)
    labels: list[float] = []
    for number, (name, values) in enumerate(lines):
        points = [at(n, value) for n, value in zip(counts, values, strict=True)]
        for before, after in itertools.pairwise(points):
            c.line(before, after, SHADES[number], wide=2)
        for x, y in points:
            c.circle(x, y, 3.5, SHADES[number])
        y = points[-1][1] + 4
        while any(abs(y - other) < 15 for other in labels):
            y += 15
        labels.append(y)
        c.text(right + 12, y, name, anchor="start", size=12, colour=SHADES[number])
    return c


def shard_bytes(shards: int, workers: int) -> float:
    """Bytes of parameters that one shard sends in a round, by the package's formula."""
    pull = next(cost for cost in estimate_costs(rayps.ParameterServer(shards=shards), workers, SIZES).traffic)
    assert pull.what.startswith("pull") and pull.bytes is not None
    return pull.bytes / shards


def max_sends(algorithm: str, ranks: int) -> int:
    """How many whole vectors the busiest rank of an algorithm sends."""
    counted = [0] * ranks
    for send in sends(algorithm, ranks):
        counted[send.source] += send.bytes
    return max(counted) // (4 * 4 * ranks)


def job_states() -> Canvas:
    """A job's statuses and moves."""
    c = Canvas(330, "The statuses of a job and the moves between them")
    spots_of = {
        Status.QUEUED: (30, 130),
        Status.STARTING: (190, 130),
        Status.RUNNING: (360, 130),
        Status.RECOVERING: (360, 28),
        Status.STOPPING: (360, 232),
        Status.UNKNOWN: (190, 28),
        Status.SUCCEEDED: (590, 130),
        Status.FAILED: (590, 28),
        Status.STOPPED: (590, 232),
    }
    kinds = {Status.SUCCEEDED: "driver", Status.FAILED: "lost", Status.STOPPED: "data", Status.QUEUED: "plain"}
    boxes = {s: c.box(x, y, 130, 44, kinds.get(s, "worker"), s.value.lower()) for s, (x, y) in spots_of.items()}
    assert set(boxes) == set(MOVES)
    usual = {
        (Status.QUEUED, Status.STARTING),
        (Status.STARTING, Status.RUNNING),
        (Status.RUNNING, Status.SUCCEEDED),
        (Status.RUNNING, Status.RECOVERING),
        (Status.RECOVERING, Status.RUNNING),
        (Status.RUNNING, Status.STOPPING),
        (Status.STOPPING, Status.STOPPED),
        (Status.RECOVERING, Status.FAILED),
        (Status.RUNNING, Status.UNKNOWN),
        (Status.UNKNOWN, Status.RUNNING),
    }
    assert all(target in MOVES[source] for source, target in usual)
    for source, target in sorted(usual):
        both = (target, source) in usual
        c.link(boxes[source], boxes[target], aside=7 if both else 0)
    moves = sum(len(targets) for targets in MOVES.values())
    c.note(
        WIDTH / 2, 306, f"the usual moves; all {moves} are in one table (MOVES). Right: final statuses, written once"
    )
    return c


PICTURES: dict[str, Callable[[], Canvas]] = {
    function.__name__: function
    for function in (
        ring,
        tree,
        traffic,
        parameter_server,
        staleness,
        server_group,
        hybrid,
        downpour,
        hogwild,
        local_updates,
        admm,
        federated,
        pipeline,
        tensor_parallel,
        grid,
        job_states,
    )
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the pictures of the given names, or all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    chosen = parser.parse_args(arguments)
    for name in set(chosen.names) - set(PICTURES):
        parser.error(f"{name!r} is no picture: give some of {', '.join(PICTURES)}")
    chosen.folder.mkdir(parents=True, exist_ok=True)
    for name in chosen.names or PICTURES:
        (chosen.folder / f"{name}.svg").write_text(PICTURES[name]().svg(), encoding="utf-8")
        print(chosen.folder / f"{name}.svg")


if __name__ == "__main__":
    main()
