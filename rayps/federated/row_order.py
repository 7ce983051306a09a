"""The order of a client's rows: a function of seed, client and round, equal on every host.

Client k has an endless stream of epochs, each a permutation of its rows, drawn from (seed, epoch, k). A round of E
epochs takes epochs t E to (t + 1) E of the stream, a round of L steps takes batches t L to (t + 1) L: as if k had taken
part in every earlier round. So one client alone reads the data as a single worker does in ordinary training.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from rayps.data.base import random_of

Ints = NDArray[np.int64]


def parts(
    seed: int, client: int, n: int, batch: int, *, round: int, epochs: int, steps: int | None, shuffle: bool = True
) -> Iterator[Ints]:
    """Yield the positions of a round among the client's n rows: one array for each started epoch.

    The caller cuts an array into batches of `batch`. Every array begins with a whole batch; only the last batch of an
    epoch may be smaller.
    """
    each = math.ceil(n / batch)
    at = round * (epochs * each if steps is None else steps)
    end = at + (epochs * each if steps is None else steps)
    while at < end:
        epoch, index = divmod(at, each)
        stop = min(each, index + end - at)
        rows = random_of(seed, epoch, client).permutation(n) if shuffle else np.arange(n)
        yield rows[index * batch : stop * batch]
        at += stop - index
