"""Arrow columns as numpy rows, and the checks of columns and values; defined in `rayps_client.columns`."""

from rayps_client.columns import Array, BadValue, ColumnLayout, ColumnRows, DType, layout_of, missing

__all__ = ["Array", "BadValue", "ColumnLayout", "ColumnRows", "DType", "layout_of", "missing"]
