"""`rayps.batches`: the batches of this worker of a run, read ahead by loader processes if the data says so."""

from __future__ import annotations

from collections.abc import Iterator

from rayps.data.base import Batch, Data, Place
from rayps.data.loader import Loader
from rayps.runtime.own_loop.world import World, current, world


def batches(data: Data, *, epoch: int = 0, start: int = 0, seed: int | None = None) -> Iterator[Batch]:
    """Yield this worker's batches of an epoch, from batch number `start` on, in a function that `rayps.run` calls.

    They are those of `data.batches(rank=..., size=..., seed=..., epoch=..., start=...)` with the worker's rank and
    size; `seed` is the run's seed by default. If the data is `loaded_by(n)`, `n` processes of the worker read them
    ahead; these processes end with the function. Of one data set, one epoch can be read at a time.

    Raises:
        ConfigError: called outside a `run`.
        DataError: a batch cannot be read, or a loader process died too often.

    Example:
        def train_fn():
            data = rayps.data.tensors(torch.randn(20, 3), batch_size=5)
            return [len(batch) for batch in rayps.batches(data, epoch=0)]

        rayps.run(train_fn, workers=2)  # [[5, 5], [5, 5]]
    """
    here = world()
    place = Place(here.rank, here.size, here.place.seed if seed is None else seed, epoch)
    return _read(here, data, place, start)


def _read(here: World, data: Data, place: Place, start: int) -> Iterator[Batch]:
    loader = None if data.ahead is None else _find_loader(here, data)
    items = data.part(place, start) if loader is None else loader.read(place, start)
    # in a thread of the user's that reads ahead, a wait does not hold up the loop
    for batch, _ in here.measure.timed(items) if current.get(None) is here else items:
        if loader is not None:
            with here.lock:
                here.events += loader.take_events()
        yield batch


def _find_loader(here: World, data: Data) -> Loader:
    """Return the loader of a data set, which begins at its first epoch and ends with the function."""
    found = here.loaders.get(id(data))
    if found is None:
        found = here.loaders[id(data)] = Loader(data)
        here.closing.append(lambda failed: found.close())
    return found


__all__ = ["batches"]
