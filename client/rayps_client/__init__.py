"""The light client of rayps: takes part in federated jobs with data that stays on this machine. No Ray, no FastAPI.

`rayps` depends on this package at the same version. Nothing here imports `rayps`, and torch is imported only by the
modules that train torch models.
"""

__version__ = "0.1.0"
