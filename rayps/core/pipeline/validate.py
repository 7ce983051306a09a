"""Check that a schedule's table can run, and read or write a table as text: JSON, CSV. Pure."""

from __future__ import annotations

import csv
import io
import json
import re
from collections import Counter
from collections.abc import Iterator

from rayps_client.errors import ConfigError
from rayps_client.values import Json

from rayps.core.pipeline.schedule import KINDS, Action, Table, needs, splits


def validate(table: Table, stages: int, micro_batches: int, chunks: int = 1) -> None:
    """Check that every pass occurs once and on its own worker, and that the table does not deadlock.

    Raises:
        ConfigError: the table cannot run; the text names the worker, the action, and what is missing before it.
    """
    if len(table) != stages:
        raise _explain_refusal(f"it has {len(table)} rows, and there are {stages} stages: give one row for each")
    for rank, row in enumerate(table):
        for action in row:
            _check_action(action, rank, stages, micro_batches, chunks)
    kinds = KINDS if splits(table) else KINDS[:2]
    found = Counter(action for row in table for action in row)
    for chunk in range(stages * chunks):
        for micro in range(micro_batches):
            for kind in kinds:
                action = Action(kind, chunk, micro)
                if found[action] != 1:
                    often = "is missing" if not found[action] else f"occurs {found[action]} times"
                    raise _explain_refusal(f"{action} {often} on stage {chunk % stages}: every pass must occur once")
    for _ in walk(table):
        pass


def walk(table: Table) -> Iterator[tuple[int, Action]]:
    """Yield (rank of the worker, action) for all actions of the table, in an order in which they can run.

    Raises:
        ConfigError: the table deadlocks; the text names what each worker waits for.
    """
    chunks = 1 + max((action.chunk for row in table for action in row), default=-1)
    at, done, moved = [0] * len(table), set[Action](), True
    while moved:
        moved = False
        for rank, row in enumerate(table):
            while at[rank] < len(row) and done.issuperset(needs(row[at[rank]], chunks)):
                action = row[at[rank]]
                done.add(action)
                at[rank] += 1
                moved = True
                yield rank, action
    stuck = [(rank, row[at[rank]]) for rank, row in enumerate(table) if at[rank] < len(row)]
    if stuck:
        first = {action: next(need for need in needs(action, chunks) if need not in done) for _, action in stuck}
        waits = [f"stage {rank} waits before {action} for {first[action]}" for rank, action in stuck]
        raise _explain_refusal("it deadlocks: " + "; ".join(waits[:4]) + ("; ..." if len(waits) > 4 else ""))


def to_json(table: Table) -> str:
    """Return the table as JSON: for each worker a list of actions such as "0F1" (chunk 0, forward, micro-batch 1)."""
    rows = ",\n ".join(json.dumps([str(action) for action in row]) for row in table)
    return f"[{rows}]\n"


def read(text: str) -> tuple[Table, int, int, int]:
    """Read a table from JSON or CSV and validate it. Return (table, stages, micro-batches, chunks on each worker).

    Raises:
        ConfigError: the text is not a table, or the table cannot run.
    """
    try:
        rows = json.loads(text) if text.lstrip().startswith(("[", "{")) else list(csv.reader(io.StringIO(text)))
    except ValueError as error:
        raise _explain_refusal(
            f'it is not JSON ({error}): give a list of actions such as "0F1" for each stage'
        ) from None
    if not isinstance(rows, list) or not rows or not all(isinstance(row, list) for row in rows):
        raise _explain_refusal(
            'it must be a list of lists, one for each stage, such as [["0F0", "0B0"], ["1F0", "1B0"]]'
        )
    table = [[_parse_action(word) for word in row if word != ""] for row in rows]  # torch's CSV pads idle time with ""
    every = [action for row in table for action in row]
    if not every:
        raise _explain_refusal("it has no actions")
    stages, micro_batches = len(table), 1 + max(action.micro for action in every)
    chunks, odd = divmod(1 + max(action.chunk for action in every), stages)
    if odd or not chunks:
        raise _explain_refusal(
            f"it names {chunks * stages + odd} chunks on {stages} stages: give a multiple of {stages}"
        )
    validate(table, stages, micro_batches, chunks)
    return table, stages, micro_batches, chunks


def _parse_action(word: Json) -> Action:
    match = re.fullmatch(r"\s*(\d{1,6})([FBW])(\d{1,6})\s*", word) if isinstance(word, str) else None
    if match is None:
        raise _explain_refusal(
            f'{word!r} is not an action: write the chunk, F, B or W, and the micro-batch, such as "0F1"'
        )
    return Action(match[2], int(match[1]), int(match[3]))


def _check_action(action: Action, rank: int, stages: int, micro_batches: int, chunks: int) -> None:
    if action.kind not in KINDS:
        raise _explain_refusal(f"{action} on stage {rank} is not a pass: give F, B or W")
    if not 0 <= action.chunk < stages * chunks:
        raise _explain_refusal(
            f"{action} on stage {rank}: there are {stages * chunks} chunks, 0 to {stages * chunks - 1}"
        )
    if not 0 <= action.micro < micro_batches:
        raise _explain_refusal(
            f"{action} on stage {rank}: there are {micro_batches} micro-batches, 0 to {micro_batches - 1}"
        )
    if action.chunk % stages != rank:
        raise _explain_refusal(
            f"{action} on stage {rank}: chunk {action.chunk} belongs to stage {action.chunk % stages}"
        )


def _explain_refusal(what: str) -> ConfigError:
    return ConfigError(f"the schedule's table cannot run: {what}", field="schedule")
