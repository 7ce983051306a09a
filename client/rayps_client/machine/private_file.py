"""Write files that only their owner can read, and read a secret from such a file."""

from __future__ import annotations

import os
from pathlib import Path

from rayps_client.errors import ConfigError


def read_token(text: str, source: str) -> str:
    """Return a token that was given as `text`: the text itself, or what the file after an @ contains.

    Raises ConfigError if the file cannot be read or holds no token; the error names `source` and the file.
    """
    if not text.startswith("@"):
        return text
    try:
        found = Path(text[1:]).expanduser().read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "it is not text"
        raise ConfigError(f"{source}: the token's file {text[1:]} cannot be read: {why}", field="token") from error
    if not found or any(letter.isspace() for letter in found):
        raise ConfigError(f"{source}: the file {text[1:]} should hold a token and nothing else", field="token")
    return found


def private_write(path: Path, text: str) -> None:
    """Write a file atomically, readable by its owner only."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    part.replace(path)
