"""Rules that divide rows among clients. Pure numpy; with the same seed a rule returns the same division.

Every rule gives each row to exactly one client, and each client at least one row. `iid` divides at random, `shards`
and `dirichlet` by label, `by_quantity` into unequal parts. A column of the data or an array of ids needs no rule.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from rayps_client.errors import ConfigError, DataError
from rayps_client.values import Json

from rayps.core.spelling import near
from rayps.core.strategy.text import form
from rayps.data.base import random_of

Ints = NDArray[np.int64]


class PartitionRule(ABC):
    """A rule that divides rows among clients. `str(rule)` is its text form."""

    by_label: ClassVar[bool] = False

    @abstractmethod
    def owners(self, rows: int, labels: Ints | None) -> Ints:
        """Return, for each of `rows` rows, the number of its client, counted from 0 [rows].

        `labels`: the class of each row, counted from 0 [rows]; None if the rule does not use labels.

        Raises:
            ConfigError: an option of the rule does not fit these rows. The text names the option.
        """


Rule = PartitionRule  # the public name


@dataclass(frozen=True)
class Iid(PartitionRule):
    """The rule that `iid` returns: rows at random, in equal numbers."""

    clients: int
    seed: int = 0

    def __str__(self) -> str:
        return f"iid({self.clients}{_seed_text(self.seed)})"

    def owners(self, rows: int, labels: Ints | None) -> Ints:
        """Assign rows to clients at random. The clients' numbers of rows differ by at most one."""
        _check_enough_rows(rows, self.clients)
        return np.asarray(random_of(self.seed, _IID).permutation(rows) % self.clients, dtype=np.int64)


@dataclass(frozen=True)
class ByShards(PartitionRule):
    """The rule that `shards` returns: rows sorted by label, cut into shards."""

    by_label: ClassVar[bool] = True
    per_client: int
    clients: int
    pure: bool = False
    seed: int = 0

    def __str__(self) -> str:
        pure = ", pure=True" if self.pure else ""
        return f"shards({self.per_client}, clients={self.clients}{pure}{_seed_text(self.seed)})"

    def owners(self, rows: int, labels: Ints | None) -> Ints:
        """Sort the rows by label, cut them into shards, and assign the shards at random."""
        assert labels is not None
        shards = self.clients * self.per_client
        if shards > rows:
            raise ConfigError(
                f"{self}: {shards} shards cannot be cut from {rows} rows: give fewer clients, or fewer shards for each",
                field="client",
            )
        ends = _pure_ends(labels, shards, self) if self.pure else rows * np.arange(1, shards + 1) // shards
        clients = random_of(self.seed, _SHARDS).permutation(shards) // self.per_client
        owners = np.empty(rows, dtype=np.int64)
        owners[np.argsort(labels, kind="stable")] = np.repeat(clients, np.diff(ends, prepend=0))
        return owners


@dataclass(frozen=True)
class Dirichlet(PartitionRule):
    """The rule that `dirichlet` returns: a random mixture of labels for each client."""

    by_label: ClassVar[bool] = True
    alpha: float
    clients: int
    balanced: bool = True
    seed: int = 0

    def __str__(self) -> str:
        balanced = "" if self.balanced else ", balanced=False"
        return f"dirichlet({self.alpha!r}, clients={self.clients}{balanced}{_seed_text(self.seed)})"

    def owners(self, rows: int, labels: Ints | None) -> Ints:
        """Draw how many rows of each label each client gets. Then draw which rows these are."""
        assert labels is not None
        _check_enough_rows(rows, self.clients)
        random = random_of(self.seed, _DIRICHLET)
        have = np.bincount(labels)
        counts = self._mixtures(have, random) if self.balanced else self._spread(have, random)
        owners = np.empty(rows, dtype=np.int64)
        for label in range(len(have)):
            mine = random.permutation(np.flatnonzero(labels == label))
            owners[mine] = np.repeat(np.arange(self.clients), counts[:, label])
        return owners

    def _mixtures(self, have: Ints, random: np.random.Generator) -> Ints:
        """Return each client's number of rows of each label [clients, labels], for clients of equal size.

        `have` is the number of rows of each label [labels], and p is the share of each label. Each client draws a
        mixture q ~ Dir(alpha p). It then draws the labels of its rows by q, without replacement.
        """
        left = have.copy()
        sizes = np.diff(int(have.sum()) * np.arange(self.clients + 1) // self.clients)
        counts = np.zeros((self.clients, len(have)), dtype=np.int64)
        weights = self.alpha * have[have > 0] / have.sum()
        for k, size in enumerate(sizes.tolist()):
            q = np.zeros(len(have))
            q[have > 0] = _dirichlet(random, weights)
            while size:  # the share of an exhausted label goes to the other labels
                open_ = np.where(left > 0, q, 0.0)
                total = open_.sum()
                open_ = open_ / total if total > 1e-12 else left / left.sum()
                drawn = np.minimum(random.multinomial(size, open_), left)
                counts[k] += drawn
                left -= drawn
                size -= int(drawn.sum())
        return counts

    def _spread(self, have: Ints, random: np.random.Generator) -> Ints:
        """Return each client's number of rows of each label [clients, labels], for clients of different sizes.

        The rows of each label are spread over the clients by a draw from Dir(alpha). Every client gets a row.
        """
        counts = np.zeros((self.clients, len(have)), dtype=np.int64)
        for label, count in enumerate(have.tolist()):
            if count:
                counts[:, label] = apportion(count, _dirichlet(random, np.full(self.clients, self.alpha)))
        for k in np.flatnonzero(counts.sum(axis=1) == 0):
            largest = int(counts.sum(axis=1).argmax())  # this client loses a row of its most frequent label
            label = int(counts[largest].argmax())
            counts[largest, label] -= 1
            counts[k, label] += 1
        return counts


@dataclass(frozen=True)
class ByQuantity(PartitionRule):
    """The rule that `by_quantity` returns: rows at random, in unequal numbers."""

    clients: int | tuple[int, ...]
    law: str = "lognormal"
    spread: float = 1.0
    seed: int = 0

    def __str__(self) -> str:
        if isinstance(self.clients, tuple):
            few = len(self.clients) <= _SIZES
            sizes = f"({', '.join(map(str, self.clients))})" if few else f"{len(self.clients)} sizes"
            return f"by_quantity({sizes}{_seed_text(self.seed)})"
        return f"by_quantity({self.clients}, law={self.law}, spread={self.spread!r}{_seed_text(self.seed)})"

    def owners(self, rows: int, labels: Ints | None) -> Ints:
        """Assign rows to clients at random. The clients' numbers of rows follow the law."""
        random = random_of(self.seed, _QUANTITY)
        if isinstance(self.clients, tuple):
            sizes = np.array(self.clients, dtype=np.int64)
            if sizes.sum() != rows:
                raise ConfigError(
                    f"{self}: the sizes add up to {sizes.sum()}, and there are {rows} rows", field="client"
                )
        else:
            _check_enough_rows(rows, self.clients)
            k = self.clients
            weights = (
                random.lognormal(0.0, self.spread, k)
                if self.law == "lognormal"
                else random.permutation(np.arange(1, k + 1, dtype=np.float64) ** -self.spread)
            )
            sizes = 1 + apportion(rows - k, weights / weights.sum())
        owners = np.empty(rows, dtype=np.int64)
        owners[random.permutation(rows)] = np.repeat(np.arange(len(sizes)), sizes)
        return owners


_SIZES = 20  # the most sizes that a rule's text lists; if there are more, it has only their number
_IID, _SHARDS, _DIRICHLET, _QUANTITY = range(1, 5)  # added to the seed, so that rules draw different numbers


def _seed_text(seed: int) -> str:
    return f", seed={seed}" if seed else ""


def apportion(total: int, shares: NDArray[np.float64]) -> Ints:
    """Divide `total` into whole numbers in proportion to `shares` [n], whose sum is 1. Return these numbers [n].

    The numbers with the largest remainders are rounded up.
    """
    exact = total * shares
    found = np.floor(exact).astype(np.int64)
    most = np.argsort(-(exact - found), kind="stable")
    found[most[: total - int(found.sum())]] += 1
    return found


def _dirichlet(random: np.random.Generator, weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Draw shares from Dir(weights) [n].

    If the weights are so small that the draw underflows, draw one element in proportion to the weights instead. This
    element gets the share 1, and the others 0.
    """
    q = random.dirichlet(weights)
    if not np.isfinite(q).all() or q.sum() < 0.5:
        q = np.zeros(len(weights))
        q[random.choice(len(weights), p=weights / weights.sum())] = 1.0
    return np.asarray(q, dtype=np.float64)


def _pure_ends(labels: Ints, shards: int, rule: ByShards) -> Ints:
    """Cut rows sorted by label into `shards` shards with one label each. Return the end of each shard [shards].

    Raises:
        ConfigError: there are more labels than shards, or a label has fewer rows than shards.
    """
    have = np.bincount(labels)
    have = have[have > 0]
    if len(have) > shards:
        raise ConfigError(
            f"{rule}: {shards} shards of one label each cannot hold {len(have)} labels: give more "
            "clients or shards, or leave pure out",
            field="client",
        )
    pieces = 1 + apportion(shards - len(have), have / have.sum())
    if (pieces > have).any():
        at = int((pieces > have).argmax())
        raise ConfigError(
            f"{rule}: a label with {have[at]} rows cannot be cut into {pieces[at]} shards: give fewer "
            "clients, or leave pure out",
            field="client",
        )
    first = np.concatenate(([0], np.cumsum(have)))
    return np.concatenate([first[i] + have[i] * np.arange(1, n + 1) // n for i, n in enumerate(pieces.tolist())])


def _check_enough_rows(rows: int, clients: int) -> None:
    if clients > rows:
        raise ConfigError(
            f"{clients} clients cannot share {rows} rows: some would have no samples; give fewer clients",
            field="client",
        )


# ------------------------------------------------------------------------------------------------ public functions


def iid(clients: int, *, seed: int = 0) -> PartitionRule:
    """Divide rows at random among `clients` clients. Their numbers of rows differ by at most one.

    Example:
        rayps.data.tensors(torch.randn(20, 3), batch_size=5, client=rayps.data.iid(4)).clients.sizes  # [5, 5, 5, 5]
    """
    return Iid(_count("clients", clients), _seed(seed))


def shards(per_client: int, *, clients: int, pure: bool = False, seed: int = 0) -> PartitionRule:
    """Sort rows by label, cut them into clients x per_client shards of equal size, and give each client `per_client`.

    McMahan et al. 2017, section 3. Most clients have at most `per_client` labels. If a shard has rows of two labels,
    its client may have one label more. With `pure=True` the rows of each label are cut separately: the number of shards
    of a label is in proportion to its rows, and no client has more labels than shards.

    Example:
        rule = rayps.data.shards(2, clients=4)
        rayps.data.tensors(torch.randn(40, 3), torch.arange(40) // 10, batch_size=5, client=rule).clients.count  # 4
    """
    if not isinstance(pure, bool):
        raise ConfigError(f"pure is {pure!r}: give True or False", field="client")
    return ByShards(_count("per_client", per_client), _count("clients", clients), pure, _seed(seed))


def dirichlet(alpha: float, *, clients: int, balanced: bool = True, seed: int = 0) -> PartitionRule:
    """Give each client a different mixture of labels. The smaller `alpha` is, the fewer labels a client has.

    Hsu et al. 2019: each client draws a mixture of labels q ~ Dir(alpha p), where p are the labels' shares of all rows.
    It then draws its rows by q, without replacement. The share of an exhausted label goes to the other labels. The
    clients' numbers of rows differ by at most one.

    `balanced=False` instead spreads each label's rows over the clients by Dir(alpha) (Yurochkin et al. 2019). The
    clients' numbers of rows then differ widely. A client that would be empty gets one row of the largest client.

    Example:
        rule = rayps.data.dirichlet(0.3, clients=4)
        rayps.data.tensors(torch.randn(40, 3), torch.arange(40) // 10, batch_size=5, client=rule).clients.count  # 4
    """
    if not isinstance(balanced, bool):
        raise ConfigError(f"balanced is {balanced!r}: give True or False", field="client")
    return Dirichlet(_positive("alpha", alpha), _count("clients", clients), balanced, _seed(seed))


def by_quantity(
    clients: int | Sequence[int], *, law: str = "lognormal", spread: float = 1.0, seed: int = 0
) -> PartitionRule:
    """Divide rows at random into unequal parts: one row for each client, and the other rows by the law.

    `law`: "lognormal" (the logarithm of a client's number of rows has standard deviation `spread`), or "zipf" (the r-th
    largest number is proportional to r ** -spread). If `clients` is a list, it has each client's number of rows. The
    sum of these numbers must be the number of all rows.

    Example:
        rule = rayps.data.by_quantity([5, 15])
        rayps.data.tensors(torch.randn(20, 3), batch_size=5, client=rule).clients.sizes  # [5, 15]
    """
    if law not in ("lognormal", "zipf"):
        raise ConfigError(f"law is {law!r}: give 'lognormal' or 'zipf'", field="client")
    if isinstance(clients, (int, float, str)):
        return ByQuantity(_count("clients", clients), law, _positive("spread", spread), _seed(seed))
    sizes = tuple(int(size) if isinstance(size, np.integer) else size for size in clients)
    for k, size in enumerate(sizes):
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ConfigError(
                f"by_quantity: client {k} would have {size!r} rows: a client with no samples cannot "
                "train; give whole numbers of at least 1",
                field="client",
            )
    if not sizes:
        raise ConfigError("by_quantity: the list of sizes is empty: give one for each client", field="client")
    return ByQuantity(sizes, law, _positive("spread", spread), _seed(seed))


def rule(text: str) -> PartitionRule:
    """Parse a rule from text, such as `shards(2,clients=20)` or `shards(per_client=2,clients=20)`.

    Raises:
        ConfigError: there is no such rule or option, or a value is invalid.
    """
    known: dict[str, Callable[..., PartitionRule]] = {
        "iid": iid,
        "shards": shards,
        "dirichlet": dirichlet,
        "by_quantity": by_quantity,
    }
    options = form(text)
    name = options.pop("name")
    if name not in known:
        raise ConfigError(
            f"there is no rule {name!r}{near(name, known)}: give one of {', '.join(known)}", field="client"
        )
    has = list(inspect.signature(known[name]).parameters)
    for free, value in (("per_client", 1), ("alpha", 1.0)):
        if free in has:
            options.setdefault(free, value)
    for key in options:
        if key not in has:
            raise ConfigError(
                f"the rule {text!r}: {name} has no option {key!r}{near(key, has)}; it has {', '.join(has)}",
                field="client",
            )
    if "clients" not in options:
        raise ConfigError(f"the rule {text!r}: {name} needs the number of clients: {_EXAMPLES[name]}", field="client")
    return known[name](options.pop(has[0]), **options)


_EXAMPLES = {
    "iid": "iid(20)",
    "shards": "shards(2,clients=20)",
    "dirichlet": "dirichlet(0.5,clients=20)",
    "by_quantity": "by_quantity(20)",
}


def _count(name: str, value: Json) -> int:
    if isinstance(value, np.integer):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} is {value!r}: give a whole number of at least 1", field="client")
    return int(value)


def _seed(value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise ConfigError(f"seed is {value!r}: give a whole number", field="client")
    return int(value)


def _positive(name: str, value: Json) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not (0 < value < math.inf):
        raise ConfigError(f"{name} is {value!r}: give a number above 0", field="client")
    return float(value)


def classes(values: NDArray[np.generic] | None, wanted: str) -> tuple[tuple[str, ...], Ints]:
    """Return the different labels as text, and for each row the index of its label [rows].

    `wanted` is the name of the rule, for the text of errors.

    Raises:
        DataError: the data has no labels, or they are not classes.
    """
    if values is None:
        raise DataError(f"{wanted} divides rows by label, and this data has none: give y or label=, or the rule iid")
    if values.ndim != 1 or values.dtype.kind not in "iub":
        kind = "numbers with fractions" if values.dtype.kind == "f" and values.ndim == 1 else f"of shape {values.shape}"
        raise DataError(
            f"{wanted} divides rows by label, and these labels are {kind}: it needs one whole number for "
            "each row; use the rule iid or by_quantity, or a column"
        )
    names, numbers = np.unique(values, return_inverse=True)
    return tuple(map(str, names.tolist())), numbers.astype(np.int64)
