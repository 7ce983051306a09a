"""Client-level differential privacy of federated jobs: beside the paper's algorithm, and what is refused."""

import json
import re

import numpy as np
import pytest
import torch
from federated_work import Fed, Normed, drawn, trained
from process_cluster import start_process
from rayps_client.errors import CheckpointError, ConfigError
from small_work import distance, train, vector

from rayps import FedAdam, FedAvg, FedAvgM, FedPer, FedProx, Scaffold, dp
from rayps.federated.check import federated
from rayps.privacy import accountant
from rayps.privacy.ledger import ReleaseLedger
from rayps.privacy.noise import KeyedNoise
from rayps.strategies.catalogue import parse, wire

Z, C = 0.8, 0.05


def seeded(**options):
    return dp(**{"noise_multiplier": Z, "clip": C, "noise": "seeded"} | options)


def dp_fedavg(work, rounds, q, *, seed=0, noise=Z, clip=C):
    """DP-FedAvg (McMahan et al. 2018) in plain torch: a fixed divisor, equal weights, Poisson cohorts."""
    source, model, data = KeyedNoise.of_seed(seed), drawn(work, seed), work.data()
    count = data.clients.count
    for t in range(rounds):
        cohort = np.flatnonzero(source.uniform(count, t) < q)
        w_t = vector(model)
        total = torch.from_numpy(source.normal(len(w_t), noise * clip, t))
        for k in cohort.tolist():
            update = vector(trained(work, model, data, seed, t, k)) - w_t
            total += update * min(1.0, clip / float(update.norm()))
        torch.nn.utils.vector_to_parameters(w_t + total / (q * count), model.parameters())
    return model


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_private_job_is_dp_fedavg(workers):
    result = train(Fed(), FedAvg(fraction=0.4, privacy=seeded()), workers=workers, epochs=4)
    assert distance(result.model(), dp_fedavg(Fed(), 4, 0.4)) < 1e-6  # the clip has a margin of 1e-6
    epsilons = result.history.column("epsilon").to_pylist()
    assert epsilons == sorted(epsilons) and epsilons[0] > 0


def test_any_number_of_workers_gives_the_same_bits():
    models = [
        train(Fed(), FedAvg(fraction=0.4, privacy=seeded()), workers=workers, epochs=3).model() for workers in (1, 2)
    ]
    assert distance(*models) == 0


def test_secret_noise_differs_in_each_run_and_has_the_size_that_is_claimed():
    strategy = FedAvg(fraction=1.0, privacy=dp(noise_multiplier=50.0, clip=0.1, sampling="all"))
    first, second = (vector(train(Fed(), strategy, workers=1, epochs=1).model()) for _ in range(2))
    spread = (first - second).std() / np.sqrt(2)
    assert float(spread) == pytest.approx(50.0 * 0.1 / 9, rel=0.35)


@pytest.mark.parametrize(
    "strategy",
    [
        FedProx(mu=0.1, fraction=0.5, privacy=seeded()),
        FedAvgM(fraction=0.5, privacy=seeded(clip="adaptive", bit_noise=1.0)),
        FedAdam(fraction=0.5, privacy=seeded(sampling="fixed")),
        FedAvg(fraction=0.5, privacy=seeded(sampling="all"), dropout=0.3),
        FedAvg(fraction=0.34, privacy=seeded(mechanism="tree")),
        FedPer(fraction=0.5, privacy=seeded()),
    ],
    ids=["fedprox", "adaptive", "fixed", "all", "tree", "fedper"],
)
def test_what_can_be_private_runs_and_says_nothing_of_single_clients(strategy):
    result = train(Fed(), strategy, workers=2, epochs=3)
    columns = set(result.history.column_names)
    assert {"epsilon", "clip"} <= columns and not {"sampled", "replied", "dropped", "rejected"} & columns
    loss = result.history.column("loss").to_pylist() if "loss" in columns else [None]
    assert all(value is None or np.isnan(value) for value in loss)
    kinds = [event["kind"] for event in result.events]
    assert "privacy" in kinds and "cohort" not in kinds and "clients" not in kinds
    last = [event for event in result.events if event["kind"] == "privacy"][-1]
    assert last["message"] == last["claim"] == result.privacy["claim"] and last["epsilon"] == result.privacy["epsilon"]
    assert result.privacy["epsilon"] == result.history.column("epsilon").to_pylist()[-1]
    assert result.privacy["releases"] == 3 and result.privacy["claim"].startswith("This run proves nothing")


def test_an_empty_cohort_releases_noise_alone():
    result = train(Fed(), FedAvg(fraction=1e-6, privacy=seeded(divisor=5.0)), workers=2, epochs=1)
    noise = torch.from_numpy(KeyedNoise.of_seed(0).normal(len(vector(result.model())), Z * C, 0))
    assert torch.allclose(vector(result.model()), vector(drawn(Fed())) + noise / 5.0)


def test_adaptive_clipping_follows_the_norms():
    privacy = seeded(clip="adaptive", first_clip=1e-4, clip_lr=1.0, noise_multiplier=0.01, bit_noise=0.02)
    result = train(Fed(), FedAvg(fraction=1.0, privacy=privacy), workers=2, epochs=12)
    clips = result.history.column("clip").to_pylist()
    assert clips[0] == 1e-4 and clips[1] == pytest.approx(1e-4 * np.exp(0.5), rel=0.1) and clips[-1] > 50 * clips[0]


def test_the_budget_ends_the_job_before_the_round_that_would_exceed_it():
    privacy = seeded(noise_multiplier=4.0, epsilon=2.0)
    result = train(Fed(), FedAvg(fraction=0.3, privacy=privacy), workers=2, epochs=100)
    spent = result.history.column("epsilon").to_pylist()
    assert 0 < len(spent) < 100 and spent[-1] <= 2.0
    met = next(event for event in result.events if event["kind"] == "met")
    assert "the privacy budget epsilon=2 is spent" in met["message"]
    end = result.events[-1]
    assert end["kind"] == "finished"
    assert end["message"].startswith(f"ended early after round {len(spent)} of 100: the privacy budget")


def test_the_noise_is_found_from_the_budget():
    strategy = FedAvg(fraction=0.3, privacy=dp(epsilon=5.0, rounds=6, clip=0.1))
    result = train(Fed(), strategy, workers=1, epochs=6)
    spent = result.history.column("epsilon").to_pylist()
    assert len(spent) == 6 and 4.8 < spent[-1] <= 5.0 and result.privacy["proves"]


def test_a_job_that_resumes_keeps_what_it_has_spent(tmp_path):
    strategy = FedAvg(fraction=0.4, privacy=dp(noise_multiplier=1.1, clip=0.1))
    train(Fed(), strategy, workers=1, epochs=2, checkpoint=tmp_path, checkpoint_every=1)
    ledger = ReleaseLedger(tmp_path / "privacy")
    assert sum(each.releases for each in ledger.spent().values()) == 2
    result = train(Fed(), strategy, workers=2, epochs=3, checkpoint=tmp_path, resume=True)
    assert sum(each.releases for each in ledger.spent().values()) == 3
    assert result.privacy["releases"] == 3
    ended = train(Fed(), strategy, workers=2, epochs=3, checkpoint=tmp_path, resume=True)
    assert ended.privacy == result.privacy  # no round was left, and the claim is the same


def four_private_rounds(folder, *, resume=False):
    strategy = FedAvg(fraction=0.4, privacy=dp(noise_multiplier=1.1, clip=0.1))
    return train(Fed(), strategy, workers=1, epochs=4, checkpoint=folder, checkpoint_every=1, resume=resume)


@pytest.mark.chaos
@pytest.mark.parametrize(
    "place",
    ["privacy: nothing recorded", "privacy: recorded, not released", "privacy: noise added, not released"],
    ids=["before", "recorded", "noised"],
)
def test_a_kill_in_a_round_never_lowers_epsilon(tmp_path, place):
    """Four rounds need four releases; each one that was recorded before the kill is claimed in addition."""
    killed = start_process(four_private_rounds, tmp_path / "run", failpoints=f"{place}=3")
    killed.join(120)
    assert killed.exitcode == -9
    before = ReleaseLedger(tmp_path / "run" / "privacy").spent()
    recorded = sum(each.releases for each in before.values())
    assert recorded == (2 if place.endswith("nothing recorded") else 3)
    try:
        again = four_private_rounds(tmp_path / "run", resume=True)
    except CheckpointError as error:  # the kill came before the first one was written
        assert "no complete checkpoint" in str(error)
        again = four_private_rounds(tmp_path / "run")
    newest = max(int(path.name.partition("-")[2]) for path in (tmp_path / "run").glob("step-*"))
    assert newest == 4 and again.privacy["releases"] >= max(4, recorded + 1)
    assert again.privacy["epsilon"] >= accountant.epsilon(before, 1e-5)


def test_no_record_says_who_took_part(tmp_path):
    """The names of clients and the cohorts are in no file of the job but the data."""
    work = Fed(clients=9)
    strategy = FedAvg(fraction=0.4, privacy=dp(noise_multiplier=1.1, clip=0.1))
    result = train(work, strategy, workers=1, epochs=3, checkpoint=tmp_path, checkpoint_every=1)
    said = json.dumps(result.events)
    assert not re.search(r"client[ -]?\d", said) and "sampled" not in said
    for line in (tmp_path / "privacy" / "ledger.jsonl").read_text().splitlines():
        assert set(json.loads(line)) == {"round", "tree", "time", "unit", "mechanism"}


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ("fedbuff:privacy={}", "privacy cannot be proven under fedbuff"),
        ("scaffold:privacy={}", "privacy cannot be proven under scaffold.*use fedavg, fedprox or a server optimizer"),
        ("ditto:privacy={}", "ditto stores a state of each client.*use fedavg, fedprox or a server optimizer"),
        (
            "fedper:private=head,privacy={}",
            "private=head stores a state of each client.*leave private out; or let real",
        ),
        ("fedrep:private=(a,b),privacy={}", "private=a,b stores a state of each client.*say who took part"),
        ("fedavg:buffers=keep,privacy={}", "buffers=keep stores a state of each client.*leave buffers out"),
        ("fedavg:rule=median,privacy={}", "a robust rule is none"),
        ("fedavg:rule=krum(f=2),privacy={}", r"rule is 'krum\(f=2\)', but privacy adds noise"),
        ("fedavg:clip=1.0,privacy={}", r"write privacy=dp\(clip=1,...\)"),
        ("fedavg:min_replies=3,privacy={}", "min_replies is 3"),
        ("fedavg:enough=3,privacy={}", "enough is 3"),
        ("fedavg:attack=nan(1),privacy={}", "attack is"),
        ("fedavg:finetune=1,privacy={}", "would void the claim"),
        ("fedavg:available=bernoulli,privacy={}", "are no random sample"),
        ("fedavg:deadline=3,privacy={}", "are no random sample"),
        ("fedavg:clients=remote,privacy=dp(noise_multiplier=1,sampling=poisson)", "real clients come and go"),
        ("fedavg:privacy=dp(noise_multiplier=1,physical_batch=8)", "which is for the privacy of rows"),
    ],
)
def test_what_would_void_the_claim_is_refused(strategy, message):
    with pytest.raises(ConfigError, match=message):
        parse(strategy.format("dp(noise_multiplier=1)"))


@pytest.mark.parametrize("strategy", ["ditto", "fedper:private=head", "fedrep:private=head", "fedavg:buffers=keep"])
def test_real_clients_keep_their_states_under_privacy(strategy):
    text = f"{strategy}{',' if ':' in strategy else ':'}clients=remote(least=3),privacy=dp(noise_multiplier=1)"
    assert parse(text)[0].strategy.federation.client_side.stateful


def test_a_model_with_unclipped_buffers_is_refused():
    """The advice to keep them is for real clients only: those of simulated clients would be in checkpoints."""
    with pytest.raises(ConfigError, match="LayerNorm") as refused:
        train(Normed(), FedAvg(privacy=seeded()), workers=1, epochs=1)
    assert "buffers=keep" not in str(refused.value)
    with pytest.raises(ConfigError, match=r"LayerNorm.*, or give buffers=keep"):
        federated(
            FedAvg(clients="remote(least=3)", privacy=dp(noise_multiplier=Z, clip=C)), Normed(), Normed().data(), 0
        )


def test_delta_that_is_too_large_warns():
    """With delta=0.5 epsilon may be 0, and the claim is none."""
    result = train(Fed(), FedAvg(privacy=dp(noise_multiplier=Z, clip=C, delta=0.5)), workers=1, epochs=1)
    said = [event["message"] for event in result.events if event["kind"] == "warning"]
    assert any(text.startswith("this run will prove nothing: delta=0.5 is not below 1 / 9") for text in said)
    assert not result.privacy["proves"] and result.privacy["claim"].startswith("This run proves nothing: delta=0.5")


def test_a_budget_that_allows_no_round_is_refused():
    with pytest.raises(ConfigError, match=r"epsilon=0.01 allows no release.*Give epsilon=.*, or noise_multiplier="):
        train(Fed(), FedAvg(privacy=dp(noise_multiplier=1.0, epsilon=0.01)), workers=1, epochs=1)


def test_noise_that_hides_the_updates_warns():
    result = train(Fed(), FedAvg(privacy=seeded(noise_multiplier=9.0)), workers=1, epochs=1)
    said = [event["message"] for event in result.events if event["kind"] == "warning"]
    assert len(said) == 1 and "7.1 times as large" in said[0] and "50 parameters, 9 clients" in said[0]
    assert not [
        event for event in train(Fed(), FedAvg(privacy=seeded()), epochs=1).events if event["kind"] == "warning"
    ]


def test_the_option_travels_as_text_and_as_json():
    strategy = FedAvg(fraction=0.4, privacy=seeded(epsilon=3.0))
    assert parse(wire(parse(strategy)))[0].strategy == strategy
    assert (
        parse("fedavg:fraction=0.4,privacy=dp(noise_multiplier=0.8,clip=0.05,noise=seeded,epsilon=3.0)")[0].strategy
        == strategy
    )


def test_scaffold_without_privacy_is_untouched():
    assert Scaffold().privacy_spec is None and FedAvg().privacy_spec is None


def test_the_warning_about_noise_counts_what_clients_send():
    def warned(strategy):
        return federated(strategy, Fed(), Fed().data(), 0).warnings

    (note,) = warned(FedAvg(privacy=seeded(noise_multiplier=8.0, sampling="all")))  # 8 * sqrt(50) / 9 clips
    assert "about 6.3 times" in note and "with 50 parameters, 9 clients a round are few" in note
    few, many = (
        FedPer(private="0", clients="remote(least=9)", privacy=seeded(noise_multiplier=z, sampling="all"))
        for z in (8.0, 20.0)
    )
    assert not [each for each in warned(few) if "noise" in each]  # 8 * sqrt(8) / 9: the layer 0 is not sent
    (note,) = [each for each in warned(many) if "noise" in each]
    assert "about 6.3 times" in note and "with 8 shared parameters, 9 clients" in note
