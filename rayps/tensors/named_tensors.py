"""Tensors by name in files of several kinds, and which of them belong to which parameter of a model.

A source is a safetensors file, the index of several such files (`*.safetensors.index.json`), a folder with one of
these, as Hugging Face and `Result.save` write it, a folder of adapters that peft has written, or a checkpoint of rayps.
Only the headers are read until `read` is
called. Files of pickles (`pytorch_model.bin`, `*.pt`) are refused, because reading them runs code.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rayps_client.errors import CheckpointError
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from rayps.core.job.warm_start import StartFrom
from rayps.core.urls import Location, is_url
from rayps.tensors.checkpoints import checkpoint
from rayps.tensors.checkpoints.checkpoint_parts import PieceReader
from rayps.tensors.snapshot import Snapshot, hash_of

MODEL_FILE = "model.safetensors"
ADAPTER_FILE = "adapter_model.safetensors"  # of peft
_INDEX = ".safetensors.index.json"
_SHOWN = 4  # names that an error lists of each kind
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_WAY = 'save its state_dict with safetensors.torch.save_file(state_dict, "model.safetensors") and give that file'


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor in a file."""

    file: Location  # a safetensors file, or a checkpoint in parts
    key: str  # its name in the file
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelTensor:
    """A tensor of a model: its shape, and the other names of it, if it is tied."""

    shape: tuple[int, ...]
    others: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelNames:
    """The names of a model's tensors. `beside` are names that a file may have and that are not read.

    `adapters` are the names of the model's adapters, if peft has added some.
    """

    wanted: dict[str, ModelTensor]
    beside: frozenset[str] = frozenset()
    adapters: tuple[str, ...] = ()

    @classmethod
    def of(cls, model: nn.Module) -> ModelNames:
        """Return the names of a model's parameters and persistent buffers. A tied parameter has its first name."""
        several: dict[int, list[str]] = defaultdict(list)
        for name, p in model.named_parameters(remove_duplicate=False):
            several[id(p)].append(name)
        found = {name: ModelTensor(tuple(p.shape), tuple(several[id(p)][1:])) for name, p in model.named_parameters()}
        buffers, kept = dict(model.named_buffers()), model.state_dict().keys()
        found |= {name: ModelTensor(tuple(value.shape)) for name, value in buffers.items() if name in kept}
        adapters = tuple(getattr(model, "peft_config", None) or ())
        return cls(found, frozenset(name for name in buffers if name not in kept), adapters)


@dataclass(frozen=True)
class StartPoint:
    """The tensors with which a model starts: from a name of the model to the place in a file."""

    path: Location
    sources: Mapping[str, StoredTensor]
    missing: int = 0  # tensors of the model that are not in the file
    tables: Path | None = None  # the folder with the rows of sparse tables, if there is one
    message: str = field(default="", compare=False)

    def fill(self, snapshot: Snapshot) -> None:
        """Copy the tensors into a snapshot's parameters and buffers, in the snapshot's dtypes.

        Raises CheckpointError if a file cannot be read, or has changed since the names were compared.
        """
        params, buffers = snapshot.params.clone(), dict(snapshot.buffers)
        places = {entry.name: params[entry.lo : entry.hi].view(entry.shape) for entry in snapshot.layout.entries}
        for name, value in read(self.sources):
            if name in places:
                places[name].copy_(value)
            elif name in buffers:
                buffers[name] = value.to(buffers[name].dtype)
        snapshot.params, snapshot.buffers = params, buffers
        snapshot.frozen_hash = hash_of({name: buffers[name] for name in snapshot.frozen})

    def load_into(self, model: nn.Module) -> None:
        """Copy the tensors into a model. Tied tensors stay tied.

        Raises CheckpointError if a file cannot be read.
        """
        places = dict(model.named_parameters()) | dict(model.named_buffers())
        with torch.no_grad():
            for name, value in read(self.sources):
                places[name].copy_(value)


def usable_start(start: StartFrom, home: str | Path | None = None) -> tuple[StartFrom, list[str]]:
    """Return `start` with an earlier checkpoint if its own is damaged, and the warnings: see `checkpoint.usable_at`.

    Raises:
        PlaceError: the remote place cannot be reached, or refuses.
    """
    given: Location = start.path if is_url(start.path) else Path(home or ".") / Path(start.path).expanduser()
    found, passed = checkpoint.usable_at(given)
    return (replace(start, path=str(found)) if passed else start), passed


def start_point(start: StartFrom, names: ModelNames, home: str | Path | None = None) -> StartPoint:
    """Find the tensors of a model in the files that `start` names; a relative path is relative to the folder `home`.

    Raises:
        CheckpointError: the path has no such files, or their names and shapes are not those of the model.
    """
    if is_url(start.path):
        return _start_in_a_place(start, names)
    path = Path(home or ".") / Path(start.path).expanduser()
    tables = path / checkpoint.TABLES
    files = find_adapter_files(path, names.adapters)
    if files:
        sources = sources_of_adapters(files, names)
        expected = {
            name: wanted for name, wanted in names.wanted.items() if name in sources or _is_of_adapter(name, files)
        }
        found = match(start, replace(names, wanted=expected), sources)
        message = f"the adapters are those of {path}: {len(found)} tensors; the others are those that model() returns"
        return StartPoint(path, found, len(expected) - len(found), tables if tables.is_dir() else None, message)
    return _start_with(start, names, path, sources_of(path), tables if tables.is_dir() else None)


def _start_with(
    start: StartFrom, names: ModelNames, path: Location, sources: dict[str, StoredTensor], tables: Path | None
) -> StartPoint:
    found = match(start, names, sources)
    count = len(names.wanted)
    message = f"the parameters are those of {path}: {len(found)} of {count} tensors of the model"
    if len(found) < count:
        message += "; the others are drawn from the seed"
    return StartPoint(path, found, count - len(found), tables, message)


def _start_in_a_place(start: StartFrom, names: ModelNames) -> StartPoint:
    """Find the tensors of a model in a remote checkpoint.

    Raises:
        CheckpointError: the URL is not one of a checkpoint, or its names and shapes are not those of the model.
    """
    url = start.path.rstrip("/")
    with checkpoint.tables_of(url) as tables:
        if tables.is_dir() and any(tables.iterdir()):
            raise CheckpointError(
                f"{url} has sparse tables, which are read from local folders only: copy the checkpoint to a folder, "
                "and give the folder",
                path=url,
            )
    return _start_with(start, names, url, _of_checkpoint(url), None)


# ---- names


def match(start: StartFrom, names: ModelNames, found: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the source of each tensor of a model, by the model's names.

    Raises:
        CheckpointError: `start.strict`, and names are missing, unexpected or of another shape; or no name fits.
    """
    renamed = {start.name_in_model(name): source for name, source in found.items()}
    fits, missing, misshaped = dict[str, StoredTensor](), list[str](), list[str]()
    used: set[str] = set()
    for name, wanted in names.wanted.items():
        there = [each for each in (name, *wanted.others) if each in renamed]
        used.update(there)
        if not there:
            missing.append(name)
        elif renamed[there[0]].shape != wanted.shape:
            misshaped.append(f"{name} ({list(renamed[there[0]].shape)} in the file, {list(wanted.shape)} in the model)")
        else:
            fits[name] = renamed[there[0]]
    unexpected = sorted(renamed.keys() - used - names.beside)
    if fits and not (start.strict and (missing or unexpected or misshaped)):
        return fits
    kinds = {"missing": missing, "unexpected": unexpected, "of another shape": misshaped}
    faults = "; ".join(_list_names(kind, each) for kind, each in kinds.items() if each) or "the file has no tensors"
    raise CheckpointError(
        f"the tensors of {start.path} are not those of the model: {faults}\n"
        + _describe_way_out(start, names, found, some=bool(fits)),
        field="start_from",
        **{kind: each for kind, each in kinds.items() if each},
    )


def _list_names(kind: str, names: list[str]) -> str:
    shown = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
    return f"{len(names)} {'is' if len(names) == 1 else 'are'} {kind} ({shown})"


def _describe_way_out(start: StartFrom, names: ModelNames, found: Mapping[str, StoredTensor], *, some: bool) -> str:
    better = _find_better_prefix(start, names, found)
    if better is not None:
        key = "remove_prefix" if better.remove_prefix else "add_prefix"
        value = better.remove_prefix or better.add_prefix
        return f'with {key} {value!r} more names would fit: start_from={{"path": {start.path!r}, "{key}": {value!r}}}'
    if some:
        return (
            f'to use only what fits by name and shape: start_from={{"path": {start.path!r}, "strict": False}}; '
            "the rest is then drawn from the seed"
        )
    return "give the file of a model with the same parameters, or set remove_prefix or add_prefix in start_from"


def _find_better_prefix(start: StartFrom, names: ModelNames, found: Mapping[str, StoredTensor]) -> StartFrom | None:
    """Return the option with the prefix under which the most tensors fit, or None if no prefix is better."""
    mine = {each: wanted.shape for name, wanted in names.wanted.items() for each in (name, *wanted.others)}
    theirs = {name: source.shape for name, source in found.items()}
    now = sum(mine.get(start.name_in_model(name)) == shape for name, shape in theirs.items())
    removed = Counter(
        name[: at + 1]
        for name, shape in theirs.items()
        for at, letter in enumerate(name)
        if letter == "." and mine.get(name[at + 1 :]) == shape
    )
    added = Counter(
        name[: at + 1]
        for name, shape in mine.items()
        for at, letter in enumerate(name)
        if letter == "." and theirs.get(name[at + 1 :]) == shape
    )
    plain = StartFrom(start.path, start.strict)
    best = [(count, replace(plain, remove_prefix=prefix)) for prefix, count in removed.most_common(1)]
    best += [(count, replace(plain, add_prefix=prefix)) for prefix, count in added.most_common(1)]
    count, option = max(best, key=lambda each: each[0], default=(0, plain))
    return option if count > now else None


# ---- files


def sources_of(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors at a path by name; the module's text lists what a path may be.

    Raises CheckpointError if the path is none of these, or a file cannot be read.
    """
    if path.name.endswith(_INDEX):
        return _of_index(path)
    if path.is_file():
        return _of_file(path)
    if not path.is_dir():
        raise CheckpointError(
            f"start_from is {str(path)!r}: there is no such file or folder; give a .safetensors file, a folder with "
            "one, or a checkpoint",
            path=str(path),
        )
    if (path / checkpoint.MANIFEST).is_file():
        return _of_checkpoint(path)
    if (path / MODEL_FILE).is_file():
        return _of_file(path / MODEL_FILE)
    indices, files = sorted(path.glob(f"*{_INDEX}")), sorted(path.glob("*.safetensors"))
    if len(indices) == 1:
        return _of_index(indices[0])
    if len(files) == 1:
        return _of_file(files[0])
    raise CheckpointError(f"{path} {_explain_not_tensors(path, len(files) + len(indices))}", path=str(path))


def find_adapter_files(path: Path, adapters: Sequence[str]) -> dict[str, Path]:
    """Return the file of each of a model's adapters in a folder that peft has written. It is {} for other folders.

    The adapter "default" is in the folder itself, and each other one in a subfolder of its name. A folder of one
    adapter may be given for a model with one adapter of any name.

    Raises:
        CheckpointError: the folder has adapters, and the model has none.
    """
    if (path / MODEL_FILE).is_file() or (path / checkpoint.MANIFEST).is_file():
        return {}
    here = path / ADAPTER_FILE
    if here.is_file() and not adapters:
        raise CheckpointError(
            f"{path} has adapters of peft, and the model has none: return get_peft_model(base, config) from model(), "
            "or give the folder of a whole model",
            path=str(path),
        )
    places = {name: path / name / ADAPTER_FILE for name in adapters}
    if here.is_file():
        places["default" if len(adapters) > 1 else adapters[0]] = here
    return {name: file for name, file in places.items() if file.is_file()}


def sources_of_adapters(files: Mapping[str, Path], names: ModelNames) -> dict[str, StoredTensor]:
    """Return the tensors of adapters by the model's names. In peft's files the adapter's name is left out.

    Raises CheckpointError if a file cannot be read.
    """
    found: dict[str, StoredTensor] = {}
    for adapter, file in files.items():
        in_model = {_remove_adapter(adapter, name): name for name in names.wanted if _is_of_adapter(name, (adapter,))}
        found |= {in_model.get(key, key): source for key, source in _of_file(file).items()}
    return found


def _is_of_adapter(name: str, adapters: Collection[str]) -> bool:
    """Return whether a tensor of a model belongs to one of these adapters."""
    return any(part in adapters for part in name.split("."))


def _remove_adapter(adapter: str, name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in (adapter, "modules_to_save"))


def _explain_not_tensors(path: Path, count: int) -> str:
    steps = sorted(each.name for each in path.glob("step-*") if (each / checkpoint.MANIFEST).is_file())
    if steps:
        return f"is a folder of several checkpoints: give one of them, e.g. {path / steps[-1]}"
    if count:
        return "has several safetensors files and no index: give one of the files"
    pickles = sorted(each.name for each in path.iterdir() if each.suffix in _PICKLES)
    if pickles:
        return f"has only {pickles[0]}, a pickle, which could run any code: load it yourself, {_WAY}"
    return f"has no {MODEL_FILE}, no index and no checkpoint: give a folder that was saved as safetensors"


def _of_file(path: Path) -> dict[str, StoredTensor]:
    if path.suffix in _PICKLES:
        raise CheckpointError(f"{path} is a pickle, which could run any code: load it yourself, {_WAY}", path=str(path))
    with _open(path) as file:
        found = {key: StoredTensor(path, key, tuple(file.get_slice(key).get_shape())) for key in file.keys()}  # noqa: SIM118
        for other, kept in (file.metadata() or {}).items():  # `safetensors.torch.save_model` notes tied names here
            if kept in found and other not in found:
                found[other] = found[kept]
    return found


def _of_index(path: Path) -> dict[str, StoredTensor]:
    try:
        files = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(files.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is not an index of safetensors files: {error}", path=str(path)) from error
    found: dict[str, StoredTensor] = {}
    for name in names:
        if Path(name).name != name:
            raise CheckpointError(f"{path} names the file {name!r}, which is not in its folder", path=str(path))
        found |= _of_file(path.parent / name)
    return found


def _of_checkpoint(path: Location) -> dict[str, StoredTensor]:
    checkpoint.verify(path)
    found: dict[str, StoredTensor] = {}
    contents = PieceReader(path).contents
    for prefix in ("model/", "buffer/", "frozen/"):
        for key, facts in contents.items():
            if key.startswith(prefix):
                found[key.removeprefix(prefix)] = StoredTensor(path, key, tuple(facts["shape"]))
    if not found:  # what `rayps.save` of a loop writes: its modules have names of their own
        raise CheckpointError(
            f"{path} is the saved state of a loop, and not of one model: write its modules as files by "
            f"`rayps export {path} FOLDER`, and give one of these",
            path=str(path),
        )
    return found


def read(sources: Mapping[str, StoredTensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor), one file or checkpoint after another, one tensor at a time.

    Raises CheckpointError if a file cannot be read, or a tensor's shape has changed.
    """
    by_file: dict[Location, list[str]] = defaultdict(list)
    for name, source in sources.items():
        by_file[source.file].append(name)
    for path, names in by_file.items():
        with _tensors_of(path) as tensor:
            for name in names:
                value = tensor(sources[name].key)
                if tuple(value.shape) != sources[name].shape:
                    raise CheckpointError(f"{path} was changed while it was read: {name}", path=str(path))
                yield name, value


@contextlib.contextmanager
def _tensors_of(path: Location) -> Iterator[Callable[[str], Tensor]]:
    """Yield a function that reads a tensor of a safetensors file, or of a checkpoint, by its key."""
    if is_url(path) or Path(path).is_dir():
        reader = PieceReader(path)
        yield lambda key: reader.read({key: None})[key]
        return
    with _open(Path(path)) as file:
        yield file.get_tensor


@contextlib.contextmanager
def _open(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path} cannot be read as safetensors: {error}\ngive a complete .safetensors file", path=str(path)
        ) from error
