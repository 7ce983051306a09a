"""A trained model as files that need no rayps: written by `Result.save`, read by `load_state`.

FOLDER/model.safetensors             parameters and buffers by name; a tied tensor is saved once
FOLDER/config.json ...               if the model has `save_pretrained` (Hugging Face), what that writes
FOLDER/tables/NAME/rows-*.parquet    the rows of sparse tables, if the model has some
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import safetensors.torch
from rayps_client.errors import CheckpointError, ConfigError
from torch import nn

from rayps.core.job.warm_start import StartFrom
from rayps.core.urls import Location, location_of
from rayps.ps.client.table_face import find_tables
from rayps.tensors import weight_average
from rayps.tensors.checkpoints import checkpoint
from rayps.tensors.flat import Layout
from rayps.tensors.named_tensors import MODEL_FILE, ModelNames, start_point
from rayps.tensors.snapshot import Snapshot
from rayps.workload.base import Workload
from rayps.workload.model import has_tables, model_of

_Model = TypeVar("_Model", bound=nn.Module)


def save_model(model: nn.Module, folder: str | Path) -> Path:
    """Write a model, with its sparse tables if they are in this process, into a new folder. Return the folder.

    If the model has `save_pretrained`, that method writes the parameters, so that `from_pretrained` reads them. The
    folder is complete or not there at all.

    Raises:
        CheckpointError: the folder has files already, or cannot be written.
    """

    def write(draft: Path) -> None:
        pretrained: Callable[[Path], object] | None = getattr(model, "save_pretrained", None)
        if callable(pretrained):
            pretrained(draft)
        else:
            safetensors.torch.save_model(model, str(draft / MODEL_FILE))
        if has_tables(model):
            find_tables().save(model, draft / checkpoint.TABLES)

    return create_folder(folder, write)


def export_checkpoint(path: Location, folder: str | Path, workload: Workload | None, *, average: bool = False) -> Path:
    """Write the model of a checkpoint into a new folder, as `save_model` does. Return the folder.

    Without `workload` there is no model: the tensors are written by name into `model.safetensors`, and the rows of
    sparse tables are copied. With `average` the parameters and floating-point buffers are the average of the weights
    (`Workload.average`); other buffers and rows are those of the checkpoint.

    Raises:
        CheckpointError: the checkpoint cannot be used, is of another model, or the folder cannot be written.
        ConfigError: `average` is True, and the checkpoint has no average.
        WorkloadError: the workload's `model()` failed.
    """
    path = location_of(path)
    state = checkpoint.load(path)
    snapshot = Snapshot.from_state(state)
    if average:
        snapshot = _take_average(snapshot, state.meta, workload)
    if workload is not None:
        model = model_of(workload)
        layout = Layout.of((name, p) for name, p in model.named_parameters() if p.requires_grad)
        snapshot.check(
            layout, "give the workload that was trained (--workload), with its parameters (--set NAME=VALUE)"
        )
        snapshot.fill(model)
        if has_tables(model):
            with checkpoint.tables_of(path) as tables:
                find_tables().load(model, tables)
        return save_model(model.eval(), folder)

    def write(draft: Path) -> None:
        safetensors.torch.save_file(snapshot.state_dict(), draft / MODEL_FILE)
        with checkpoint.tables_of(path) as tables:
            if tables.is_dir():
                shutil.copytree(tables, draft / checkpoint.TABLES)

    return create_folder(folder, write)


def _take_average(snapshot: Snapshot, meta: checkpoint.Meta, workload: Workload | None) -> Snapshot:
    """Return the snapshot with the average of the weights in place of the parameters.

    A checkpoint of a loop of one's own does not name its kind of average, which is then that of `workload`. Raises
    ConfigError if there is no average.
    """
    way_out = "leave average out (--average) to take the last parameters"
    if "average" in meta:
        kind, way = weight_average.from_json(meta["average"]), f"it was trained without one; {way_out}"
    else:
        held = workload if weight_average.PARAMS in snapshot.shared else None
        kind, way = None if held is None else held.average, f"give the workload whose average it is; {way_out}"
    found = snapshot.averaged(kind)
    if found is snapshot:
        if kind is not None:
            way = f"{kind} has not begun after {snapshot.round} steps; give a later checkpoint, or {way_out}"
        raise ConfigError(f"the checkpoint has no average of the weights: {way}", field="average")
    return found


def create_folder(folder: str | Path, write: Callable[[Path], None]) -> Path:
    """Create `folder` with what `write` writes into the folder that it is given, or not at all. Return the folder.

    Raises:
        CheckpointError: the folder has files already, or cannot be written.
    """
    folder = Path(folder).expanduser()
    draft = folder.parent / f".{folder.name}.tmp-{uuid.uuid4().hex}"
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise CheckpointError(
                f"{folder} exists and is not empty: nothing is overwritten; give another folder, or remove it",
                path=str(folder),
            )
        draft.mkdir(parents=True)
        write(draft)
        for path in draft.rglob("*"):
            _sync(path)
        draft.rename(folder)
        _sync(folder.parent)
    except (OSError, RuntimeError) as error:  # safetensors raises RuntimeError
        raise CheckpointError(
            f"the model cannot be saved to {folder}: {getattr(error, 'strerror', None) or error}", path=str(folder)
        ) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


def load_state(
    model: _Model, path: str | Path, *, strict: bool = True, remove_prefix: str = "", add_prefix: str = ""
) -> _Model:
    """Load saved parameters and buffers into a model by name, and return the model. Tied tensors stay tied.

    `path` is a folder written by `Result.save` or `rayps export`, a Hugging Face folder, a safetensors file, the index
    of several, or a checkpoint of rayps. The rows of the model's sparse tables are read from the folder `tables`
    beside. `remove_prefix` is removed from the names in the file, and `add_prefix` is added to them.

    Raises:
        CheckpointError: the names or shapes are not those of the model. Without `strict`, tensors that do not fit are
            left out, and only a file in which nothing fits is refused.

    Example:
        import tempfile
        with tempfile.TemporaryDirectory() as folder:
            rayps.train(work, workers=2).save(f"{folder}/trained")
            model = rayps.load_state(work.model(), f"{folder}/trained")
    """
    found = start_point(StartFrom(str(path), strict, remove_prefix, add_prefix), ModelNames.of(model))
    found.load_into(model)
    if found.tables is not None and has_tables(model):
        find_tables().load(model, found.tables)
    return model


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
