"""The text form of the name of a workload or of a loop, which `rayps_client.workload_name` defines."""

from rayps_client.workload_name import misnamed, misnamed_function

__all__ = ["misnamed", "misnamed_function"]
