"""Where sparse tables are refused or tried before a run, and what the errors name."""

import pytest
import torch
from rayps_client.errors import ConfigError, WorkloadError
from small_work import Small, train
from test_device_shards import SHARED
from test_loop import run
from test_ps_job_tables import Tally
from test_training_places import RUN
from test_trial import drive
from torch import nn

import rayps
from rayps import ParameterServer
from rayps.cluster.local import LocalCluster
from rayps.worker.loops.divisible_parameters import check_divisible
from rayps.workload.checkpoint_activations import checkpoint_activations


def test_a_model_with_sparse_tables_is_refused():
    def train_fn():
        model = torch.nn.Sequential(rayps.Embedding(2, "users"), torch.nn.Linear(2, 1))
        rayps.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), "parameter_server")

    with pytest.raises(ConfigError, match=r"rayps\.train"):
        run(train_fn, workers=2)


def test_tables_are_refused():
    class Films(Small):
        def model(self):
            return nn.ModuleDict({"films": rayps.Embedding(5, table="films", dtype="float64"), "out": nn.Linear(5, 1)})

        def loss(self, model, batch):
            return model["out"].double()(model["films"](batch.x[:, 0].abs().long())).square().mean()

        def evaluate(self, model, batch):
            return {}

    with pytest.raises(ConfigError, match="on a server group, with its tables"):
        train(Films(), f"parameter_server:{SHARED}", LocalCluster(gpus=1.0))


def test_sparse_tables_need_a_local_folder():
    with pytest.raises(ConfigError, match="sparse tables, whose rows are saved in local folders only"):
        train(Tally(), ParameterServer(), workers=2, epochs=1, checkpoint=RUN)


def test_sharded_parameters_are_refused():
    with pytest.raises((ConfigError, WorkloadError), match="leave out shard='parameters'"):
        check_divisible(nn.Sequential(rayps.Embedding(4, "users")))


def test_activations_of_tables_are_not_computed_again():
    model = nn.Sequential(nn.Sequential(rayps.Embedding(4, "users")), nn.Sequential(nn.Linear(4, 4)))
    with pytest.raises(ConfigError, match="module '0', which has a sparse table"):
        checkpoint_activations(model, ("0",))
    assert checkpoint_activations(model, ("1",)) == ["1"]


def test_sparse_tables_are_tried_too():
    class Tables(rayps.Workload):
        def model(self):
            return nn.Sequential(rayps.Embedding(4, "users"), nn.Flatten(), nn.Linear(9, 1))

        def data(self):
            return rayps.data.tensors(torch.arange(24).view(12, 2), torch.zeros(12), batch_size=4)

        def loss(self, model, batch):
            return model(batch.x).squeeze(-1).square().mean() if torch.is_grad_enabled() else torch.zeros(())

    outcome, _, cluster = drive(Tables(), "hybrid")
    assert "mat1 and mat2" in outcome.message, outcome.message
    assert cluster.workers == 0
