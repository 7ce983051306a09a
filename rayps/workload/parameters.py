"""The parameters of a workload: which fields can be set, and to which values; defined in `rayps_client.parameters`."""

from rayps_client.parameters import REQUIRED, Parameter, checked, create, declared, differing, effective, shown

__all__ = ["REQUIRED", "Parameter", "checked", "create", "declared", "differing", "effective", "shown"]
