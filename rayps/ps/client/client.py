"""The shared parameters on an elastic group, as a worker sees them: the calls of `rayps.ps.fixed.Server`, over a
`Session`.

With `defer`, a push leaves with whatever is said next, so that a round of push and pull is one request to each server.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rayps.comm.link.socket_link import EMPTY
from rayps.core.errors import ConfigError
from rayps.ps.client.session import Session
from rayps.ps.fixed.shared_memory import flat_bytes
from rayps.ps.protocol.messages import GroupMessage
from rayps.tensors.flat import Gradient

Extras = Callable[[], Mapping[int, Any]]


class GroupServer:
    """The dense vector of a space: pull and push, whole or by range.

    `extras` gives a step's pieces of tables, by segment; without it tables are pushed nothing. `step` is the number of
    the next push; -1 goes on where the rank was. `consistent` is taken for the sake of the other server: here pulls are
    of one moment in step (staleness 0), and else each segment is of one version.

    Raises:
        PeerTimeout, PeerLost, StaleGeneration: as `Session.join`.
        ConfigError: the space has no dense vector.
    """

    def __init__(
        self,
        talk: Session,
        *,
        defer: bool = True,
        extras: Extras | None = None,
        step: int = -1,
        consistent: bool = False,
    ) -> None:
        space = talk.space
        if space.layout is None:
            raise ConfigError(f"space {space.name!r} has tables only: there is no vector to pull", field="space")
        self.talk, self.rank, self.size, self.dtype = talk, talk.rank, space.layout.size, space.layout.dtype
        self.home: Tensor | None = None  # where whole pulls land; None = in a new tensor
        self.bytes_moved = 0  # of parameters and gradients, sent and received
        self.lead = 0  # by how many rounds this worker led the slowest at its last pull
        self.version = 0  # steps that were taken where the last pull came from, the least of the segments
        self.durable = 0  # all pushes of this rank below this step are durable, as of the last answers
        self.consistent = consistent
        self.extras = extras
        self._defer, self._cuts, self._item = defer, space.cuts, self.dtype.itemsize
        self._nothing: dict[int, Any] = dict.fromkeys(range(len(space.cuts), space.segments), EMPTY)
        self._posted: _SentPush | None = None  # a push that has not left yet
        marks = talk.join()
        self.step = min(marks.values()) if step < 0 else step

    def pull(
        self, lo: int = 0, hi: int | None = None, *, out: Tensor | None = None, consistent: bool | None = None
    ) -> Tensor:
        """The elements lo to hi of the vector; waits while the clock says so.

        They land in `out` where given (a contiguous CPU tensor of as many elements), else in a new tensor.

        Raises:
            PeerTimeout: the slowest worker, or a server, was silent past the deadline.
            PeerLost: segments are lost.
            ConfigError: `consistent`, out of step: segments answer each for itself here.
        """
        if consistent and not self.talk.space.servers.in_step:
            raise ConfigError(
                "the servers of an elastic group are read as of one moment in step only: give staleness=0, or pull "
                "with consistent=False",
                field="consistent",
            )
        return self._fetch(GroupMessage.PULL, lo, self.size if hi is None else hi, out)

    def read(self, lo: int = 0, hi: int | None = None) -> Tensor:
        """The elements lo to hi as they are now, outside the clock; each segment's are of one version."""
        return self._fetch(GroupMessage.READ, lo, self.size if hi is None else hi, None)

    def push(self, value: Tensor | Gradient, weight: float = 1.0, lo: int = 0) -> None:
        """Push a gradient, or a range of it that begins at element lo; the push counts as one step.

        A Gradient brings its number of samples as its weight. What a range leaves out of a segment counts as zero, and
        segments that it leaves out are not stepped. Deferred, `value` must not change before the next call here.

        Raises:
            PeerTimeout, PeerLost, StaleGeneration: as `Session.exchange`.
        """
        vector, weight = (value.vector, float(value.samples)) if isinstance(value, Gradient) else (value, float(weight))
        count = vector.numel()
        self._must_fit(lo, lo + count)
        self.settle()
        laid = flat_bytes(vector.detach().reshape(-1).to("cpu", self.dtype))
        pieces: dict[int, Any] = {i: self._piece(laid, lo, count, a, b) for i, (a, b) in enumerate(self._cuts)}
        pieces |= self._nothing
        if self.extras is not None:
            pieces |= self.extras()
        self.bytes_moved += sum(len(piece) for piece in pieces.values())
        self._posted = _SentPush(self.step, weight, pieces)
        self.step += 1
        if not self._defer:
            self.settle()

    def settle(self) -> None:
        """Return once every push is acknowledged."""
        if self._posted is not None:
            posted, self._posted = self._posted, None
            answers = self.talk.exchange(GroupMessage.PUSH, posted.pieces, step=posted.step, weight=posted.weight)
            self.durable = answers.durable

    def flush(self) -> None:
        """Return once every push is durable: with the copies, whatever server dies then. In step that is once the
        others have pushed as much.

        Raises:
            PeerTimeout, PeerLost: as `Session.exchange`.
        """
        self.settle()
        self.talk.flush()

    def pull_rows(self, ids: Tensor, table: str | None = None, **more: Any) -> Tensor:
        """Rows by id of a dense parameter are not served here. Raises ConfigError."""
        raise _no_rows()

    def push_rows(self, ids: Tensor, rows: Tensor, weight: float = 1.0, table: str | None = None) -> None:
        """Rows by id of a dense parameter are not served here. Raises ConfigError."""
        raise _no_rows()

    def buffer(self, size: int, dtype: torch.dtype) -> Tensor:
        """Memory of `size` elements, all zero, for gradients. Ordinary memory: pushes are copied into requests."""
        return torch.zeros(size, dtype=dtype)

    def hang_up(self) -> None:
        """End what another thread waits for in here, as lost; that thread is to `close`. Any thread may call it."""
        self.talk.hang_up()

    def close(self) -> None:
        """Leave; the servers forget the connection, not the rank's clock. `flush` before, where pushes must last."""
        self.talk.close()

    @property
    def seconds_waiting(self) -> float:
        """How long this worker has waited for answers."""
        return self.talk.seconds_waiting

    def _fetch(self, kind: GroupMessage, lo: int, hi: int, out: Tensor | None) -> Tensor:
        self._must_fit(lo, hi)
        whole = hi - lo == self.size
        if out is None:
            out = self.home if whole and kind is GroupMessage.PULL else None
        if out is None:
            out = torch.empty(hi - lo, dtype=self.dtype)
        if out.numel() != hi - lo or out.dtype != self.dtype or not out.is_contiguous() or out.device.type != "cpu":
            raise ConfigError(
                f"out is {out.dtype} of {out.numel()} elements: give a contiguous CPU tensor of {hi - lo} {self.dtype}"
            )
        places, spare = self._places(flat_bytes(out), lo, hi)
        self.bytes_moved += (hi - lo) * self._item
        posted = self._posted
        if kind is GroupMessage.PULL and whole and posted is not None:
            self._posted = None
            answers = self.talk.exchange(
                GroupMessage.PUSH_PULL, posted.pieces, step=posted.step, weight=posted.weight, landing=places
            )
        else:
            self.settle()
            pieces = dict.fromkeys(places, EMPTY)
            answers = self.talk.exchange(
                kind, pieces, step=self.step if kind is GroupMessage.PULL else 0, landing=places
            )
        for a, b, place in spare:
            start, stop, item = max(a, lo), min(b, hi), self._item
            flat_bytes(out)[(start - lo) * item : (stop - lo) * item] = place[(start - a) * item : (stop - a) * item]
        self.version = answers.version
        if kind is GroupMessage.PULL:
            self.lead, self.durable = answers.lead, answers.durable
        return out

    def _places(self, out: Any, lo: int, hi: int) -> tuple[dict[int, Any], list[tuple[int, int, Any]]]:
        """Where each segment lands, and of these those that are longer than what is wanted of them."""
        places: dict[int, Any] = {}
        spare: list[tuple[int, int, Any]] = []
        for index, (a, b) in enumerate(self._cuts):
            if lo <= a and b <= hi:
                places[index] = out[(a - lo) * self._item : (b - lo) * self._item]
            elif max(a, lo) < min(b, hi):
                places[index] = flat_bytes(torch.empty(b - a, dtype=self.dtype))
                spare.append((a, b, places[index]))
        return places, spare

    def _piece(self, laid: Any, lo: int, count: int, a: int, b: int) -> Any:
        """What a push of the elements from `lo` says to the segment [a, b)."""
        start, stop, item = max(a, lo), min(b, lo + count), self._item
        if start >= stop:
            return EMPTY
        found = laid[(start - lo) * item : (stop - lo) * item]
        if stop - start < b - a:
            whole = flat_bytes(torch.zeros(b - a, dtype=self.dtype))
            whole[(start - a) * item : (stop - a) * item] = found
            return whole
        return found

    def _must_fit(self, lo: int, hi: int) -> None:
        if not 0 <= lo <= hi <= self.size:
            raise ConfigError(f"range {lo} to {hi} is not within the {self.size} parameters")


class _SentPush(NamedTuple):
    """A push that has been made and has not left."""

    step: int
    weight: float
    pieces: dict[int, Any]


def _no_rows() -> ConfigError:
    return ConfigError(
        "an elastic group serves rows by id from tables (rayps.Embedding), not out of a dense parameter: use a table, "
        "or a group of fixed servers (ServerGroup without `replicas` and `group`)"
    )
