"""Arrow columns as numpy rows, and the checks of columns and values; defined in `rayps_client.columns`."""

from rayps_client.columns import (
    NOT_EXACT,
    WRITTEN_WHOLE,
    Array,
    BadValue,
    ColumnLayout,
    ColumnRows,
    DType,
    first_changed,
    layout_of,
    missing,
    way_out_for,
)

__all__ = [
    "NOT_EXACT",
    "WRITTEN_WHOLE",
    "Array",
    "BadValue",
    "ColumnLayout",
    "ColumnRows",
    "DType",
    "first_changed",
    "layout_of",
    "missing",
    "way_out_for",
]
