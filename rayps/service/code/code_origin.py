"""Where a job's code comes from: the Git commit of its folder, and what differs from the commit."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Collection
from pathlib import Path
from typing import TypedDict

from rayps.service.code.code_files import is_ignored

MOST_DIFF = 100_000  # characters of a diff that are recorded
_GIT_SECONDS = 10.0
_MOST_PATHS = 1000  # changed files in a diff


class CodeOrigin(TypedDict, total=False):
    """What was packed, and the Git commit of the folder if it is in a repository."""

    files: int
    bytes: int
    folder: str  # the folder on the machine that packed it
    commit: str | None
    branch: str | None
    dirty: bool
    untracked: int  # number of packed files that Git does not track
    diff: str
    diff_cut: bool  # whether the diff was longer


def origin_of(folder: Path, paths: Collection[str], size: int) -> CodeOrigin:
    """Return the origin of the packed files `paths` of `folder`, with the difference to its Git commit.

    The diff contains packed files, and the names of deleted ones, only: no ignored file and no secret. If Git is
    missing, fails or does not answer within 10 s, the origin has no commit.
    """
    found = CodeOrigin(files=len(paths), bytes=size, folder=str(folder))
    commit = _run_git(folder, "rev-parse", "--verify", "HEAD")
    if commit is None:
        return found
    changed = _split_names(
        _run_git(folder, "diff", "HEAD", "--name-only", "--relative", "--no-renames", "-z", "--", ".")
    )
    untracked = _split_names(_run_git(folder, "ls-files", "--others", "--exclude-standard", "-z", "--", "."))
    new = [path for path in untracked if path in paths]
    shown = [path for path in changed if path in paths or _is_deleted(folder, path)][:_MOST_PATHS]
    # --irreversible-delete: what a deleted file contained, which may be a key, is not in the diff
    options = ("--no-color", "--no-ext-diff", "--no-textconv", "--relative", "--no-renames", "--irreversible-delete")
    diff = (_run_git(folder, "--literal-pathspecs", "diff", "HEAD", *options, "--", *shown) or "") if shown else ""
    at = CodeOrigin(
        commit=commit.strip(),
        branch=(_run_git(folder, "symbolic-ref", "--short", "-q", "HEAD") or "").strip() or None,
        dirty=bool(shown or new),
        untracked=len(new),
        diff=diff[:MOST_DIFF],
        diff_cut=len(diff) > MOST_DIFF or len(shown) == _MOST_PATHS,
    )
    return {**found, **at}


def _is_deleted(folder: Path, path: str) -> bool:
    return not os.path.lexists(folder / path) and not is_ignored(folder, path)


def _split_names(text: str | None) -> list[str]:
    return [name for name in (text or "").split("\0") if name]


def _run_git(folder: Path, *arguments: str) -> str | None:
    """Return the output of a Git command that changes nothing, or None if it failed."""
    command = ["git", "-c", "core.fsmonitor=false", "-c", "core.quotepath=false", *arguments]
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            capture_output=True,
            check=False,
            timeout=_GIT_SECONDS,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_PAGER": "cat"},
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode(errors="replace") if done.returncode == 0 else None
