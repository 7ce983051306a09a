"""Data sets of Parquet files, tensors or a torch Dataset, and rules that divide their rows into clients.

Example:
    rows = rayps.data.tensors(torch.randn(20, 3), torch.randn(20, 1), batch_size=5, client=rayps.data.iid(4))
    rows.rows(), rows.clients.count  # 20, 4
"""

from rayps.data.base import Batch, Data
from rayps.data.clients import Clients
from rayps.data.memory import dataset, tensors
from rayps.data.partition_rules import PartitionRule, by_quantity, dirichlet, iid, rule, shards
from rayps.data.reader import parquet

Rule = PartitionRule  # the public name of the class

__all__ = [
    "Batch",
    "Clients",
    "Data",
    "PartitionRule",
    "Rule",
    "by_quantity",
    "dataset",
    "dirichlet",
    "iid",
    "parquet",
    "rule",
    "shards",
    "tensors",
]
