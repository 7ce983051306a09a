"""The order in which a client's rows are used, which `rayps_client.row_order` defines for real clients as well."""

from rayps_client.row_order import Ints, parts

__all__ = ["Ints", "parts"]
