"""`compile`: the model is compiled in place, and computes what plain torch computes."""

import shutil

import pytest
import torch
from folders import FOLDERS
from rayps_client.errors import ConfigError, WorkloadError
from small_work import Small, distance, plain, train
from torch import nn

import rayps
from rayps import AllReduce, FedAvg, LocalSGD, ParameterServer
from rayps.workload.compile_model import compile_model
from rayps.workload.model_part import WeightCheck

CLOSE = 1e-9


class Compiled(Small):
    def __init__(self, compile="eager", accumulate=1, **options):
        super().__init__(**options)
        self.compile, self.accumulate = compile, accumulate


@pytest.mark.parametrize("strategy", [AllReduce(), ParameterServer(), LocalSGD(warmup=1000)], ids=str)
def test_a_compiled_model_keeps_names_and_results(strategy):
    work = Compiled()
    result = train(work, strategy, workers=2, epochs=2)
    assert distance(result.model(), plain(work, 2, epochs=2)[0]) < CLOSE
    assert list(result.model().state_dict()) == list(Small().model().state_dict())


def test_a_compiled_model_is_called_as_such():
    """The backend sees the graph of the model's call."""
    graphs = []

    def counting(graph, example):
        graphs.append(graph)
        return graph.forward

    model = Small().model()
    names = [name for name, _ in model.named_parameters()]
    compile_model(model, {"backend": counting}, "cpu")
    x = torch.randn(3, 5, dtype=torch.float64)
    assert torch.equal(model(x), Small().model().__class__(*model)(x))
    assert len(graphs) == 1
    assert [name for name, _ in model.named_parameters()] == names


def test_every_model_of_a_process_is_compiled():
    """torch compiles one function at most `recompile_limit` (8) times; each model has a function of its own."""
    x = torch.randn(3, 5, dtype=torch.float64)
    for number in range(torch._dynamo.config.recompile_limit + 2):
        graphs = []

        def counting(graph, example, graphs=graphs):
            graphs.append(graph)
            return graph.forward

        model = Small().model()
        compile_model(model, {"backend": counting}, "cpu")
        model(x)
        assert len(graphs) == 1, f"model {number} of this process ran without being compiled"


def _as_a_whole(model, options):
    compile_model(model, options, "cpu")
    return model


class _Layer(nn.Linear):
    def forward(self, x):
        return super().forward(x)


def _by_layer(model, options):
    model[0] = _Layer(5, 7).double()  # torch does not compile the call of a layer of its own
    model[0].compile(**options)
    return model


def _in_a_wrapper(model, options):
    return torch.compile(model, **options)


def _in_the_class(model, options):
    class Compiled(nn.Sequential):
        @torch.compile(**options)
        def forward(self, x):
            return super().forward(x)

    return Compiled(*model)


@pytest.mark.parametrize("compiled", [_as_a_whole, _by_layer, _in_a_wrapper, _in_the_class])
def test_the_check_of_a_weight_compiles_nothing_and_stops_no_other_model(compiled):
    """Workers may be threads of one process, in which another one's model runs compiled meanwhile."""
    graphs = []

    def counting(name):
        def backend(graph, example):
            graphs.append(name)
            return graph.forward

        return {"backend": backend}

    work = Small(n=6)
    (batch, *_) = work.data().batches(rank=0, size=1, seed=0, epoch=0)
    other = _as_a_whole(Small().model(), counting("other"))
    own = compiled(Small().model(), counting("own"))

    def loss(model, batch):
        other(batch.x)
        return ((model(batch.x) - batch.y) ** 2).sum(), batch.size

    work.loss = loss
    WeightCheck(work, own).of(batch)
    assert graphs and "own" not in graphs
    own(batch.x)
    assert graphs.count("own") == 1
    if compiled is _in_the_class:
        assert "forward" not in vars(own), "a method of the class is no attribute of the object"


@pytest.mark.skipif(shutil.which("g++") is None, reason="the default backend needs g++")
def test_the_default_backend():
    work = Compiled(compile=True, n=6, accumulate=2)
    result = train(work, AllReduce(), workers=1, timeout=300)
    torch.manual_seed(0)
    model = work.model()
    optimizer = work.optimizer(list(model.parameters()))
    (a, b) = work.data().batches(rank=0, size=1, seed=0, epoch=0)
    ((work.loss(model, a) + work.loss(model, b)) / 2).backward()
    optimizer.step()
    assert distance(result.model(), model) < CLOSE


def test_without_a_compiler_the_error_names_the_field(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(
        WorkloadError, match=r"compile is True, but this worker has no C\+\+ compiler 'no-such-compiler'"
    ):
        train(Compiled(True), AllReduce())


@pytest.mark.parametrize("value", [None, 1, "", {1: 2}])
def test_compile_is_checked(value):
    with pytest.raises(ConfigError, match="give True, False, the name of a backend"):
        train(Compiled(value))


@pytest.mark.parametrize("value", ["eager", {"backend": "eager", "dynamic": True}])
def test_compile_is_a_parameter(tmp_path, value):
    text = f"import sys; sys.path[:0] = {FOLDERS!r}\nfrom small_work import Small\n"
    (tmp_path / "mine.py").write_text(text + "class Mine(Small):\n    compile = {'backend': 'eager'}\n")
    target = f"{tmp_path / 'mine.py'}:Mine"
    found = train(target, workers=2, params={"compile": value})
    [event] = [event for event in found.events if event["kind"] == "parameters"]
    assert found.params["compile"] == event["params"]["compile"] == value
    assert "compile = " in event["message"]
    assert distance(found.model(), train(target, workers=2, params={"compile": False}).model()) < CLOSE
    assert train(target).params["compile"] == {"backend": "eager"}
    with pytest.raises(ConfigError, match=r"params.compile is 1 .*give true or false or text or a mapping"):
        train(target, params={"compile": 1})


def test_what_is_refused_says_what_to_do():
    with pytest.raises(ConfigError, match=r"layer\.compile\(\)"):
        train(Compiled(), AllReduce(replica=rayps.Pipeline(stages=2, micro_batches=2)), workers=2)


def test_clients_train_the_compiled_model():
    class Fed(Compiled):
        def data(self):
            return super().data().with_clients(rayps.data.iid(3))

    compiled = train(Fed(), FedAvg(fraction=1.0))
    assert distance(compiled.model(), train(Fed(False), FedAvg(fraction=1.0)).model()) < CLOSE
