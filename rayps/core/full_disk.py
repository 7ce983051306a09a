"""Tell whether an error reports that a disk takes no more data. Pure."""

from __future__ import annotations

import errno
import re

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}  # no space, an exceeded quota, a file at the process's limit
_RUST = re.compile(r"\(os error (\d+)\)")  # how the writer of safetensors reports an error of the system


def reports_full_disk(error: BaseException) -> bool:
    """Return whether this error, not one of its causes, reports a full disk or an exceeded quota."""
    if isinstance(error, OSError):
        return error.errno in _FULL
    found = _RUST.search(str(error)) if type(error).__name__ == "SafetensorError" else None
    return found is not None and int(found[1]) in _FULL
