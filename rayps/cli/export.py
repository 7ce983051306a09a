"""`rayps export`: write the model of a job or of a checkpoint as files that need no rayps."""

from __future__ import annotations

import contextlib
import re
import shutil
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from rayps.cli import show
from rayps.core.errors import ConfigError
from rayps.core.values import JsonObject
from rayps.service.client import Client

_MANIFEST = "manifest.json"


def export(
    source: Annotated[
        str, typer.Argument(metavar="JOB|CHECKPOINT", help="A job's id or its beginning, or a folder of checkpoints.")
    ],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The new folder for the model.")],
    workload: Annotated[
        str | None,
        typer.Option(
            metavar="TARGET",
            help="file.py:Class or module:Class that makes the model (default: that of the job, whose code is then "
            "imported here). Without it, the tensors are written by name.",
        ),
    ] = None,
    checkpoint: Annotated[str, typer.Option(metavar="WHICH", help="newest, best, a round, or a name.")] = "newest",
) -> None:
    """Write a trained model into a new folder. The files are safetensors, or what save_pretrained writes."""
    if Path(source).is_dir():
        _write(_local(Path(source), checkpoint), folder, workload, None)
        return
    with Client() as client:
        job = client.job(source)
        spec = job.data["spec"]
        ends = (path for path in job.files() if path.startswith("checkpoints/") and path.endswith(f"/{_MANIFEST}"))
        names = [path.removeprefix("checkpoints/").removesuffix(f"/{_MANIFEST}") for path in ends]
        chosen = which(sorted(names), checkpoint, f"job {job.id}")
        folder.absolute().parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}.download-", dir=folder.absolute().parent))
        try:
            job.download(f"checkpoints/{chosen}", draft / "state")
            loop = spec.get("run") is not None  # its states name their modules, and need no code
            home = None if loop else spec.get("working_dir")
            if workload is None and not loop and spec.get("code") is not None:
                home = str(job.write_code(draft / "code"))
            if workload is None and home is not None and Path(home).is_dir():
                _write(draft / "state", folder, spec["workload"], home, spec.get("params"))
            else:
                _write(draft / "state", folder, workload, None)
        finally:
            shutil.rmtree(draft, ignore_errors=True)


def which(names: list[str], wanted: str, owner: str) -> str:
    """Return the checkpoint of `names` that `wanted` names: "newest", a round's number, or the name itself.

    A name such as "best" stands for the one checkpoint in the folder of this name, which a callback keeps. Raises
    ConfigError if there is none; the text lists the checkpoints of `owner`.
    """
    numbers = {int(found[1]): name for name in names if (found := re.fullmatch(r"step-(\d+)", name))}
    if wanted == "newest" and numbers:
        return numbers[max(numbers)]
    if wanted.isdecimal() and int(wanted) in numbers:
        return numbers[int(wanted)]
    if wanted in names:
        return wanted
    below = [name for name in names if name.startswith(f"{wanted}/")]
    if len(below) == 1:
        return below[0]
    there = f"it has {', '.join(names)}" if names else "it has none"
    raise ConfigError(f"{owner} has no checkpoint {wanted!r}: {there}", field="checkpoint")


def _local(source: Path, wanted: str) -> Path:
    if (source / _MANIFEST).is_file():
        return source
    found = [*source.glob(f"*/{_MANIFEST}"), *source.glob(f"*/*/{_MANIFEST}")]
    names = sorted(path.parent.relative_to(source).as_posix() for path in found if ".tmp-" not in str(path))
    return source / which(names, wanted, str(source))


def _write(path: Path, folder: Path, target: str | None, home: str | None, params: JsonObject | None = None) -> None:
    from rayps.runtime.own_loop.export import export_modules
    from rayps.runtime.own_loop.state import KIND, parts_of
    from rayps.runtime.saved_model import export_checkpoint
    from rayps.tensors import checkpoint
    from rayps.workload.base import load

    absolute = folder.expanduser().absolute()
    state = checkpoint.load(path)
    if KIND in state.meta:
        if target is not None:
            raise ConfigError(
                "this is the state of a loop, whose modules are exported by the names in rayps.save: leave --workload "
                "out",
                field="workload",
            )
        names = export_modules(parts_of(state, None, str(path))[0], absolute, str(path))
        show.note(f"modules of the saved state: {', '.join(names)}; rayps.load_state(model, FOLDER/NAME.safetensors)")
        show.line(str(folder))
        return
    with contextlib.chdir(home) if home is not None else contextlib.nullcontext():  # model() may read files
        made = None if target is None else load(target, home, params)
        export_checkpoint(path.absolute(), absolute, made)
    if target is None:
        show.note("the tensors are saved by name, without the code of a model: give --workload to use save_pretrained")
    show.line(str(folder))


def add(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("export")(export)
