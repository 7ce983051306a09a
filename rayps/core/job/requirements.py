"""The lines of a requirements file that a job may have. Pure, except for reading a file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from rayps_client.errors import ConfigError

MOST_LINES = 2000
LONGEST_LINE = 2000
_FILES = ("-r", "--requirement", "-c", "--constraint", "-e", "--editable")
_LOCKS = re.compile(
    r"(uv|poetry|pdm|pixi|Pipfile)\.lock|pylock(\..+)?\.toml|pyproject\.toml|Pipfile|environment\.ya?ml"
)
_EXPORT = (
    "export its packages as lines for pip: `uv export --format requirements-txt`, `pdm export -f requirements` or "
    "`poetry export -f requirements.txt`, with `-o requirements.txt`"
)
_TOML = re.compile(r"\[|[\w.-]+\s*=\s")  # the beginning of a table or of an assignment
_SECRET = re.compile(r"[a-z+]+://[^/\s@]*:[^/\s@]+@", re.IGNORECASE)


def explain_refusal(line: str) -> str | None:
    """Return why a line of a requirements file is refused, and what to give instead, or None if it is accepted."""
    if len(line) > LONGEST_LINE or not line.isprintable() or not line.strip():
        return f"a line has printable text of at most {LONGEST_LINE} characters"
    if _TOML.match(line.strip()):
        return f"it is TOML, not a line for pip; if it is of a lock file, {_EXPORT}"
    word = re.split(r"[\s=]", line.strip(), maxsplit=1)[0]
    if word in _FILES or any(word.startswith(name) and not word.startswith("--") for name in _FILES if len(name) == 2):
        return "it refers to another file: give the lines of that file, or a package"
    if _SECRET.search(line):
        return (
            "it has a password, which the job's record would show: set PIP_INDEX_URL or a netrc file on the cluster's "
            "hosts"
        )
    return None


def read_requirements(given: str | Path | Sequence[str]) -> list[str]:
    """Return the lines of a requirements file, or a list of requirements, without comments and empty lines.

    A line that ends with a backslash continues on the next line, as in lock files with hashes.

    Raises:
        ConfigError: the file cannot be read, is a lock file of another form, or has too many lines.

    Example:
        read_requirements(["einops==0.8.1"])
    """
    lines: Sequence[str] = [] if isinstance(given, (str, Path)) else given
    if isinstance(given, (str, Path)):
        path = Path(given).expanduser()
        if _LOCKS.fullmatch(path.name):
            raise ConfigError(f"requirements: {path} is no requirements file:\n{_EXPORT}", field="requirements")
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"requirements: {path} cannot be read as text: {error}", field="requirements") from error
    joined = "\n".join(lines).replace("\\\n", " ")
    found = [re.sub(r"(^|\s)#.*$", "", line).strip() for line in joined.splitlines()]
    found = [re.sub(r"\s+", " ", line) for line in found if line]
    if len(found) > MOST_LINES:
        raise ConfigError(
            f"requirements has {len(found)} lines, and the limit is {MOST_LINES}: give the job's own packages",
            field="requirements",
        )
    return found
