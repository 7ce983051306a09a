"""What a user's code may do, under every strategy and in a wrapped loop: each cell is right, or refused by name."""

from collections import defaultdict
from types import MethodType

import covers
import pytest
import torch
from rayps_client.errors import ConfigError, WorkloadError
from small_work import vector
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from user_code_table import Deed, cells, judge, kind_of

import rayps
from rayps.cluster.local import LocalCluster


class Usual(Deed):
    """Nothing but forward, backward and step."""

    rate = 0.05  # at which the loss falls in every order of downpour's pushes and fetches; at 0.1 in most

    def holds(self, model):
        x, y = self.table()
        assert ((model(x) - y) ** 2).mean() < ((self.model()(x) - y) ** 2).mean()


class Scaled(Usual):
    """torch's recipe for mixed precision, with clipping: scale, unscale, clip, step."""

    forms = ("wrap",)

    def loop(self, model, optimizer, batches):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for batch in batches:
            optimizer.zero_grad()
            scaler.scale(self.loss(model, batch)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 100.0)
            scaler.step(optimizer)
            scaler.update()


class ChangedGradient(Usual):
    """A gradient that is changed without a trace in torch's version counters."""

    forms = ("wrap",)

    def loop(self, model, optimizer, batches):
        for batch in batches:
            optimizer.zero_grad()
            self.loss(model, batch).backward()
            for p in model.parameters():
                p.grad.data.mul_(2.0)
                p.grad.numpy()[...] *= 0.25
            optimizer.step()


class Rows(nn.Module):
    """An embedding with sparse gradients, and a linear layer."""

    def __init__(self):
        super().__init__()
        self.rows = nn.Embedding(9, 5, sparse=True, dtype=torch.float64)
        self.head = nn.Linear(5, 1, dtype=torch.float64)

    def forward(self, x):
        return self.head(torch.tanh(self.rows(x[:, 0].long())))


class SparseGradient(Usual):
    """A part of the model has gradients of sparse layout."""

    divided = False
    private = "head"
    rate = 0.05

    def layers(self):
        return Rows()

    def table(self):
        x, y = super().table()
        return (4 * x[:, :1].abs()).floor().clamp(max=8), y


class SparseSteps(SparseGradient):
    """An optimizer for sparse gradients alone."""

    named = r"SparseAdam"
    way = r"use torch\.optim\.Adam, or rayps\.Embedding"

    def layers(self):
        rows = Rows()
        rows.head.requires_grad_(False)
        return rows

    def optimizer(self, params):
        return torch.optim.SparseAdam(params, lr=self.rate)


class Momentum(Usual):
    """A loop that does something once, after its third step, to a model and an optimizer with state."""

    forms = ("wrap",)

    def optimizer(self, params):
        return torch.optim.SGD(params, lr=self.rate / 2, momentum=0.5)

    def loop(self, model, optimizer, batches):
        for step, batch in enumerate(batches):
            optimizer.zero_grad()
            self.loss(model, batch).backward()
            optimizer.step()
            if step == 2:
                self.change(model, optimizer)

    def change(self, model, optimizer):
        """Do it."""
        raise NotImplementedError


class ConvertedModel(Momentum):
    """The model gets another dtype."""

    way = r"before wrap"

    def loss(self, model, batch):
        dtype = model[0].weight.dtype
        return ((model(batch.x.to(dtype)) - batch.y.to(dtype)) ** 2).mean()

    def change(self, model, optimizer):
        model.float()

    def holds(self, model):
        raise AssertionError("the parameters are in a vector of another dtype")

    compare = holds


class NewData(Momentum):
    """A parameter's data is replaced, as a projection is often written."""

    def change(self, model, optimizer):
        model[0].weight.data = model[0].weight.data.clamp(min=-0.1)


class NewDataOfThree(NewData):
    """The same in a deeper model, whose last layers' gradients arrive while backward still uses the first weight."""

    def layers(self):
        return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 1)).double()

    def change(self, model, optimizer):
        for p in model.parameters():
            p.data = p.data.clamp(min=-0.1)


class NewParameter(Momentum):
    """A parameter of a layer is replaced by another one."""

    named = r"2\.bias"
    way = r"p\.copy_"

    def change(self, model, optimizer):
        model[2].bias = nn.Parameter(model[2].bias.detach().clone())

    holds = ConvertedModel.holds
    compare = holds


class NewLayer(Momentum):
    """A layer is replaced by another one."""

    named = r"2\.weight"
    way = r"before wrap"

    def change(self, model, optimizer):
        model[2] = self.model()[2]

    holds = ConvertedModel.holds
    compare = holds


class NewGroup(Momentum):
    """The optimizer gets the rest of the model's parameters later."""

    way = r"before wrap"

    def optimizer(self, params):
        return torch.optim.SGD(params[:2], lr=self.rate / 2, momentum=0.5)

    def change(self, model, optimizer):
        optimizer.add_param_group({"params": list(model.parameters())[2:], "lr": self.rate / 4})


class ForeignGroup(NewGroup):
    """The optimizer gets a parameter that is not the model's."""

    named = r"weight|shape \(2,\)"
    way = r"before wrap|call wrap after that"

    def change(self, model, optimizer):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})


class LoadedLater(Momentum):
    """The optimizer loads a state in the loop."""

    way = r"before wrap"

    def change(self, model, optimizer):
        state = optimizer.state_dict()
        for number in state["state"]:
            state["state"][number]["momentum_buffer"].zero_()
        state["param_groups"][0]["lr"] = self.rate / 4
        optimizer.load_state_dict(state)


class LoadedBefore(Momentum):
    """The optimizer has a state before the loop; on rank 0 alone, as in a script that loads a file there."""

    def optimizer(self, params):
        made = super().optimizer(params)
        try:
            first = rayps.world().rank == 0
        except ConfigError:  # plain torch
            first = True
        for p in params if first else []:
            made.state[p]["momentum_buffer"] = torch.full_like(p, 0.05)
        if first:
            made.param_groups[0]["lr"] = self.rate / 4
        return made

    def change(self, model, optimizer):
        held = optimizer.state_dict()["state"]
        assert sorted(held) == [0, 1, 2, 3]
        assert all(torch.is_tensor(each["momentum_buffer"]) for each in held.values())


class ClearedState(Momentum):
    """The optimizer's state is dropped."""

    way = r"before wrap"

    def change(self, model, optimizer):
        optimizer.state.clear()


class NewState(ClearedState):
    """The optimizer gets another mapping as its state."""

    def change(self, model, optimizer):
        optimizer.state = defaultdict(dict)


class ZeroState(ClearedState):
    """The momenta are set to zero."""

    def change(self, model, optimizer):
        for state in optimizer.state.values():
            if "momentum_buffer" in state:  # a copy that has taken no step has none
                state["momentum_buffer"].zero_()


class DroppedState(ClearedState):
    """The state of one parameter is dropped."""

    named = r"weight|2\.bias"

    def change(self, model, optimizer):
        if optimizer.state:
            del optimizer.state[model[2].bias]


class ReadState(ClearedState):
    """The state of one parameter is read."""

    named, way = r"'2.bias'", r"state_dict\(\)"

    def change(self, model, optimizer):
        if model[2].bias in optimizer.state:
            assert optimizer.state[model[2].bias]["momentum_buffer"].shape == (1,)


class HalfGradient(Usual):
    """A hook before each step changes the gradient."""

    forms = ("wrap",)
    named, way = r"halve", r"before optimizer\.step\(\)"

    def add(self, optimizer):
        def halve(optimizer, args, kwargs):
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.grad.mul_(0.5)

        optimizer.register_step_pre_hook(halve)

    def optimizer(self, params):
        made = super().optimizer(params)
        self.add(made)
        return made


class HookLater(HalfGradient):
    """The hook is registered after `wrap`."""

    def optimizer(self, params):
        return Usual.optimizer(self, params)

    def loop(self, model, optimizer, batches):
        self.add(optimizer)
        super().loop(model, optimizer, batches)


class HeldByHook(HalfGradient):
    """A hook after each step holds the weights in a range."""

    named, way = r"hold", r"all_reduce"

    def add(self, optimizer):
        def hold(optimizer, args, kwargs):
            with torch.no_grad():
                for group in optimizer.param_groups:
                    for p in group["params"]:
                        p.clamp_(-0.2, 0.2)

        optimizer.register_step_post_hook(hold)

    def holds(self, model):
        assert vector(model).abs().max() < 0.5  # DiLoCo's outer step goes beyond 0.2; drawn: 0.9


class HeldByHookLater(HeldByHook, HookLater):
    """The same, registered after `wrap`."""


class HeldBeforeStep(HookLater):
    """A hook before each step changes the weights and not the gradient."""

    named, way = r"weight|hold", r"all_reduce"

    def add(self, optimizer):
        def hold(optimizer, args, kwargs):
            with torch.no_grad():
                for p in optimizer.param_groups[0]["params"]:
                    p.clamp_(-0.2, 0.2)

        optimizer.register_step_pre_hook(hold)

    def holds(self, model):
        assert vector(model).abs().max() < 0.5


class OwnStep(Usual):
    """The optimizer's `step` is replaced on the object: a step with half the gradient."""

    forms = ("wrap",)
    named, way = r"halved", r"class of your own"

    def optimizer(self, params):
        made = super().optimizer(params)
        step = made.step

        def halved(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    p.grad.mul_(0.5)
            return step(closure)

        made.step = MethodType(halved, made)
        return made


class TwoHalves(Usual):
    """Two optimizers for two halves of one model, which is wrapped with each of them."""

    forms = ("wrap",)
    named, way = r"'0.weight'", r"parameter groups"

    def optimizer(self, params):
        return super().optimizer(params[:2])

    def loop(self, model, optimizer, batches):
        other = torch.optim.Adam(model[2].parameters(), lr=self.rate / 10)
        if self.strategy is not None:  # None: plain torch
            rayps.wrap(model, other, self.strategy, steps=6)
        for batch in batches:
            model.zero_grad()
            self.loss(model, batch).backward()
            optimizer.step()
            other.step()


class StepsByHand(Usual):
    """The loop takes the steps itself, and never calls `optimizer.step`."""

    forms = ("wrap",)
    way = r"call optimizer\.step\(\)"

    def loop(self, model, optimizer, batches):
        for batch in batches:
            optimizer.zero_grad()
            self.loss(model, batch).backward()
            with torch.no_grad():
                for p in model.parameters():
                    p.sub_(p.grad, alpha=self.rate)

    def holds(self, model):
        assert (vector(model) - vector(self.plain())).abs().max() < 0.05  # only compression of the mean is right


class Pressed(Deed):
    """Each step moves all weights down by about 0.4; they are held at 0 or more before each forward."""

    rate, divided, private = 0.5, False, None

    def layers(self):
        return nn.Sequential(nn.Linear(5, 1, bias=False)).double()

    def table(self):
        x, y = super().table()
        return 0.5 + x.abs().clamp(max=1), y

    def loss(self, model, batch):
        return model(batch.x).mean()

    def holds(self, model):
        found = model[0].weight.detach()
        assert found.min() > -2.6, found  # 2 steps of each worker; without the change -3.4 and less
        assert found.max() < 1


class HeldBefore(Pressed):
    """In `loss`, as weights of a convex network."""

    def loss(self, model, batch):
        with torch.no_grad():
            model[0].weight.clamp_(min=0)
        return super().loss(model, batch)


class HeldAsData(Pressed):
    """By `.data`, which raises no version of the parameter."""

    def loss(self, model, batch):
        model[0].weight.data.clamp_(min=0)
        return super().loss(model, batch)


class HeldAfter(Pressed):
    """After the step, as the critic of a WGAN. The last step is not followed by it."""

    forms = ("wrap",)

    def loop(self, model, optimizer, batches):
        *others, last = batches
        for batch in others:
            super().loop(model, optimizer, [batch])
            for p in model.parameters():
                p.data.clamp_(min=-0.1)
        super().loop(model, optimizer, [last])


class Shrunk(Deed):
    """In `loss`, by a factor: a change that must be made once in each step, and not twice."""

    rate, divided = 0.02, False

    def loss(self, model, batch):
        if model.training:
            with torch.no_grad():
                model[0].weight.mul_(0.7)
        return super().loss(model, batch)

    def holds(self, model):
        assert model[0].weight.norm() < 0.99 * self.model()[0].weight.norm()


class UnitNorm(Deed):
    """After each step in a loop, rows of a weight are scaled to norm 1."""

    forms = ("wrap",)

    def loop(self, model, optimizer, batches):
        for batch in batches:
            super().loop(model, optimizer, [batch])
            with torch.no_grad():
                model[0].weight.div_(model[0].weight.norm(dim=1, keepdim=True))

    def holds(self, model):
        norms = model[0].weight.norm(dim=1)
        assert ((norms - 1).abs() < 0.2).all(), norms  # a mean of weights of norm 1 has a smaller norm


class LoadedAfter(Deed):
    """A state dict is loaded after `wrap`."""

    forms = ("wrap",)

    def loop(self, model, optimizer, batches):
        model.load_state_dict({name: torch.full_like(value, 0.5) for name, value in model.state_dict().items()})
        super().loop(model, optimizer, batches)

    def holds(self, model):
        assert (model[0].weight - 0.5).abs().max() < 0.4


class LoadedOnFirst(LoadedAfter):
    """A state dict is loaded after `wrap`, on rank 0 alone."""

    way = r"local_sgd|all_reduce"

    def loop(self, model, optimizer, batches):
        if rayps.world().rank:
            Deed.loop(self, model, optimizer, batches)
        else:
            super().loop(model, optimizer, batches)

    def holds(self, model):
        assert torch.isfinite(vector(model)).all()  # the change is the worker's own, and is averaged

    def plain(self, workers=2, *, trains=False):
        raise AssertionError("the workers begin with different models")


class Exchanged(Usual):
    """For an evaluation, weights are exchanged for their average, and then put back."""

    forms = ("wrap",)

    def loop(self, model, optimizer, batches):
        for batch in batches:
            super().loop(model, optimizer, [batch])
            before = {name: value.clone() for name, value in model.state_dict().items()}
            model.load_state_dict({name: torch.zeros_like(value) for name, value in before.items()})
            model.load_state_dict(before)


class MaxNorm(Deed):
    """`Embedding(max_norm)` changes the rows that forward looks up, on each worker other ones."""

    named = r"'0'"
    way = r"local_sgd"
    divided, private = False, "1"

    def layers(self):
        return nn.Sequential(nn.Embedding(24, 6, max_norm=0.5), nn.Linear(6, 1)).double()

    def table(self):
        return torch.arange(24) % 11, super().table()[1]

    def holds(self, model):
        assert model[0].weight.norm(dim=1)[:11].max() < 1  # drawn: 0.8 on average, and steps of a regression


class Thawed(Deed):
    """A layer that needed no gradient needs one from the third step on."""

    named, way = r"'0.weight'", r"start_from"
    divided, private = False, None

    def layers(self):
        found = Deed.layers(self)
        found[0].requires_grad_(False)
        return found

    def loss(self, model, batch):
        if model.training:
            model.calls = getattr(model, "calls", 0) + 1
            if model.calls == 3:
                model[0].requires_grad_(True)
        return super().loss(model, batch)

    def holds(self, model):
        raise AssertionError("the layer is not in the optimizer: plain torch does not train it either")

    def compare(self, model, law):
        self.holds(model)


class FrozenLater(Thawed):
    """A layer needs no gradient from the third step on: neither momentum nor weight decay moves it any more."""

    way, without = r"all_reduce", ("scaffold",)  # which takes plain SGD only

    def layers(self):
        return Deed.layers(self)

    def loss(self, model, batch):
        if model.training:
            model.calls = getattr(model, "calls", 0) + 1
            if model.calls == 3:
                model[0].requires_grad_(False)
        return Deed.loss(self, model, batch)

    def optimizer(self, params):
        return torch.optim.SGD(params, lr=self.rate, momentum=0.9, weight_decay=0.1)

    def holds(self, model):
        assert (model[0].weight - self.model()[0].weight).abs().max() > 1e-3

    def compare(self, model, law):
        Deed.compare(self, model, law)


class FrozenFirst(Usual):
    """A layer never needs a gradient, and is drawn by torch's random state: each model has the one of the job."""

    forms, private = ("train",), None

    def model(self):
        model = self.layers()
        model[0].requires_grad_(False)
        return model

    def holds(self, model):
        torch.manual_seed(0)
        assert torch.equal(model[0].weight, self.model()[0].weight)

    def compare(self, model, law):
        self.holds(model)


class ComplexNumbers(Deed):
    """A parameter of complex numbers."""

    named, way = r"'0.weight'", r"view_as_complex"
    divided = False

    def layers(self):
        return nn.Sequential(Spectral(), nn.Tanh(), nn.Linear(7, 1, dtype=torch.float64))


class OnlyComplex(ComplexNumbers):
    """All parameters are complex."""

    private = "0"

    def layers(self):
        return nn.Sequential(Spectral(1))


class ComplexBuffer(Usual):
    """A buffer of complex numbers, as in rotary embeddings: nobody steps it."""

    named, way = r"1\.turn'", r"view_as_complex"
    rate, divided = 0.02, False

    def layers(self):
        return nn.Sequential(nn.Linear(5, 7), Turned(), nn.Linear(7, 1)).double()


class Spectral(nn.Module):
    """The real part of a product with complex weights."""

    def __init__(self, width=7):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(5, width, dtype=torch.complex128))

    def forward(self, x):
        return (x.to(self.weight.dtype) @ self.weight).real


class Turned(nn.Module):
    """Rotates by constants."""

    def __init__(self):
        super().__init__()
        self.register_buffer("turn", torch.polar(torch.ones(7), torch.arange(7.0)).to(torch.complex128))

    def forward(self, x):
        return torch.tanh((x * self.turn).real)


class Frozen(Usual):
    """A frozen front whose BatchNorm and dropout are in evaluation mode."""

    private = "3"

    def layers(self):
        front = torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.BatchNorm1d(6), torch.nn.Dropout()).eval()
        rest = torch.nn.Linear(6, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1)
        return torch.nn.Sequential(front.requires_grad_(False), *rest).double()

    def holds(self, model):
        first = self.model()
        assert not model[0][1].running_mean.any()
        assert model[0][0].weight.equal(first[0][0].weight)
        assert not model[1].weight.equal(first[1].weight)

    def compare(self, model, law):
        super().compare(model, law)
        assert not model[0][1].running_mean.any()


class MetricAsWeight(Usual):
    """The loss returns a metric beside it, as many scripts do."""

    forms = ("train",)
    named = r"loss\(model, batch\) returned a pair"
    way = r"return the loss alone"

    def loss(self, model, batch):
        error = model(batch.x) - batch.y
        return (error**2).mean(), error.abs().mean().item()

    holds = ConvertedModel.holds
    compare = holds


class ChangedInEvaluate(Usual):
    """Weights are changed in an evaluation, without a trace in torch's version counters."""

    forms = ("train",)
    named = r"evaluate\(model, batch\) has changed the parameter '.*weight'|in a pipeline no worker has the whole model"
    way = r"change parameters in loss, .* under all_reduce|or use all_reduce, whose|only call the model, once"

    def evaluate(self, model, batch):
        held = next(p for name, p in model.named_parameters() if name.endswith("weight"))
        held.data.add_(1.0)
        return {"norm": held.norm()}


class ExchangedInEvaluate(Usual):
    """Weights are changed in an evaluation, and restored before its end."""

    forms = ("train",)
    named, way = r"in a pipeline no worker has the whole model", r"only call the model, once"

    def evaluate(self, model, batch):
        held = next(p for name, p in model.named_parameters() if name.endswith("weight"))
        before = held.detach().clone()
        held.data.add_(1.0)
        norm = held.norm()
        held.data.copy_(before)
        return {"norm": norm}


DEEDS = [Usual, Scaled, ChangedGradient, SparseGradient, SparseSteps]
DEEDS += [
    ConvertedModel,
    NewData,
    NewDataOfThree,
    NewParameter,
    NewLayer,
    NewGroup,
    ForeignGroup,
    LoadedLater,
    LoadedBefore,
]
DEEDS += [ClearedState, NewState, ZeroState, DroppedState, ReadState]
DEEDS += [TwoHalves, StepsByHand, HalfGradient, HookLater, HeldByHook, HeldByHookLater, HeldBeforeStep, OwnStep]
DEEDS += [HeldBefore, HeldAsData, HeldAfter, Shrunk, UnitNorm, LoadedAfter, LoadedOnFirst, Exchanged, MaxNorm]
DEEDS += [Thawed, FrozenLater, FrozenFirst, ComplexNumbers, OnlyComplex, ComplexBuffer]
DEEDS += [Frozen, MetricAsWeight, ChangedInEvaluate, ExchangedInEvaluate]
CELLS, NAMES = cells(DEEDS)


@covers.by(lambda deed, strategy, form: (deed, form, kind_of(strategy)), lambda deed, strategy, form: (strategy, form))
@pytest.mark.parametrize(("deed", "strategy", "form"), CELLS, ids=NAMES)
def test_cell(deed, strategy, form):
    judge(deed, strategy, form)


@pytest.mark.parametrize("register", [register_optimizer_step_pre_hook, register_optimizer_step_post_hook])
def test_servers_refuse_torchs_hooks_for_all_optimizers(register):
    def train_fn():
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)  # which replaces optimizer.step by a counter
        rayps.wrap(model, optimizer, "parameter_server")
        model(torch.ones(1, 2)).sum().backward()
        handle = register(everywhere)
        try:
            optimizer.step()
        finally:
            handle.remove()

    def everywhere(optimizer, args, kwargs):
        raise AssertionError("nobody runs it")

    with pytest.raises(WorkloadError, match=r"everywhere.*under parameter_server") as caught:
        rayps.run(train_fn, workers=1, cluster=LocalCluster(), progress=False)
    assert "all_reduce" in str(caught.value)


# one cell of one row of each kind on real processes, strategies in turn; `shard=parameters` runs on these alone
RAY_DEEDS = [Scaled, ChangedGradient, SparseGradient, NewDataOfThree, NewGroup, LoadedBefore, ClearedState, HookLater]
RAY_DEEDS += [TwoHalves, HeldBefore, HeldAfter, LoadedOnFirst, MaxNorm, Thawed, ComplexNumbers, FrozenFirst]
RAY_DEEDS += [Frozen, MetricAsWeight, ChangedInEvaluate]
ON_RAY = {
    "wrap": ["parameter_server:shards=2", "all_reduce", "local_sgd:period=2", "downpour:n_push=2,n_fetch=2"],
    "train": ["all_reduce:shard=parameters", "fedavg", "parameter_server:shards=2", "all_reduce:shard=gradients"],
}
RAY_CELLS = [
    (deed, strategies[number // 2 % 4], form)
    for number, deed in enumerate(RAY_DEEDS)
    for form, strategies in ON_RAY.items()
    if form == (deed.forms * 2)[number % 2]
]
RAY_CELLS += [
    (deed, "all_reduce:shard=parameters", "train") for deed in (HeldBefore, Shrunk, MaxNorm, Thawed, ComplexNumbers)
]


@pytest.mark.ray
@covers.by(
    lambda deed, strategy, form: (strategy, form), lambda deed, strategy, form: "shard=parameters" in strategy and deed
)
@pytest.mark.parametrize(
    ("deed", "strategy", "form"), RAY_CELLS, ids=[f"{d.__name__}-{form}-{text}" for d, text, form in RAY_CELLS]
)
def test_cell_on_ray(deed, strategy, form, ray_cluster):
    judge(deed, strategy, form, ray_cluster)
