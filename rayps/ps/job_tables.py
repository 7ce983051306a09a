"""The tables of a job's space, in and out: into a checkpoint's folder, out of one, from one generation to the next."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from rayps.core.ledger import Ledger
from rayps.ps.client.session import Session
from rayps.ps.protocol.messages import GroupMessage
from rayps.ps.protocol.space import Space, SparseTable
from rayps.ps.tables import parquet, segment_state


def states(talk: Session, indices: Iterable[int]) -> Iterator[tuple[int, Any]]:
    """The states of segments as they are now, one after the other."""
    for index in indices:
        yield index, talk.exchange(GroupMessage.PART, {index: b""}, step=-1).pieces[index]


def whole(space: Space, talk: Session) -> dict[str, list[Any]]:
    """The states of all segments of each table."""
    return {table.name: [bytes(each) for _, each in states(talk, segments)] for table, segments in _tables(space)}


def write(
    space: Space, folder: Path, kept: Mapping[int, Any] | None, meet: Callable[[], AbstractContextManager[Session]]
) -> list[Path]:
    """Save the tables, as they were `kept`, or as they are now; the files."""
    if kept is not None:
        for table, segments in _tables(space):
            parquet.write(folder / table.name, table, (kept[index] for index in segments))
    else:
        with meet() as talk:
            for table, segments in _tables(space):
                parquet.write(folder / table.name, table, (each for _, each in states(talk, segments)))
    return sorted(folder.rglob("*.parquet"))


def saved(
    space: Space, folder: Path, positions: list[int], same: bool, only: Collection[int] | None = None
) -> dict[int, Any]:
    """What `write` saved, for this space's segments (or `only` these), however many there were.

    Clocks begin at `positions`; where the cut is the same, and the workers are as many (`same`), they are as saved.
    """
    found: dict[int, Any] = {}
    for table, segments in _tables(space):
        place = folder / table.name
        as_saved = same and len(list(place.glob("rows-*.parquet"))) == table.segments
        wanted = [index - segments.start for index in segments if only is None or index in only]
        read = parquet.read(place, table, space.workers, wanted, None if as_saved else positions)
        found |= {segments[index]: each for index, each in read}
    return found


def skipped(segment: Any, skips: Mapping[int, int]) -> tuple[Any, int]:
    """A segment's state that waits for no step below `skips`, by rank; how many pushes it lacks by that."""
    if not skips:
        return segment, 0
    head, arrays = segment_state.unpack(segment)
    ledger = Ledger.from_json(head["ledger"])
    missing = sum(ledger.skip(rank, step) for rank, step in skips.items())
    return segment_state.pack({**head, "ledger": ledger.to_json()}, arrays), missing


def along(old: Space, talk: Session, new: Space) -> dict[int, Any]:
    """The states of the old space's tables for the new one's segments."""
    there = {table.name: segments for table, segments in _tables(new)}
    found: dict[int, Any] = {}
    for table, segments in _tables(old):
        for index, each in states(talk, segments):
            found[there[table.name][index - segments.start]] = each
    return found


def _tables(space: Space) -> Iterator[tuple[SparseTable, range]]:
    first = len(space.cuts)
    for table in space.tables:
        yield table, range(first, first + table.segments)
        first += table.segments
