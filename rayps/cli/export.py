"""`rayps export`: write the model of a job or of a checkpoint as files that need no rayps."""

from __future__ import annotations

import contextlib
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rayps_client.errors import ConfigError
from rayps_client.values import JsonObject

from rayps.cli import show
from rayps.core.urls import Location, is_url
from rayps.service.client import Client
from rayps.service.job_file import parse_assignments

if TYPE_CHECKING:
    from rayps.workload.base import Workload

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
    average: Annotated[
        bool, typer.Option("--average", help="Write the average of the weights (EMA, SWA), not the last weights.")
    ] = False,
    client: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Write the personal model of this client of a federated job, not the model of all clients.",
        ),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="Set a parameter of the workload (default: as the model was trained), e.g. --set width=8.",
        ),
    ] = None,
) -> None:
    """Write a trained model into a new folder. The files are safetensors, or what save_pretrained writes."""
    params = parse_assignments(changes or [])
    what = _What(average, client)
    if is_url(source) or Path(source).is_dir():
        made = None if workload is None else _Maker(workload, None, {}, params)
        found = _find_remote(source, checkpoint) if is_url(source) else _find_local(Path(source), checkpoint)
        _write(found, folder, made, params, what)
        return
    with Client() as service:
        job = service.job(source)
        spec = job.data["spec"]
        ends = (path for path in job.files() if path.startswith("checkpoints/") and path.endswith(f"/{_MANIFEST}"))
        names = [path.removeprefix("checkpoints/").removesuffix(f"/{_MANIFEST}") for path in ends]
        chosen = choose_checkpoint(sorted(names), checkpoint, f"job {job.id}")
        folder.absolute().parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}.download-", dir=folder.absolute().parent))
        try:
            job.download(f"checkpoints/{chosen}", draft / "state")
            loop = spec.get("run") is not None  # its states name their modules, and need no code
            home = None if loop else spec.get("working_dir")
            if workload is None and not loop and spec.get("code") is not None:
                home = str(job.write_code(draft / "code"))
            made, own = None, spec.get("params") or {}
            if workload is not None:
                made = _Maker(workload, None, own, params)
            elif (target := spec["workload"]) is not None and home is not None and Path(home).is_dir():
                made = _Maker(target, home, {}, own | params)
            _write(draft / "state", folder, made, params, what)
        finally:
            shutil.rmtree(draft, ignore_errors=True)


def choose_checkpoint(names: list[str], wanted: str, owner: str) -> str:
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


def _find_local(source: Path, wanted: str) -> Path:
    if (source / _MANIFEST).is_file():
        return source
    found = [*source.glob(f"*/{_MANIFEST}"), *source.glob(f"*/*/{_MANIFEST}")]
    names = sorted(path.parent.relative_to(source).as_posix() for path in found if ".tmp-" not in str(path))
    return source / choose_checkpoint(names, wanted, str(source))


def _find_remote(source: str, wanted: str) -> str:
    from rayps.tensors.checkpoints.checkpoint_place import CheckpointPlace, name_of, step_of

    place = CheckpointPlace.of(source)
    if step_of(place.name) is not None:
        return source
    names = [name_of(step) for step in place.steps()]
    if wanted not in ("newest", *names) and not wanted.isdecimal():
        names += [f"{wanted}/{name_of(step)}" for step in place.at(wanted).steps()]
    return str(place.at(choose_checkpoint(names, wanted, source)))


@dataclass(frozen=True)
class _What:
    """What of a checkpoint is written: the last weights, their average, or the personal model of a client."""

    average: bool
    client: str | None


@dataclass(frozen=True)
class _Maker:
    """The workload that makes the model, and the folder with its files; `params` replace those it was trained with.

    `trained` are parameters of the job beside those that the checkpoint records.
    """

    target: str
    home: str | None
    trained: JsonObject
    params: JsonObject

    def make(self, recorded: JsonObject) -> Workload:
        """Return the workload; `recorded` are the parameters that the checkpoint records."""
        from rayps.workload.base import load_trained

        return load_trained(self.target, self.home, recorded | self.trained, self.params)


def _write(path: Location, folder: Path, maker: _Maker | None, params: JsonObject, what: _What) -> None:
    from rayps.runtime.own_loop.state import KIND
    from rayps.runtime.results.job_clients import JobClients
    from rayps.runtime.results.saved_model import export_checkpoint
    from rayps.tensors.checkpoints.checkpoint import meta_of

    source = path.absolute() if isinstance(path, Path) else path
    absolute = folder.expanduser().absolute()
    meta = meta_of(source)
    if KIND in meta:
        _write_modules(source, absolute, maker, params, what)
        show.print_line(str(folder))
        return
    if maker is None and params:
        raise ConfigError(
            f"--set {next(iter(params))} sets a parameter of the workload that makes the model: give --workload",
            field="set",
        )
    if what.client is not None and (maker is None or what.average):
        raise ConfigError(
            f"--client {what.client} makes the personal model of a client from the last weights: "
            + ("leave --average out" if what.average else "give --workload, with which the model is made"),
            field="client",
        )
    home = contextlib.nullcontext() if maker is None or maker.home is None else contextlib.chdir(maker.home)
    with home:  # model() may read files
        made = None if maker is None else maker.make(meta.get("params", {}))
        if what.client is None or made is None:
            export_checkpoint(source, absolute, made, average=what.average)
        else:
            JobClients.of_checkpoint(source, made, Path.cwd()).client(what.client).save(absolute)
    if maker is None:
        show.print_note(
            "the tensors are saved by name, without the code of a model: give --workload to use save_pretrained"
        )
    show.print_line(str(folder))


def _write_modules(source: Location, folder: Path, maker: _Maker | None, params: JsonObject, what: _What) -> None:
    """Write the modules in the saved state of a loop. Raises ConfigError if options of a workload's model are given."""
    from rayps.runtime.own_loop.export import export_modules
    from rayps.runtime.own_loop.state import parts_of
    from rayps.tensors.checkpoints import checkpoint

    given = {"--workload": maker is not None, "--set": bool(params), "--average": what.average}
    given["--client"] = what.client is not None
    if any(given.values()):
        raise ConfigError(
            "this is the state of a loop, whose modules are exported by the names in rayps.save: leave "
            f"{', '.join(option for option, there in given.items() if there)} out",
            field="workload",
        )
    names = export_modules(parts_of(checkpoint.load(source), None, str(source))[0], folder, str(source))
    show.print_note(f"modules of the saved state: {', '.join(names)}; rayps.load_state(model, FOLDER/NAME.safetensors)")


def add(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("export")(export)
