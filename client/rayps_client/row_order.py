"""The order in which a client's rows are used: a function of seed, client and round, equal on every host.

Client k has an endless sequence of epochs, each a permutation of its rows, drawn from (seed, epoch, k). Round t of E
epochs uses epochs t E to (t + 1) E - 1 of the sequence, and round t of L steps uses batches t L to (t + 1) L - 1, as if
client k had taken part in every earlier round. A job with a single client therefore reads the data in the same order as
one worker in ordinary training.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from rayps_client.exchange.random_numbers import random_of

Ints = NDArray[np.int64]


def parts(
    seed: int,
    client: int,
    n: int,
    batch: int,
    *,
    round: int,
    epochs: int,
    steps: int | None,
    shuffle: bool = True,
    used: int | None = None,
) -> Iterator[Ints]:
    """Yield the positions, among the client's n rows, that a round uses: one array for each epoch or part of an epoch.

    The caller cuts each array into batches of `batch` rows. Every array begins at the start of a batch. Only the last
    batch of an epoch may be smaller. An epoch takes the first `used` rows of its order; None means all.
    """
    each = math.ceil((n if used is None else used) / batch)
    at = round * (epochs * each if steps is None else steps)
    end = at + (epochs * each if steps is None else steps)
    while at < end:
        epoch, index = divmod(at, each)
        stop = min(each, index + end - at)
        rows = random_of(seed, epoch, client).permutation(n) if shuffle else np.arange(n)
        yield rows[:used][index * batch : stop * batch]
        at += stop - index
