"""Data sets of files, tables, arrays, images, text or a torch Dataset, and rules that divide rows into clients.

Example:
    rows = rayps.data.tensors(torch.randn(20, 3), torch.randn(20, 1), batch_size=5, client=rayps.data.iid(4))
    rows.rows(), rows.clients.count  # 20, 4
"""

from rayps.data.arrow_tables import arrow, pandas, polars
from rayps.data.base import Batch, Data
from rayps.data.clients import Clients
from rayps.data.hugging_face import huggingface
from rayps.data.image_folder import images
from rayps.data.iterable import iterable
from rayps.data.mapped_arrays import memmap
from rayps.data.memory import dataset, tensors
from rayps.data.partition_rules import PartitionRule, by_quantity, dirichlet, iid, rule, shards
from rayps.data.ray_blocks import ray
from rayps.data.reader import parquet
from rayps.data.shard import DataShard, shard
from rayps.data.text_tables import csv, json_lines
from rayps.data.text_windows import text

Rule = PartitionRule  # the public name of the class

__all__ = [
    "Batch",
    "Clients",
    "Data",
    "DataShard",
    "PartitionRule",
    "Rule",
    "arrow",
    "by_quantity",
    "csv",
    "dataset",
    "dirichlet",
    "huggingface",
    "iid",
    "images",
    "iterable",
    "json_lines",
    "memmap",
    "pandas",
    "parquet",
    "polars",
    "ray",
    "rule",
    "shard",
    "shards",
    "tensors",
    "text",
]
