"""Text files as a data source for language models: tokens, cut into windows of equal length.

Without a tokenizer, tokens are the bytes of the files, which are memory-mapped. With a tokenizer, the tokens are
written once per host into a temporary file (in TMPDIR, 4 bytes for a token), which all its processes map. The tokenizer
gets pieces of about one million characters that end where a line ends, so that files may be larger than memory.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol, runtime_checkable

import cloudpickle
import numpy as np
import torch
from numpy.typing import NDArray
from rayps_client.errors import ConfigError, DataError, first_line
from rayps_client.rows import batch_size_of, drop_last_of

from rayps.cluster.scratch import SharedScratch
from rayps.data.base import Batch, Data
from rayps.data.clients import Clients, GivenClients, checked_client, divide
from rayps.data.local_files import LocalFiles, PathsGiven, local_files
from rayps.data.memory import InMemory
from rayps.data.partition_rules import Ints

Array = NDArray[np.generic]
_PIECE = 1 << 20  # characters that the tokenizer gets at a time
_LONGEST = 16 << 20  # characters after which a piece ends within a line
_SECONDS = 3600.0  # for which a process waits while another one writes the tokens


@runtime_checkable
class HasIds(Protocol):
    """What `tokenizers.Tokenizer.encode` returns."""

    ids: Sequence[int]


TokenIds = Sequence[int] | NDArray[np.integer[Any]] | torch.Tensor
Encoded = TokenIds | HasIds | Mapping[str, TokenIds]


@runtime_checkable
class Encoder(Protocol):
    """A tokenizer with a method `encode`, as those of `transformers`, `tokenizers`, `tiktoken` and `sentencepiece`."""

    def encode(self, text: str) -> Encoded:
        """Return the tokens of a text."""


Tokenizer = Encoder | Callable[[str], Encoded]


class TextWindows(InMemory):
    """A data source whose rows are windows of tokens. A pickled object has the paths and the tokenizer only."""

    separate_rows = True

    def __init__(
        self,
        files: LocalFiles,
        window: int,
        tokenizer: Tokenizer | None,
        *,
        batch_size: int,
        shuffle: bool,
        drop_last: bool,
        client: GivenClients,
    ) -> None:
        self.client = checked_client(client, columns=True)
        if isinstance(self.client, str) and self.client != "file":
            raise ConfigError(
                f'client is {self.client!r}: give "file" (each file is a client), a rule such as rayps.data.iid(20), '
                "or an id for each window",
                field="client",
            )
        self.batch_size, self.drop_last = batch_size_of(batch_size), drop_last_of(drop_last)
        self.shuffle = shuffle
        self._files = files
        self._window = window
        self._tokenizer = tokenizer
        self._opened: tuple[list[str], list[Array], Ints] | None = None
        self._stored: _StoredTokens | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None, "_stored": None, "_clients": None}

    def _take_clients(self, client: GivenClients) -> None:
        self.client, self._clients = checked_client(client, columns=True), None

    def check(self) -> None:
        """Map or tokenize the files.

        Raises:
            DataError: a file is missing or is not UTF-8, the tokenizer fails, or no file is as long as a window.
        """
        self._opened = None
        self._tokens()

    def rows(self) -> int:
        """Return the number of windows."""
        return int(self._tokens()[2][-1])

    def _tokens(self) -> tuple[list[str], list[Array], Ints]:
        """Return the files, their tokens, and for each file the number of windows in it and all before it."""
        if self._opened is None:
            names = list(self._files.list())
            if self._tokenizer is None:
                tokens = [_bytes_of(name) for name in names]
            else:
                self._stored = _StoredTokens(self._files, self._tokenizer)
                tokens = self._stored.tokens
            ends = np.cumsum([max(len(one) - 1, 0) // self._window for one in tokens], dtype=np.int64)
            if not len(ends) or ends[-1] == 0:
                longest = max(map(len, tokens), default=0)
                raise DataError(
                    f"{names[0]}: no file has a window of {self._window} tokens and the next one: the longest of "
                    f"{len(names)} has {longest} tokens\ngive a smaller window, or join the files",
                    file=names[0],
                )
            self._opened = names, tokens, ends
        return self._opened

    def _take(self, rows: Ints) -> Batch:
        _, tokens, ends = self._tokens()
        found = np.empty((len(rows), self._window + 1), dtype=np.int64)
        for place, row in enumerate(rows.tolist()):
            file = int(np.searchsorted(ends, row, side="right"))
            first = (row - (int(ends[file - 1]) if file else 0)) * self._window
            found[place] = tokens[file][first : first + self._window + 1]
        whole = torch.from_numpy(found)
        return Batch(whole[:, :-1].contiguous(), whole[:, 1:].contiguous(), len(rows))

    def _divide(self) -> Clients:
        names, _, ends = self._tokens()
        ids = self.client
        if isinstance(ids, str):
            ids = np.repeat(np.array(names), np.diff(ends, prepend=0))
        return divide(ids, self.rows(), None, self._take, column="file" if isinstance(self.client, str) else None)


def _bytes_of(name: str) -> Array:
    try:
        if Path(name).stat().st_size == 0:
            return np.empty(0, dtype=np.uint8)
        return np.memmap(name, dtype=np.uint8, mode="r")
    except OSError as error:
        raise DataError(f"{name}: cannot be read: {first_line(error)}", file=name) from error


class _StoredTokens:
    """The tokens of each file, in a memory-mapped file that the processes of a host share."""

    def __init__(self, files: LocalFiles, tokenizer: Tokenizer) -> None:
        kind = hashlib.sha256(cloudpickle.dumps(tokenizer)).hexdigest()
        shared = SharedScratch(
            files.digest(kind),
            lambda folder: _write_tokens(folder, files.list(), tokenizer),
            what="tokenizing",
            timeout=_SECONDS,
        )
        self._closed = weakref.finalize(self, shared.close)
        counts = json.loads((shared.path / "counts.json").read_text())
        ends = np.cumsum(counts)
        if not counts or ends[-1] == 0:
            self.tokens: list[Array] = [np.empty(0, dtype=np.int32)]
        else:
            whole = np.memmap(shared.path / "tokens.bin", dtype=np.int32, mode="r")
            self.tokens = list(np.split(whole, ends[:-1]))

    def close(self) -> None:
        """Close the file. The last process of the host that closes it removes it."""
        self._closed()


def _write_tokens(folder: Path, names: Sequence[str], tokenizer: Tokenizer) -> None:
    counts = []
    with (folder / "tokens.bin").open("wb") as out:
        for name in names:
            count = 0
            with Path(name).open("rb") as file:
                for piece in _pieces(name, file):
                    ids = _encoded(name, tokenizer, piece)
                    out.write(ids.tobytes())
                    count += len(ids)
            counts.append(count)
    (folder / "counts.json").write_text(json.dumps(counts))


def _pieces(name: str, file: BinaryIO) -> Iterator[str]:
    """Yield the text of a file in pieces that end where a line ends, or within a line of more than 16 M characters."""
    decode = codecs.getincrementaldecoder("utf-8")().decode
    rest, read = "", 0
    while True:
        block = file.read(_PIECE)
        try:
            text = decode(block, final=not block)
        except UnicodeDecodeError as error:
            raise DataError(
                f"{name}: it is not UTF-8 at about byte {read + error.start}: write it as UTF-8, or give no tokenizer, "
                "which reads bytes",
                file=name,
            ) from error
        read += len(block)
        whole, end, rest = (rest + text).rpartition("\n")
        if whole or end:
            yield whole + end
        if rest and (not block or len(rest) > _LONGEST):
            yield rest
            rest = ""
        if not block:
            return


def _encoded(name: str, tokenizer: Tokenizer, text: str) -> NDArray[np.int32]:
    try:
        found = _ids(tokenizer, text)
    except Exception as error:  # the tokenizer is the user's
        raise DataError(
            f"{name}: the tokenizer failed: {type(error).__name__}: {first_line(error)}", file=name
        ) from error
    ids = np.asarray(found)
    if ids.size == 0:
        return np.empty(0, dtype=np.int32)
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or int(ids.min()) < 0 or int(ids.max()) > np.iinfo(np.int32).max:
        raise DataError(
            f"{name}: the tokenizer returned {type(found).__name__} of {ids.dtype} with shape {list(ids.shape)}: "
            "return a list of whole numbers from 0 to 2^31 - 1",
            file=name,
        )
    return ids.astype(np.int32)


def _ids(tokenizer: Tokenizer, text: str) -> TokenIds:
    if isinstance(tokenizer, Encoder):
        encode: Callable[..., Encoded] = tokenizer.encode
        try:
            found = encode(text, add_special_tokens=False)
        except TypeError:  # tiktoken and sentencepiece have no such argument
            found = encode(text)
    else:
        found = tokenizer(text)
    if isinstance(found, Mapping):
        return found["input_ids"]
    return found.ids if isinstance(found, HasIds) else found


def text(
    path: PathsGiven,
    *,
    window: int,
    tokenizer: Tokenizer | None = None,
    batch_size: int = 32,
    shuffle: bool = True,
    drop_last: bool = False,
    client: GivenClients = None,
) -> Data:
    """Cut text files into windows of tokens, for language models. A row is a window.

    For a window of tokens t[0], ..., t[window], `Batch.x` is t[0 : window] and `Batch.y` is t[1 : window + 1], both
    int64 [rows, window]. The next window of the file begins with the last token of `y`. Windows do not cross files; the
    tokens after the last whole window of a file are left out.

    - `path`: a file, a directory (its files *.txt), a pattern, or a list; it must exist on all hosts.
    - `tokenizer`: None for bytes (256 different tokens); or a function from text to a list of ids; or an object with
      `encode`, such as a tokenizer of Hugging Face, which is called without special tokens. It must be picklable, and
      each host tokenizes the files once.
    - `drop_last`: as in `rayps.data.tensors`.
    - `client`: "file" (each file is a client), a rule, or an id for each window.

    Raises:
        ConfigError: an option is invalid.
        DataError: there is no path. `check()` finds other errors.

    Example:
        rayps.data.text("books/*.txt", window=128, batch_size=16)
    """
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:
        raise ConfigError(f"window is {window!r}: give a whole number of at least 1", field="window")
    if tokenizer is not None and not isinstance(tokenizer, Encoder) and not callable(tokenizer):
        raise ConfigError(
            f"tokenizer is {type(tokenizer).__name__}: give a function from text to a list of ids, or an object with "
            "encode",
            field="tokenizer",
        )
    return TextWindows(
        local_files("text", path, (".txt",)),
        window,
        tokenizer,
        batch_size=batch_size,
        shuffle=shuffle,
        drop_last=drop_last,
        client=client,
    )
