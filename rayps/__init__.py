"""rayps: distributed training on Ray in which how the workers learn together is one argument.

    import rayps, torch

    class Digits(rayps.Workload): ...                       # a model, a loss, data
    result = rayps.train(Digits(), strategy=rayps.AllReduce(), workers=4, epochs=3)
    result = rayps.train(Digits(), strategy=rayps.ParameterServer(shards=2, staleness=3), workers=4, epochs=3)

Names are loaded when they are first used, so that a client of a job service needs neither torch nor ray.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rayps_client.machine.loading import without_collection

__version__ = "0.1.0"

_HOMES = {
    "ADMM": "rayps.strategies.admm",
    "AllReduce": "rayps.strategies.all_reduce",
    "BestCheckpoint": "rayps.runtime.results.best_checkpoint",
    "Callback": "rayps.workload.callback",
    "Client": "rayps.service.client",
    "DiLoCo": "rayps.strategies.diloco",
    "Ditto": "rayps.strategies.ditto",
    "Downpour": "rayps.strategies.downpour",
    "EMA": "rayps.tensors.weight_average",
    "EarlyStopping": "rayps.runtime.results.early_stopping",
    "Embedding": "rayps.ps.tables.embedding",
    "EmbeddingBag": "rayps.ps.tables.embedding",
    "FedAdagrad": "rayps.strategies.fedopt",
    "FedAdam": "rayps.strategies.fedopt",
    "FedAvg": "rayps.strategies.fedavg",
    "FedAvgM": "rayps.strategies.fedopt",
    "FedBuff": "rayps.strategies.fedbuff",
    "FedPer": "rayps.strategies.fedper",
    "FedProx": "rayps.strategies.fedprox",
    "FedRep": "rayps.strategies.fedrep",
    "FedYogi": "rayps.strategies.fedopt",
    "Hogwild": "rayps.strategies.hogwild",
    "Hybrid": "rayps.strategies.hybrid",
    "LocalSGD": "rayps.strategies.local_sgd",
    "Max": "rayps.workload.metric_values",
    "Mean": "rayps.workload.metric_values",
    "Min": "rayps.workload.metric_values",
    "ParallelSGD": "rayps.strategies.parallel_sgd",
    "ParameterServer": "rayps.strategies.parameter_server",
    "Pipeline": "rayps.core.strategy.replica",
    "RaypsError": "rayps_client.errors",
    "Result": "rayps.runtime.training",
    "Ring": "rayps.comm.ring",
    "SWA": "rayps.tensors.weight_average",
    "Scaffold": "rayps.strategies.scaffold",
    "ServerGroup": "rayps.ps.server_group",
    "Statistics": "rayps.strategies.statistics",
    "StatisticsWorkload": "rayps.workload.statistics_workload",
    "Strategy": "rayps.strategies.base",
    "Sum": "rayps.workload.metric_values",
    "TensorParallel": "rayps.core.strategy.replica",
    "Workload": "rayps.workload.base",
    "batches": "rayps.runtime.own_loop.batches",
    "data": "rayps.data",
    "dp": "rayps.privacy.options",
    "hash_ids": "rayps.ps.tables.ids",
    "load_state": "rayps.runtime.results.saved_model",
    "loggers": "rayps.loggers",
    "log": "rayps.runtime.own_loop.world",
    "mean": "rayps.runtime.own_loop.means",
    "params": "rayps.runtime.own_loop.world",
    "restore": "rayps.runtime.own_loop.world",
    "run": "rayps.runtime.own_loop.run",
    "save": "rayps.runtime.own_loop.world",
    "statistics": "rayps.runtime.statistics",
    "stats": "rayps_client.stats",
    "train": "rayps.runtime.training",
    "world": "rayps.runtime.own_loop.world",
    "wrap": "rayps.runtime.own_loop.wrap",
}

__all__ = sorted([*_HOMES, "__version__"])

if TYPE_CHECKING:
    from rayps_client import stats as stats
    from rayps_client.errors import RaypsError as RaypsError

    from rayps import data as data
    from rayps import loggers as loggers
    from rayps.comm.ring import Ring as Ring
    from rayps.core.strategy.replica import Pipeline as Pipeline
    from rayps.core.strategy.replica import TensorParallel as TensorParallel
    from rayps.privacy.options import dp as dp
    from rayps.ps.server_group import ServerGroup as ServerGroup
    from rayps.ps.tables.embedding import Embedding as Embedding
    from rayps.ps.tables.embedding import EmbeddingBag as EmbeddingBag
    from rayps.ps.tables.ids import hash_ids as hash_ids
    from rayps.runtime.own_loop.batches import batches as batches
    from rayps.runtime.own_loop.means import mean as mean
    from rayps.runtime.own_loop.run import run as run
    from rayps.runtime.own_loop.world import log as log
    from rayps.runtime.own_loop.world import params as params
    from rayps.runtime.own_loop.world import restore as restore
    from rayps.runtime.own_loop.world import save as save
    from rayps.runtime.own_loop.world import world as world
    from rayps.runtime.own_loop.wrap import wrap as wrap
    from rayps.runtime.results.best_checkpoint import BestCheckpoint as BestCheckpoint
    from rayps.runtime.results.early_stopping import EarlyStopping as EarlyStopping
    from rayps.runtime.results.saved_model import load_state as load_state
    from rayps.runtime.statistics import statistics as statistics
    from rayps.runtime.training import Result as Result
    from rayps.runtime.training import train as train
    from rayps.service.client import Client as Client
    from rayps.strategies.admm import ADMM as ADMM
    from rayps.strategies.all_reduce import AllReduce as AllReduce
    from rayps.strategies.base import Strategy as Strategy
    from rayps.strategies.diloco import DiLoCo as DiLoCo
    from rayps.strategies.ditto import Ditto as Ditto
    from rayps.strategies.downpour import Downpour as Downpour
    from rayps.strategies.fedavg import FedAvg as FedAvg
    from rayps.strategies.fedbuff import FedBuff as FedBuff
    from rayps.strategies.fedopt import FedAdagrad as FedAdagrad
    from rayps.strategies.fedopt import FedAdam as FedAdam
    from rayps.strategies.fedopt import FedAvgM as FedAvgM
    from rayps.strategies.fedopt import FedYogi as FedYogi
    from rayps.strategies.fedper import FedPer as FedPer
    from rayps.strategies.fedprox import FedProx as FedProx
    from rayps.strategies.fedrep import FedRep as FedRep
    from rayps.strategies.hogwild import Hogwild as Hogwild
    from rayps.strategies.hybrid import Hybrid as Hybrid
    from rayps.strategies.local_sgd import LocalSGD as LocalSGD
    from rayps.strategies.parallel_sgd import ParallelSGD as ParallelSGD
    from rayps.strategies.parameter_server import ParameterServer as ParameterServer
    from rayps.strategies.scaffold import Scaffold as Scaffold
    from rayps.strategies.statistics import Statistics as Statistics
    from rayps.tensors.weight_average import EMA as EMA
    from rayps.tensors.weight_average import SWA as SWA
    from rayps.workload.base import Workload as Workload
    from rayps.workload.callback import Callback as Callback
    from rayps.workload.metric_values import Max as Max
    from rayps.workload.metric_values import Mean as Mean
    from rayps.workload.metric_values import Min as Min
    from rayps.workload.metric_values import Sum as Sum
    from rayps.workload.statistics_workload import StatisticsWorkload as StatisticsWorkload


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'rayps' has no attribute {name!r}")
    with without_collection():
        home = importlib.import_module(_HOMES[name])
    found = home if name in ("data", "loggers", "stats") else getattr(home, name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return __all__
