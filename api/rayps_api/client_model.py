"""What a real client's personal model is made of: the parameters in the job's newest checkpoint, and facts of it."""

from __future__ import annotations

import json
from pathlib import Path

from rayps_client.errors import NotFound
from rayps_client.exchange.signed_orders import ModelFacts

from rayps_api.job_files import MANIFEST

FILES = ("model.safetensors", "buffer.safetensors")  # of a checkpoint: parameters, and buffers
_KIND = "model"


def model_facts(home: Path) -> ModelFacts:
    """Return the facts of the newest checkpoint in a job's folder, for a client: see `rayps.clients.global_model`.

    Raises:
        NotFound: the job has no checkpoint, or its last strategy is not federated.
    """
    for folder in sorted((home / "checkpoints").glob("step-*"), reverse=True):
        try:
            manifest = json.loads((folder / MANIFEST).read_bytes())
        except (OSError, ValueError):
            continue  # incomplete, or removed just now
        meta = manifest["meta"]
        if "federated" not in meta:
            break
        files = {name: manifest["files"][name] for name in FILES if name in manifest["files"]}
        return {
            "kind": _KIND,
            "step": manifest["step"],
            "round": min(meta["positions"]),
            "origin": meta["origin"],
            "steps_per_epoch": meta["steps_per_epoch"],
            "strategy": meta["federated"]["strategy"],
            "seed": meta["seed"],
            "files": {name: {"sha256": facts["sha256"], "bytes": facts["size"]} for name, facts in files.items()},
        }
    raise NotFound(
        "the job has no checkpoint of a federated strategy yet: ask again after its first round",
        status=404,
        code="no_model",
    )


def model_file(home: Path, step: int, name: str) -> Path:
    """Return the path of a file of the checkpoint of `step`. Raises NotFound if it is gone or not one of `FILES`."""
    path = home / "checkpoints" / f"step-{step:08}" / name
    if name not in FILES or not path.is_file():
        raise NotFound(
            f"the checkpoint of round {step} has no file {name[:50]!r}, or a newer one has replaced it: ask for the "
            "newest one again",
            status=404,
            code="no_model",
        )
    return path
