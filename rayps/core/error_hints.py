"""How to mend an error of the user's code; defined in `rayps_client.error_hints`, because the light client needs it."""

from rayps_client.error_hints import hint

__all__ = ["hint"]
