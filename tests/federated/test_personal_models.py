"""Personal models: private layers never leave a client, and every client's model can be had, with the measured bits."""

import copy
from dataclasses import replace

import pytest
import safetensors.torch
import torch
from federated_work import Dropping, Fed, Normed, batches_of, cohorts, drawn, fedavg, trained
from rayps_client.errors import CheckpointError, ConfigError
from small_work import OPTIMIZERS, rows, train
from torch import nn

import rayps
from rayps import AllReduce, Ditto, FedAvg, FedPer, FedRep, Scaffold
from rayps.federated.private_layers import PrivateLayers
from rayps.federated.rules import exact_sum
from rayps.runtime.results.job_clients import JobClients
from rayps.strategies.catalogue import notes_of, parse

EXACT = 1e-12
HEAD = "2"  # the last layer of `Fed`


class Judged(Fed):
    """Evaluates on rows that belong to the same clients."""

    def __init__(self, clients=4, n=48, **options):
        super().__init__(clients=clients, n=n, **options)

    def evaluation_data(self):
        x, y = rows(40, seed=1)
        return rayps.data.tensors(x, y, batch_size=8, client=[str(i % self.clients) for i in range(40)])


class JudgedDropping(Judged, Dropping):
    """Draws random numbers while it trains."""


class JudgedNormed(Judged):
    """Has BatchNorm before its last layer."""

    def model(self):
        return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 1)).double()


def values(model):
    return model.state_dict()


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def near(model, other):
    return max((a - b).abs().max().item() for a, b in zip(model.parameters(), other.parameters(), strict=True))


# ------------------------------------------------------------------------------------- private layers


@pytest.mark.parametrize("make", [FedPer, FedRep], ids=lambda kind: kind.name)
def test_with_nothing_private_it_is_fedavg_to_the_bit(make):
    work = Judged(optimizer="momentum")
    found = train(work, make(fraction=0.5, local_epochs=2), workers=2, epochs=3)
    law = train(work, FedAvg(fraction=0.5, local_epochs=2), workers=1, epochs=3)
    assert torch.equal(found.snapshot.params, law.snapshot.params)
    (note,) = notes_of(make(fraction=0.5).to_wire())
    assert note.startswith(f"private= names no layer, so {make.name} is fedavg")
    assert [event["message"] for event in found.events if event["kind"] == "warning"].count(note) == 1
    assert notes_of([{"epochs": 1, "strategy": "fedper:private=2"}, {"strategy": "fedavg"}]) == []
    with pytest.raises(ConfigError, match="fedrep with private=LAYER"):
        found.client("0")


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
def test_fedper_with_one_client_is_plain_training(optimizer):
    work = Judged(clients=1, n=24, optimizer=optimizer)
    result = train(work, FedPer(private=HEAD), workers=1, epochs=3)
    model, data = drawn(work), work.data()
    for t in range(3):
        model = trained(work, model, data, 0, t, 0)
    assert same(values(result.client("0").model()), values(model))


def by_hand(work, rounds, head_epochs=None, fraction=1.0):
    """FedPer's algorithm (with `head_epochs` FedRep's) in plain torch: the server's model, and each client's head."""
    server, data, heads = drawn(work), work.data(), {}
    sizes = data.clients.sizes.tolist()
    for t in range(rounds):
        replies = []
        for k in range(work.clients):
            model = copy.deepcopy(server)
            if k in heads:
                model[2].load_state_dict(heads[k])
            if head_epochs is None:
                model = trained(work, model, data, 0, t, k)
            else:
                for layers, epochs in (([model[2]], head_epochs), ([model[0]], 1)):
                    optimizer = OPTIMIZERS[work.kind]([p for layer in layers for p in layer.parameters()])
                    for x, y in batches_of(data, 0, t, k, epochs=epochs):
                        model.zero_grad()
                        ((model(x) - y) ** 2).mean().backward()
                        optimizer.step()
            heads[k] = copy.deepcopy(model[2].state_dict())
            replies.append(model[0])
        with torch.no_grad():
            for parts in zip(server[0].parameters(), *(each.parameters() for each in replies), strict=True):
                parts[0].copy_(sum(n * p for n, p in zip(sizes, parts[1:], strict=True)) / sum(sizes))
    return server, heads


@pytest.mark.parametrize("head_epochs", [None, 2], ids=["fedper", "fedrep"])
@pytest.mark.parametrize("optimizer", ["sgd", "momentum"])
def test_private_heads_are_the_papers_algorithms(head_epochs, optimizer):
    work = Judged(rule="uneven", optimizer=optimizer)
    strategy = FedPer(private="2") if head_epochs is None else FedRep(private=("2.weight", "2.bias"), head_epochs=2)
    result = train(work, strategy, workers=2, epochs=3)
    server, heads = by_hand(work, 3, head_epochs)
    assert near(result.model(), server) < EXACT  # its head is the initial one
    for k in range(4):
        mine = copy.deepcopy(server)
        mine[2].load_state_dict(heads[k])
        assert near(result.client(str(k)).model(), mine) < EXACT


@pytest.mark.parametrize(
    "strategy",
    [
        FedPer(private=HEAD, fraction=0.5),
        FedRep(private=HEAD, head_epochs=2, fraction=0.5),
        FedPer(private=HEAD, fraction=0.5, rule="trimmed_mean(f=0)", clip=0.5),
        FedPer(private=HEAD, fraction=0.5, finetune=1),
    ],
    ids=lambda given: f"{given.name}-{given.aggregation.rule}-{given.finetune}",
)
def test_heads_have_the_same_bits_on_any_workers_and_over_a_resume(strategy, tmp_path):
    work = Judged()
    whole = train(work, strategy, workers=1, epochs=6)
    three = train(work, strategy, workers=3, epochs=6)
    train(work, strategy, workers=2, epochs=3, checkpoint=tmp_path)
    resumed = train(work, strategy, workers=1, epochs=6, checkpoint=tmp_path, resume=True)
    for other in (three, resumed):
        assert torch.equal(other.snapshot.params, whole.snapshot.params)
        assert other.metrics == pytest.approx(whole.metrics, abs=EXACT)
        for name in whole.clients:
            assert same(values(other.client(name).model()), values(whole.client(name).model()))
    checkpointed = JobClients.of_checkpoint(resumed.checkpoint, work)
    assert same(values(checkpointed.client("1").model()), values(whole.client("1").model()))


def test_private_layers_keep_their_buffers_too():
    work = JudgedNormed(batch=4)
    result = train(work, FedPer(private=("1", "3")), workers=2, epochs=3)
    first = drawn(work)
    assert torch.equal(result.snapshot.buffers["1.running_mean"], first[1].running_mean)
    assert torch.equal(result.model()[1].weight, first[1].weight)
    assert not torch.equal(result.model()[0].weight, first[0].weight)
    models = [result.client(str(k)).model() for k in range(4)]
    assert all(model[1].num_batches_tracked == 9 for model in models)
    assert len({model[1].running_mean[0].item() for model in models}) == 4
    assert all(torch.equal(model[0].weight, result.model()[0].weight) for model in models)


def test_the_server_holds_no_head(monkeypatch, tmp_path):
    sizes, add = set(), exact_sum.ExactSum.add
    monkeypatch.setattr(
        exact_sum.ExactSum,
        "add",
        lambda self, vector, *given: (sizes.add(vector.numel()), add(self, vector, *given))[1],
    )
    work = Judged()
    result = train(work, FedPer(private=HEAD), workers=2, epochs=2, checkpoint=tmp_path)
    assert sizes == {5 * 7 + 7}  # a reply has the shared part alone
    heads = [value for name in result.clients for value in result.client(name).state.values()]
    assert sorted({tuple(value.shape) for value in heads}) == [(1,), (1, 7)]
    first = drawn(work)
    assert torch.equal(result.model()[2].weight, first[2].weight)
    held = [*result.snapshot.state_dict().values(), *result.snapshot.shared.values()]
    (folder,) = tmp_path.glob("step-00000002")
    held += [value for path in folder.glob("*.safetensors") for value in safetensors.torch.load_file(path).values()]
    bits = {tuple(row.tolist()) for value in held if value.dtype == torch.float64 for row in value.reshape(-1, 1)}
    assert all(tuple(number.tolist()) not in bits for value in heads for number in value.reshape(-1, 1))


def test_what_can_be_private_is_checked_before_anything_starts():
    class Never:
        def reserve(self, *_):
            raise AssertionError("it was started")

    def refused(strategy):
        with pytest.raises(ConfigError) as error:
            rayps.train(Judged(), strategy=strategy, cluster=Never(), progress=False, workers=1, epochs=1)
        assert error.value.data["field"] == "private"
        return str(error.value)

    class Both(Scaffold):
        @property
        def client_side(self):
            return replace(super().client_side, private=("2",))

    assert "no parameter of the model has such a name: it has 0.weight, 0.bias" in refused(FedPer(private="head"))
    assert "matches all parameters" in refused(FedPer(private=["0", "2"]))
    assert "matches all parameters" in refused(FedRep(private="*"))
    assert "further vectors (c)" in refused(Both())
    for wrong in (3.0, "", ["2", True], {"name": "2"}):
        with pytest.raises(ConfigError, match="private"):
            FedPer(private=wrong)
    assert parse("fedper:private=2")[0].strategy.client_side.private == ("2",)  # a layer of a Sequential
    (phase,) = parse("fedrep:private=(head,*.bias),head_epochs=3")
    assert phase.strategy.client_side.private == ("head", "*.bias")


def test_the_parts_of_a_vector():
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    part = PrivateLayers.of_model(("*.bias", "1"), model)
    assert part.parameters == {"0.bias", "1.weight", "1.bias", "2.bias"} and part.shared == {"0.weight", "2.weight"}
    assert part.buffers == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    vector = torch.arange(float(sum(p.numel() for p in model.parameters())))
    shared = part.cut(vector)
    assert shared.tolist() == [0, 1, 2, 3, 4, 5, 15, 16, 17] and part.shared_size == 9
    other = torch.zeros_like(vector)
    part.paste(other, shared)
    part.load(part.state_of(vector, dict(model.named_buffers())), other, dict(model.named_buffers()))
    assert torch.equal(other, vector)
    nothing = PrivateLayers.of_model((), model)
    assert not nothing and nothing.cut(vector) is vector and nothing.shared_size == vector.numel()


# ------------------------------------------------------------------------------------- personal models of a result

KINDS = [
    (Judged, Ditto(lam=0.3, fraction=0.5)),
    (JudgedNormed, Ditto(lam=0.3)),
    (JudgedNormed, FedAvg(buffers="keep")),
    (Judged, FedAvg(finetune=2, fraction=0.5)),
    (JudgedDropping, FedAvg(finetune=1)),
    (JudgedNormed, FedPer(private="3", buffers="keep", finetune=1)),
    (JudgedNormed, FedRep(private="3", head_epochs=2)),
    (Judged, FedAvg(finetune=1, attack="label_flip(clients=2,classes=3)")),
]


@pytest.mark.parametrize(
    ("kind", "strategy"),
    KINDS,
    ids=lambda given: getattr(given, "name", given.__name__ if isinstance(given, type) else ""),
)
def test_a_clients_model_is_the_one_that_was_measured(kind, strategy, tmp_path):
    work = kind(batch=4)
    result = train(work, strategy, workers=1, epochs=6, checkpoint=tmp_path)
    assert result.clients == ["0", "1", "2", "3"]
    found = [result.client(name) for name in result.clients]
    want = sum(each.metrics["error"] * 10 for each in found) / 40
    assert result.metrics["personal_error"] == pytest.approx(want, abs=EXACT)
    x, y = rows(40, seed=1)
    for k, each in enumerate(found):
        mine = torch.arange(40) % 4 == k
        with torch.no_grad():
            error = (each.model()(x[mine]) - y[mine]).abs().mean().item()
        assert each.metrics["error"] == pytest.approx(error, abs=EXACT)
    stored = JobClients.of_checkpoint(result.checkpoint, work)
    again = train(work, strategy, workers=1, epochs=6, checkpoint=tmp_path, resume=True)  # no round is left
    for each in found:
        law = values(each.model())
        assert same(values(stored.client(each.name).model()), law) and same(
            values(again.client(each.name).model()), law
        )
    before = torch.get_rng_state()
    found[0].model()
    assert torch.equal(torch.get_rng_state(), before)


def test_dittos_model_is_v_k():
    work = Judged()
    result = train(work, Ditto(lam=0), workers=2, epochs=3)
    model, data = drawn(work), work.data()
    for t in range(3):
        model = trained(work, model, data, 0, t, 2)
    assert near(result.client("2").model(), model) < EXACT
    assert torch.equal(
        result.client("2").state["v"],
        torch.cat([p.detach().reshape(-1) for p in result.client("2").model().parameters()]),
    )


def test_a_model_of_the_last_phase_is_returned():
    work = Judged()
    result = train(work, [(2, FedAvg()), Ditto(lam=0)], workers=2, epochs=4)
    server, data = fedavg(work, 2)[0], work.data()
    model = server
    for t in range(2):
        model = trained(work, model, data, 0, t, 1)
    assert near(result.client("1").model(), model) < EXACT


def test_a_personal_model_is_saved_like_a_whole_one(tmp_path):
    work = Judged()
    one = train(work, FedPer(private=HEAD), workers=1, epochs=2).client("3")
    one.save(tmp_path / "mine")
    assert same(values(rayps.load_state(work.model(), tmp_path / "mine")), values(one.model()))
    with pytest.raises(CheckpointError, match="not empty"):
        one.save(tmp_path / "mine")


def test_who_has_no_model_of_its_own_is_told_what_to_do(tmp_path):
    def refused(strategy, name, **options):
        result = train(Judged(), strategy, workers=1, epochs=1, **options)
        with pytest.raises(ConfigError) as error:
            result.client(name)
        assert error.value.data["field"] == "client"
        return str(error.value), result

    said, result = refused(Ditto(fraction=0.25), "nobody")
    assert "there is no client 'nobody': the clients are 0, 1, 2, 3" in said
    (took_part,) = cohorts(result)[0]["trained"]
    other = next(name for name in result.clients if name != took_part)
    with pytest.raises(ConfigError, match=r"has taken part in no round .*: give more rounds"):
        result.client(other)
    assert result.client(took_part).model() is not None
    tuned = train(Judged(), FedAvg(finetune=1, fraction=0.25), workers=1, epochs=1)
    assert tuned.client(other).metrics["error"] > 0  # a copy of w can be tuned for everybody
    assert "fedavg keeps no model of each client: use ditto" in refused(FedAvg(), "0")[0]
    assert "the job has no clients" in refused(AllReduce(), "0")[0]
    plain = train(Judged(), AllReduce(), workers=1, epochs=1, checkpoint=tmp_path)
    assert plain.clients == []
    with pytest.raises(CheckpointError, match="does not record a federated strategy"):
        JobClients.of_checkpoint(plain.checkpoint, Judged())


def test_without_clients_in_the_evaluation_data_there_are_models_and_no_metrics():
    class Nobodys(Fed):
        def evaluation_data(self):
            return rayps.data.tensors(*rows(40, seed=1), batch_size=8)

    result = train(Nobodys(clients=4, n=48), FedPer(private=HEAD), workers=1, epochs=1)
    (said,) = [event["message"] for event in result.events if "no personal_* metrics" in str(event.get("message"))]
    assert said.startswith("fedper evaluates") and said.endswith("The other metrics use the initial private layers")
    assert result.client("0").metrics == {} and result.client("0").model() is not None


def test_buffers_of_one_client_do_not_reach_another():
    work = Normed(clients=3)
    result = train(work, FedAvg(buffers="keep"), workers=2, epochs=2)
    found = [result.client(str(k)).model()[1].running_mean for k in range(3)]
    assert not torch.equal(found[0], found[1]) and not torch.equal(found[1], found[2])
