"""How to mend an error of the user's code that a library's text does not explain: one line for each known error.

The text of an error of torch names no label and no number of classes. These are read from the arguments of the torch
function in the error's traceback. The module does not import torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path, PurePath
from types import TracebackType
from typing import Protocol

from rayps_client.values import Keywords


class _Tensor(Protocol):
    @property
    def shape(self) -> Sequence[int]:
        """The extents."""

    def min(self) -> float:
        """Return the smallest element."""

    def max(self) -> float:
        """Return the largest element."""

    def numel(self) -> int:
        """Return the number of elements."""


_NO_NAME = r"cannot import name '(\w+)' from '([\w.]+)' \((.+)\)"  # Python's words; the package has other files
NO_STATISTICS = "Expected more than 1 value per channel"  # torch's words for a batch of which BatchNorm has one value
ONE_ROW_WAY = "give the data drop_last=True (no smaller last batch), or another batch_size, or use GroupNorm layers"

READ_OUTSIDE_WAY = (
    "under shard='parameters' a parameter is whole only in its module's forward: compute what needs it there, such as "
    "a penalty that forward returns beside its output, or use shard='gradients' or shard='optimizer'"
)


def hint(error: BaseException) -> str:
    """Return one line on how to mend an error of the user's code, or "" if the error is not known here."""
    if isinstance(error, StopIteration):
        return (
            "next() was called on an iterator that has ended, such as one epoch of a DataLoader: begin the next epoch "
            "by iter(loader), or write `for batch in loader`"
        )
    text = str(error)
    for pattern, explain in _KNOWN:
        found = re.search(pattern, text)
        if found is not None:
            with suppress(Exception):  # a hint must never hide the error
                return explain(error, found)
    return ""


def _labels(error: BaseException, found: re.Match[str]) -> str:
    for arguments in _arguments(error, "cross_entropy", "nll_loss"):
        scores, labels = arguments["input"], arguments["target"]
        classes = scores.shape[1] if len(scores.shape) > 1 else scores.shape[0]
        return (
            f"the labels of the batch are {_range(labels)}, and the model's output has {classes} classes, "
            f"0 to {classes - 1}: give the last layer more outputs, or correct the labels"
        )
    return f"a label is {found[1]}: labels must be 0 to the number of the model's outputs - 1"


def _ids(error: BaseException, found: re.Match[str]) -> str:
    for arguments in _arguments(error, "embedding", "embedding_bag"):
        rows = arguments["weight"].shape[0]
        return (
            f"the ids of the batch are {_range(arguments['input'])}, and the embedding has {rows} rows, 0 to "
            f"{rows - 1}: give nn.Embedding more rows, or correct the ids"
        )
    return "an index is larger than the tensor that it selects from: compare the ids with the size of the embedding"


def _optional(error: BaseException, found: re.Match[str]) -> str:
    """Return how to install a package that rayps itself requires, so that only a light client can lack it."""
    extra = {"pyarrow": "parquet", "torch": "torch"}[found[1]]
    return f'install it on this machine: pip install "rayps-client[{extra}]"'


def _missing(error: BaseException, found: re.Match[str]) -> str:
    return not_sent(found[1]) or (
        f"install the package {found[1]} on every machine that runs this code, or correct the import"
    )


def left_out(error: BaseException) -> str:
    """Return `not_sent` of the module that a failed import names, or "" for another error."""
    if isinstance(error, ModuleNotFoundError):
        return not_sent(error.name or "")
    found = re.search(_NO_NAME, str(error)) if isinstance(error, ImportError) else None
    if found is None or not (found[3] == "unknown location" or found[3].endswith("__init__.py")):
        return ""
    return not_sent(f"{found[2]}.{found[1]}")


def not_sent(module: str, folder: Path | None = None) -> str:
    """Return which line of an ignore file in `folder` leaves a module out of a job's code, and the way out; else "".

    The default folder is the current directory, which has a job's code, with these files, while the job runs.
    """
    try:
        root, (*above, last) = folder or Path.cwd(), module.split(".")
    except OSError:  # there may be no current directory
        return ""
    paths = ["/".join(above[: at + 1]) for at in range(len(above))] + ["/".join([*above, last])]
    missing = next((path for path in paths if not (root / path).exists() and not (root / f"{path}.py").exists()), None)
    if missing is None:
        return ""
    for file in (".raypsignore", ".gitignore"):
        with suppress(OSError):
            for number, line in enumerate((root / file).read_text("utf-8", "replace").splitlines(), 1):
                pattern = line.strip().removeprefix("**/").strip("/")
                names = (missing, f"{missing}.py", *([] if "/" in pattern else [PurePath(missing).name]))
                if pattern and any(fnmatchcase(name, pattern) for name in names):
                    lines = " and ".join(f"!/{what}" for what in _meant(missing, line.strip()))
                    way = "remove it" if file == ".raypsignore" else f"add to .raypsignore: {lines}"
                    return (
                        f"{missing} is not here: line {number} of {file} ({line.strip()!r}) leaves it out of the code "
                        f"that is sent with a job; {way}; and submit the job again"
                    )
    return ""


def _meant(missing: str, line: str) -> tuple[str, ...]:
    """Return the file or folder of module `missing` that an ignore line means; both if the line does not tell."""
    if line.endswith("/"):
        return (f"{missing}/",)
    return (f"{missing}.py",) if line.endswith(".py") else (f"{missing}/", f"{missing}.py")


def _range(values: _Tensor) -> str:
    return f"{int(values.min())} to {int(values.max())}" if values.numel() else "empty"


def _arguments(error: BaseException, *names: str) -> Iterator[Keywords]:
    """Yield the arguments of torch's functions `names` in an error's traceback."""
    trace: TracebackType | None = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if code.co_name in names and "/torch/" in code.co_filename.replace("\\", "/"):
            yield trace.tb_frame.f_locals
        trace = trace.tb_next


def _says(text: str) -> Callable[[BaseException, re.Match[str]], str]:
    return lambda _, found: found.expand(text)


_KNOWN: tuple[tuple[str, Callable[[BaseException, re.Match[str]], str]], ...] = (
    (r"Target (-?\d+) is out of bounds", _labels),
    (r"index out of range in self", _ids),
    (
        r"mat1 and mat2 shapes cannot be multiplied \((\d+)x(\d+) and (\d+)x(\d+)\)",
        _says(r"a layer expects \3 input features and gets \2: change the layer's first size, or reshape the batch"),
    ),
    (
        r"expected target dtype to be Long|expected scalar type Long",
        _says("labels of classes must be whole numbers: pass batch.y.long() to the loss"),
    ),
    (
        r"must have the same dtype|expected scalar type|expected m1 and m2 to have the same dtype",
        _says("the batch and the model have different dtypes: convert one, e.g. batch.x.float() or model.float()"),
    ),
    (
        r"Trying to backward through the graph a second time",
        _says(
            "rayps itself calls backward on what loss() returns: call no backward() in loss(), and keep no tensor with "
            "its graph from one batch to the next (detach() it)"
        ),
    ),
    (
        r"optimizer got an empty parameter list",
        _says("the optimizer was given no parameter: check the condition that selects them from `params`"),
    ),
    (
        r"mixed torch.Tensor and DTensor",
        _says(f"a parameter was read outside of its module's forward: {READ_OUTSIDE_WAY}"),
    ),
    (NO_STATISTICS, _says(f"the batch has one row: {ONE_ROW_WAY}")),
    (r"No module named '(pyarrow|torch)'", _optional),
    (r"No module named '([\w.]+)'", _missing),
    (_NO_NAME, lambda error, _: left_out(error)),
)
