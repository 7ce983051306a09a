"""Where the user's own code is called: whatever it raises becomes an error that names the method and the line."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rayps.errors import RaypsError, WorkloadError

_PACKAGE = str(Path(__file__).parent)


@contextmanager
def user_code(method: str) -> Iterator[None]:
    """Turn an exception of the user's `method` into a WorkloadError; our own errors pass."""
    try:
        yield
    except RaypsError:
        raise
    except Exception as error:  # the user's code: whatever it raises is the reason
        frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_PACKAGE)]
        own = [f for f in frames if "/site-packages/" not in f.filename] or frames
        where = f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
        said = (str(error).strip().splitlines() or [""])[0]
        raise WorkloadError(
            f"{method}() raised {type(error).__name__}: {said}{where}", traceback=traceback.format_exc()
        ) from error
