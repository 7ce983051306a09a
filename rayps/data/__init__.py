"""Data sets of files, tables, arrays, images, text or a torch Dataset, and rules that divide rows into clients.

Example:
    rows = rayps.data.tensors(torch.randn(20, 3), torch.randn(20, 1), batch_size=5, client=rayps.data.iid(4))
    rows.rows(), rows.clients.count  # 20, 4

A module is loaded at the first use of one of its names: a process that reads tensors does not load Arrow.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOMES = {  # public name: the module where it is found
    "Batch": "rayps.data.base",
    "Clients": "rayps.data.clients",
    "Data": "rayps.data.base",
    "DataShard": "rayps.data.data_shard",
    "PartitionRule": "rayps.data.partition_rules",
    "Rule": "rayps.data.partition_rules",
    "arrow": "rayps.data.tabular.arrow_tables",
    "by_quantity": "rayps.data.partition_rules",
    "csv": "rayps.data.texts.text_tables",
    "dataset": "rayps.data.memory",
    "dirichlet": "rayps.data.partition_rules",
    "huggingface": "rayps.data.tabular.hugging_face",
    "iid": "rayps.data.partition_rules",
    "images": "rayps.data.image_folder",
    "iterable": "rayps.data.iterable_data",
    "json_lines": "rayps.data.texts.text_tables",
    "memmap": "rayps.data.mapped_arrays",
    "pandas": "rayps.data.tabular.arrow_tables",
    "parquet": "rayps.data.reader",
    "polars": "rayps.data.tabular.arrow_tables",
    "ray": "rayps.data.ray_blocks",
    "rule": "rayps.data.partition_rules",
    "shard": "rayps.data.data_shard",
    "shards": "rayps.data.partition_rules",
    "tensors": "rayps.data.memory",
    "text": "rayps.data.texts.text_windows",
}

__all__ = sorted(_HOMES)

if TYPE_CHECKING:
    from rayps.data.base import Batch as Batch
    from rayps.data.base import Data as Data
    from rayps.data.clients import Clients as Clients
    from rayps.data.data_shard import DataShard as DataShard
    from rayps.data.data_shard import shard as shard
    from rayps.data.image_folder import images as images
    from rayps.data.iterable_data import iterable as iterable
    from rayps.data.mapped_arrays import memmap as memmap
    from rayps.data.memory import dataset as dataset
    from rayps.data.memory import tensors as tensors
    from rayps.data.partition_rules import PartitionRule as PartitionRule
    from rayps.data.partition_rules import Rule as Rule
    from rayps.data.partition_rules import by_quantity as by_quantity
    from rayps.data.partition_rules import dirichlet as dirichlet
    from rayps.data.partition_rules import iid as iid
    from rayps.data.partition_rules import rule as rule
    from rayps.data.partition_rules import shards as shards
    from rayps.data.ray_blocks import ray as ray
    from rayps.data.reader import parquet as parquet
    from rayps.data.tabular.arrow_tables import arrow as arrow
    from rayps.data.tabular.arrow_tables import pandas as pandas
    from rayps.data.tabular.arrow_tables import polars as polars
    from rayps.data.tabular.hugging_face import huggingface as huggingface
    from rayps.data.texts.text_tables import csv as csv
    from rayps.data.texts.text_tables import json_lines as json_lines
    from rayps.data.texts.text_windows import text as text


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'rayps.data' has no attribute {name!r}")
    found = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return __all__
