"""Types of values that many modules exchange, and two checks of values; defined in `rayps_client.values`."""

from rayps_client.values import Buffer, Json, JsonObject, Keywords, is_json, is_number

__all__ = ["Buffer", "Json", "JsonObject", "Keywords", "is_json", "is_number"]
