"""How much memory there is, and can still be allocated: of the machine, and of the memory cgroup of a container."""

from __future__ import annotations

from pathlib import Path

# for cgroup version 2, and for version 1: the folder, the files of limit and use, and in memory.stat the name of the
# cached files, which the use includes and which the system drops when memory is needed
_CGROUPS = (
    ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def read_available_bytes(root: Path = Path("/")) -> int | None:
    """Return the bytes that can still be allocated, or None if the system does not report it."""
    found = [_of_machine(root, "MemAvailable:")]
    for folder, most, used, cached in _CGROUPS:
        limit, taken = _read_number(root / folder / most), _read_number(root / folder / used)
        if limit is not None and taken is not None:
            found.append(max(0, limit - taken + _read_entry(root / folder / "memory.stat", cached)))
    return min((each for each in found if each is not None), default=None)


def read_total_bytes(root: Path = Path("/")) -> int | None:
    """Return the bytes of memory, or None if the system does not report it."""
    limits = [_read_number(root / folder / most) for folder, most, _, _ in _CGROUPS]
    return min((each for each in (_of_machine(root, "MemTotal:"), *limits) if each is not None), default=None)


def _of_machine(root: Path, entry: str) -> int | None:
    try:
        lines = (root / "proc/meminfo").read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(entry)), None)


def _read_entry(path: Path, name: str) -> int:
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        return 0
    return next((int(line.split()[1]) for line in lines if line.split()[:1] == [name]), 0)


def _read_number(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return int(text) if text.isdecimal() else None
