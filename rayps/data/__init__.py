"""Where rows come from: Parquet, tensors, or a torch Dataset. The work is in the `data_*` modules."""

from rayps.data.base import Batch, Data
from rayps.data.memory import dataset, tensors
from rayps.data.reader import parquet

__all__ = ["Batch", "Data", "dataset", "parquet", "tensors"]
