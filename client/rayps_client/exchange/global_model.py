"""The job's parameters on a real client's disk, from which its personal model is made: `global.safetensors`.

The service sends the parameters and buffers of the job's newest checkpoint, and facts of it that it has signed, to
clients that have joined. The file has both, so that a personal model is made without the service (`rayps personal`).
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from pathlib import Path

from rayps_client.errors import ConfigError, Unauthorized
from rayps_client.exchange.connection import ServiceConnection
from rayps_client.exchange.raw_tensors import decode_tensors, encode_tensors, metadata_of
from rayps_client.exchange.signed_orders import ClientToken, ModelFacts, verified_model
from rayps_client.trainers.local_trainer import RawTensors

GLOBAL_FILE = "global.safetensors"
_ADDRESS = "/api/v1/client/model"


def fetch_global(
    connection: ServiceConnection, token: ClientToken, headers: dict[str, str], folder: Path
) -> ModelFacts:
    """Fetch the job's newest parameters, and store them in the folder of a client that has joined. Return their facts.

    `headers` are those of the joined client.

    Raises:
        Unauthorized: the facts are not signed or are another client's, or a file has another hash than the signed one.
        NotFound: the job has no checkpoint.
    """
    public = connection.call("GET", "/api/v1/client/key").json()["public_key"]
    found = connection.call("GET", _ADDRESS, headers=headers).json()
    facts = verified_model(str(found.get("model")), str(found.get("signature")), public, token.fingerprint)
    job, number, _ = headers["Rayps-Client"].split(":")
    for key, mine in {"kind": "model", "job": job, "client": int(number)}.items():
        if facts.get(key) != mine:
            raise _refusal(f"their {key} is {facts.get(key)!r}, but that of this client is {mine!r}")
    tensors: RawTensors = {}
    for name, expected in facts["files"].items():
        raw = connection.download(f"{_ADDRESS}/{facts['step']}/{name}", headers)
        if hashlib.sha256(raw).hexdigest() != expected["sha256"]:
            raise _refusal(f"{name} does not have the SHA-256 hash that the service has signed")
        tensors |= decode_tensors(raw)
    part = folder / f".global-{secrets.token_hex(4)}"
    with part.open("wb") as file:
        file.write(encode_tensors(tensors, {"facts": json.dumps(facts)}))
        file.flush()
        os.fsync(file.fileno())
    part.replace(folder / GLOBAL_FILE)
    return facts


def read_global(folder: Path) -> tuple[ModelFacts, RawTensors]:
    """Return the facts and the tensors in a client's folder, under their names such as "model/0.weight".

    Raises ConfigError if there is no such file.
    """
    path = folder / GLOBAL_FILE
    if not path.is_file():
        raise ConfigError(
            f"{path} is not there: a client fetches the job's parameters when the job ends; to fetch the newest ones "
            "now, add --fetch\nwith --url and --token, or check --state, --job and --name",
            field="state",
        )
    raw = path.read_bytes()
    facts: ModelFacts = json.loads(metadata_of(raw)["facts"])
    return facts, decode_tensors(raw)


def _refusal(why: str) -> Unauthorized:
    return Unauthorized(f"this client refused the job's parameters, and does not use them: {why}", code="refused")
