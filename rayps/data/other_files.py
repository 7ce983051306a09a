"""Read the same columns from other files, so that one workload serves clients with different files."""

from __future__ import annotations

import copy

from rayps.core.errors import DataError
from rayps.data.base import Data
from rayps.data.files import Files
from rayps.data.reader import ParquetData


def elsewhere(data: Data, path: str) -> Data:
    """Return Parquet data with the same columns and options, read from another file or folder.

    Raises:
        DataError: `data` does not consist of Parquet files.
    """
    if not isinstance(data, ParquetData):
        raise DataError(
            f"the rows cannot be read from {path!r}, because the workload's data() is not Parquet: let data() itself "
            "read this client's\nrows and omit --data, or let data() return rayps.data.parquet(...)"
        )
    other = copy.copy(data)
    other._files = Files(path)
    return other.with_clients(None)
