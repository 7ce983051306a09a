"""The batches of an evaluation, and the bounds that end an evaluation on data without a length.

Data without a length may be endless. An evaluation on it ends by one of these bounds, in this order:

    evaluation_batches      of the workload or, in a dry run, of the plan: the most batches that each worker reads
    batches trained so far  if the evaluation data is that of the training, the run has a number of rounds, and no pass
                            of this worker has ended: at least `FEWEST`
    seconds                 otherwise: an error says that the pass has not ended
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from rayps_client.errors import WorkloadError

from rayps.data.base import Batch

FEWEST = 100  # batches that an evaluation on the training data may read, however few were trained
SECONDS = 500.0  # time limit of an evaluation on data without a length; below the driver's `EVALUATE_SECONDS`


@dataclass(frozen=True, slots=True)
class EvaluationFacts:
    """The facts on which the bound of an evaluation depends."""

    limit: int | None  # `evaluation_batches` of the workload or of the plan, the smaller one
    has_length: bool  # whether the evaluation data has a length
    is_default: bool  # whether the evaluation data is the training data
    by_rounds: bool  # whether the run ends with a number of rounds, and not with a number of epochs
    ended: bool  # whether a pass of this worker over the training data has ended
    trained: int  # batches that were trained, of the share that is evaluated


def count_most_batches(facts: EvaluationFacts) -> int | None:
    """Return how many batches a worker reads in an evaluation, or None if it reads them all."""
    if facts.limit is not None:
        return facts.limit
    if not facts.has_length and facts.is_default and facts.by_rounds and not facts.ended:
        return max(FEWEST, facts.trained)
    return None


def bound_batches(batches: Iterator[Batch], facts: EvaluationFacts, timeout: float) -> Iterator[Batch]:
    """Yield the batches of an evaluation up to its bound. `timeout` is the job's, in seconds.

    Raises:
        WorkloadError: data without a length has not ended within its time limit.
    """
    most = count_most_batches(facts)
    if most is not None or facts.has_length:
        yield from islice(batches, most)
        return
    began, limit = time.monotonic(), max(SECONDS, 0.8 * timeout)
    for number, batch in enumerate(batches, 1):
        yield batch
        if time.monotonic() - began > limit:
            raise WorkloadError(
                f"evaluation_data() returned data without a length, which has not ended after {number} batches and "
                f"{limit:.0f} s:\nset evaluation_batches to the number of batches that each worker reads, return data "
                "that ends, or raise timeout",
                field="evaluation_batches",
            )
