"""Read the same columns from other files, because clients of one workload may have different files."""

from __future__ import annotations

from rayps_client.errors import DataError

from rayps.data.base import Data
from rayps.data.reader import ParquetData


def with_other_files(data: Data, path: str) -> Data:
    """Return data with the same columns and options as `data`, read from another Parquet file or folder.

    Raises:
        DataError: `data` is not read from Parquet files.
    """
    if not isinstance(data, ParquetData):
        raise DataError(
            f"the rows cannot be read from {path!r}, because the workload's data() is not Parquet: let data() itself "
            "read this client's\nrows and omit --data, or let data() return rayps.data.parquet(...)"
        )
    return data.with_paths([path])
