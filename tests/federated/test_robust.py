"""Rules and attacks as a job has them: what is refused, what collapses, what is borne, what is told."""

import pytest
import torch
from rayps_client.errors import ConfigError
from small_work import train
from torch import nn
from torch.nn import functional

import rayps
from rayps.federated.population.attack_spec import attack_of

RULES = [
    "krum(f=4)",
    "multi_krum(f=4)",
    "trimmed_mean(f=4)",
    "median",
    "geometric_median",
    "bulyan(f=4)",
    "centered_clipping(tau=1)",
]
FLIP = "sign_flip(clients=4,scale=5)"


class Blobs(rayps.Workload):
    """Five classes in 8 dimensions, 20 clients of 20 rows."""

    def __init__(self, client=None, dtype=torch.float32):
        self.client, self.dtype = client or rayps.data.iid(20), dtype

    def model(self):
        return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 5)).to(self.dtype)

    def rows(self, n, seed):
        generator = torch.Generator().manual_seed(seed)
        centers = 2.5 * torch.randn(5, 8, generator=torch.Generator().manual_seed(9))
        y = torch.arange(n) % 5
        return (centers[y] + torch.randn(n, 8, generator=generator)).to(self.dtype), y

    def data(self):
        return rayps.data.tensors(*self.rows(400, 1), batch_size=5, client=self.client)

    def evaluation_data(self):
        return rayps.data.tensors(*self.rows(200, 2), batch_size=200)

    def loss(self, model, batch):
        return functional.cross_entropy(model(batch.x), batch.y)

    def optimizer(self, params):
        return torch.optim.SGD(params, lr=0.1)

    def evaluate(self, model, batch):
        return {"accuracy": (model(batch.x).argmax(1) == batch.y).float().mean()}


def learn(rounds=3, work=None, workers=1, seed=0, **options):
    strategy = rayps.FedAvg(local_epochs=options.pop("local_epochs", 5), **options)
    result = train(work or Blobs(), strategy, workers=workers, epochs=rounds, seed=seed)
    return result, max(
        [
            result.metrics["accuracy"],
            *(each for each in result.history.to_pydict().get("evaluation_accuracy", ()) if each is not None),
        ]
    )


def cohorts(result):
    return [event for event in result.events if event["kind"] == "cohort"]


@pytest.fixture(scope="module")
def clean():
    _, best = learn()
    assert best > 0.95
    return best


def test_the_mean_collapses():
    assert learn(attack=FLIP)[0].metrics["accuracy"] < 0.5


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_bears_four_of_twenty(rule, clean):
    assert learn(rule=rule, attack=FLIP)[1] >= clean - 0.03


@pytest.mark.parametrize(
    "attack", ["alie(clients=4)", "label_flip(clients=4,classes=5)", "inflated_counts(clients=4,factor=1000)"]
)
def test_other_attacks_are_borne(attack, clean):
    assert learn(rule="trimmed_mean(f=4)", attack=attack)[1] >= clean - 0.05


def test_what_is_not_a_number_is_dropped_by_name_under_any_rule(clean):
    bad = sorted(attack_of("nan(clients=4)").attackers(0, 20))
    for rule in ("mean", "median"):
        result, best = learn(rule=rule, attack="nan(clients=4)")
        assert best >= clean - 0.03
        for event in cohorts(result):
            assert [name for name, _ in event["rejected"]] == [str(client) for client in bad]
            assert all("not finite" in why for _, why in event["rejected"])
            assert event["replied"] == 16
        assert set(result.history["rejected"].to_pylist()) == {4}


def test_flipped_labels_are_those_of_a_dataset_with_flipped_labels():
    """The attackers' rows with labels 4 - y, learnt without an attack: the same bits."""
    bad = attack_of("label_flip(clients=4,classes=5)").attackers(0, 20)
    owner = [row % 20 for row in range(400)]

    class Flipped(Blobs):
        def data(self):
            x, y = self.rows(400, 1)
            y = torch.where(torch.tensor([k in bad for k in owner]), 4 - y, y)
            return rayps.data.tensors(x, y, batch_size=5, client=owner)

    attacked, _ = learn(1, Blobs(client=owner), attack="label_flip(clients=4,classes=5)")
    told, _ = learn(1, Blobs(client=owner), attack="label_flip(4)")  # 5 classes: the labels say so
    assert torch.equal(attacked.snapshot.params, told.snapshot.params)
    law, _ = learn(1, Flipped())
    plain, _ = learn(1, Blobs(client=owner))
    assert torch.equal(attacked.snapshot.params, law.snapshot.params)
    assert not torch.equal(attacked.snapshot.params, plain.snapshot.params)


@pytest.mark.parametrize(
    "options",
    [
        {"rule": "krum(f=4)", "attack": "alie(clients=4)"},
        {"rule": "centered_clipping(tau=0.5)", "fraction": 0.5},
        {"attack": "inner_product(clients=4)"},
        {"attack": FLIP, "clip": 1.0},
        {"rule": "median(bucket=2)", "dropout": 0.3},
    ],
)
def test_same_bits_for_any_number_of_workers(options):
    law, _ = learn(2, local_epochs=1, **options)
    for workers in (2, 3):
        assert torch.equal(learn(2, workers=workers, local_epochs=1, **options)[0].snapshot.params, law.snapshot.params)


def test_rounds_with_too_few_replies_leave_the_model_as_it_was():
    result, _ = learn(1, rule="bulyan(f=4)", dropout=0.9)
    start = train(Blobs(), rayps.FedAvg(dropout=0.9, min_replies=20), epochs=1).snapshot.params
    assert torch.equal(result.snapshot.params, start)
    (event,) = cohorts(result)
    assert "bulyan(f=4) needs 19 replies (n >= 4f + 3)" in event["message"]
    told = " ".join(str(event.get("message")) for event in result.events)
    assert "2 are expected to reply in a round, and bulyan(f=4) needs 19" in told


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"rule": "krum(f=9)"}, r"at least 21 replies \(2f \+ 2 < n\), but a round asks 20"),
        ({"rule": "krum(f=4)", "fraction": 0.5}, "but a round asks 10"),
        ({"rule": "bulyan(f=5)"}, "n >= 4f"),
        ({"rule": "krum(f=3)", "attack": FLIP}, "tolerates 3"),
        ({"attack": "nan(clients=20)"}, "no honest client"),
        ({"rule": "best"}, "one of mean, krum"),
        ({"clip": -1}, "clip"),
        ({"attack": "noise(clients=2)"}, "sign_flip"),
    ],
)
def test_refused_before_anything_starts(options, word):
    with pytest.raises(ConfigError, match=word):
        learn(1, **options)


def test_what_a_rule_costs_on_clients_that_differ_is_told():
    """Two labels a client: Krum takes over one client's model after another."""
    apart = Blobs(client=rayps.data.shards(1, clients=20))
    result, best = learn(3, apart, rule="krum(f=4)")
    told = [event["message"] for event in result.events if "costs accuracy" in str(event.get("message"))]
    assert len(told) == 1 and "krum(f=4)" in told[0]
    assert best < learn(3, apart)[1] - 0.1
    assert not any("costs accuracy" in str(event.get("message")) for event in learn(1, rule="krum(f=4)")[0].events)


def test_updates_are_clipped_in_a_job():
    """One round's movement is at most `clip`, and without it more."""
    start = train(Blobs(), rayps.FedAvg(min_replies=20, dropout=0.9), epochs=1).snapshot.params
    moved = {clip: float((learn(1, clip=clip)[0].snapshot.params - start).norm()) for clip in (0.05, None)}
    assert moved[0.05] <= 0.05 * 1.001 < moved[None]


def test_a_run_in_which_no_round_counted_says_so():
    def warned(rounds, **options):
        events = learn(rounds, **options)[0].events
        return [event["message"] for event in events if "the model was not trained" in str(event.get("message"))]

    (told,) = warned(2, workers=2, clip=1e-3, attack="nan(clients=19)", min_replies=2)
    assert "none of 2 rounds counted" in told and "not finite" in told
    (told,) = warned(1, dropout=0.9, min_replies=20)
    assert "the only round did not count" in told and "no client replied" not in told
    assert not warned(2, attack="nan(clients=19)")  # one honest reply a round
