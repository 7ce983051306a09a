"""The data-use statement of a job: the text of the field `statement`, which real clients accept. No I/O but a file."""

from __future__ import annotations

from pathlib import Path

from rayps_client.errors import ConfigError

from rayps.core.refusals.table import refuse

MOST_STATEMENT_BYTES = 20_000


def check_statement(text: str | None, has_real_clients: bool) -> None:
    """Check the statement of a job. Raises ConfigError if it is empty, too long, or the job has no real clients."""
    if text is None:
        return
    if not isinstance(text, str) or not text.strip() or len(text.encode()) > MOST_STATEMENT_BYTES:
        raise ConfigError(
            f"statement is {text!r:.100}: give a text of at most {MOST_STATEMENT_BYTES} bytes: purpose, legal basis, "
            "data used, retention, contact",
            field="statement",
        )
    if not has_real_clients:
        refuse({"statement": text, "no real clients": True})


def read_statement(path: Path) -> str:
    """Return the text of a statement's file, with its line ends, so that its hash is that of the file.

    Raises:
        ConfigError: the file cannot be read as text, or is too long.
    """
    try:
        raw = path.expanduser().read_bytes()
        text = raw.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"statement: {path} cannot be read as text ({error}): name a file beside the job file", field="statement"
        ) from error
    if len(raw) > MOST_STATEMENT_BYTES:
        raise ConfigError(
            f"statement: {path} has {len(raw)} bytes, and at most {MOST_STATEMENT_BYTES} are allowed", field="statement"
        )
    return text
