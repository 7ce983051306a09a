"""Which files of a working directory hold a secret: by their names, and by what is in them. They are never sent.

A private key is found by its suffix or by its PEM header. Of rayps itself these are found: a token, as `rayps token
create` and the service write it; the key of a client (`identity.json`); and the folder of a client, which also has the
states that must not leave its machine.
"""

from __future__ import annotations

import fnmatch
import json
import re
from pathlib import Path

# names that are never code, in any case of letters; no pattern of an ignore file can add them
_NAMES = {
    "a file of passwords": (".env", ".env.*", "*.env", ".envrc", ".netrc", ".pypirc", ".git-credentials"),
    "a private folder": (".ssh", ".aws", ".rayps"),
    "a private key": ("*.key", "*.p12", "*.pfx", "*.ppk"),
}
_KEY_HEADER = re.compile(rb"^-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY-----", re.MULTILINE)
_PEM_BEGINS = (b"-----BEGIN ", b"Bag Attributes")
_PEM_NAMES = (".pem", ".crt", ".cer", ".cert")
_TOKEN = r"(?:rps_[\w-]{20,}|rpc\.[\w-]+\.[\w-]{20,}\.[\w-]{20,}(?:\.[\w-]+)?)"  # of a user, and of a client
_TOKEN_LINE = re.compile(rf"(?:(?:export\s+)?\w+\s*=\s*)?[\"']?{_TOKEN}[\"']?")  # alone, or NAME=TOKEN
_MOST_TOKENS = 64_000  # bytes of a file with tokens
_IDENTITY = "identity.json"


def find_secret_name(path: str) -> str | None:
    """Return what secret a path holds by the name of it or of a folder above it, such as .env; None: no such name."""
    for part in path.lower().split("/"):
        for what, patterns in _NAMES.items():
            if any(fnmatch.fnmatchcase(part, pattern) for pattern in patterns):
                return what
    return None


def find_secret_content(path: str, content: bytes) -> str | None:
    """Return what secret a file holds by its content; None: none that is known."""
    start = content.removeprefix(b"\xef\xbb\xbf").lstrip()
    if (start.startswith(_PEM_BEGINS) or path.lower().endswith(_PEM_NAMES)) and _KEY_HEADER.search(start):
        return "a private key"
    if len(content) > _MOST_TOKENS:
        return None
    if path.rpartition("/")[2] == _IDENTITY and _is_identity(content):
        return "the key of a client of rayps"
    return "a token of rayps" if _has_tokens(content) else None


def find_secret_folder(folder: Path) -> str | None:
    """Return what secret a folder holds that is not sent as a whole; None: none that is known."""
    try:
        own = (folder / "lock").is_file() and _is_identity((folder / _IDENTITY).read_bytes()[:_MOST_TOKENS])
    except OSError:
        return None
    return "the folder of a client of rayps" if own else None


def _is_identity(content: bytes) -> bool:
    found = _parse_json(content)
    return isinstance(found, dict) and found.keys() == {"key"} and isinstance(found["key"], str)


def _has_tokens(content: bytes) -> bool:
    """Return whether a file consists of tokens, one a line, or is the JSON of a token."""
    try:
        text = content.decode().strip()
    except UnicodeDecodeError:
        return False
    if text.startswith("{"):
        found = _parse_json(content)
        token = found.get("token") if isinstance(found, dict) else None
        return isinstance(token, str) and re.fullmatch(_TOKEN, token) is not None
    lines = [line.strip() for line in text.splitlines()]
    lines = [line for line in lines if line and not line.startswith("#")]
    return bool(lines) and all(_TOKEN_LINE.fullmatch(line) for line in lines)


def _parse_json(content: bytes) -> object:
    try:
        return json.loads(content)
    except ValueError:
        return None
