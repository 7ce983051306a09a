"""Load modules without the garbage collector; defined in `rayps_client.loading`."""

from rayps_client.loading import without_collection

__all__ = ["without_collection"]
