"""FedBuff as jobs: against a plain torch loop over events written by hand, FedAvg, resumes, and any number of workers.

The events themselves are tested in test_buffer.py.
"""

import copy

import numpy as np
import pytest
import torch
from federated_work import Fed, cohorts, drawn, trained
from rayps_client.errors import ConfigError
from small_work import distance, train, vector

from rayps import FedAvg, FedBuff
from rayps.strategies.catalogue import parse, wire

EXACT = 1e-12
HARD = FedBuff(buffer=4, concurrency=6, speed="lognormal(sigma=1)", dropout=0.2, deadline=0.03, max_staleness=5)
# three clients that take 2, 3 and 7 seconds, two updates a buffer: (client, version) of each, as in test_buffer.py
BY_HAND = [[(0, 0), (1, 0)], [(0, 1), (1, 1)], [(2, 0), (0, 2)], [(1, 2), (0, 3)]]


def law(work, events, *, server_lr=1.0, decay=0.5, size=2, seed=0):
    """Algorithm 1 of Nguyen et al. 2022 over these events: the parameters of every version."""
    data = work.data()
    versions = [drawn(work, seed)]
    for t, arrivals in enumerate(events):
        step = torch.zeros_like(vector(versions[0]))
        for client, version in arrivals:
            update = vector(trained(work, versions[version], data, seed, version, client)) - vector(versions[version])
            step += (1 + t - version) ** -decay * update
        versions.append(moved(versions[-1], server_lr * step / size))
    return versions


def moved(model, step):
    model, at = copy.deepcopy(model), 0
    with torch.no_grad():
        for p in model.parameters():
            p += step[at : at + p.numel()].view(p.shape)
            at += p.numel()
    return model


def told(event):
    """What an event says, whenever it was said."""
    return {key: value for key, value in event.items() if key not in ("time", "seq")}


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    "options", [{}, {"server_lr": 0.4, "decay": 2.0}, {"decay": 0.0}, {"decay": 40.0}, {"decay": 5000.0}]
)
def test_a_job_is_the_papers_algorithm(workers, options):
    work = Fed(clients=3, n=36)
    strategy = FedBuff(buffer=2, concurrency=3, speed=[2 / 12, 3 / 12, 7 / 12], **options)
    result = train(work, strategy, workers=workers, epochs=4)
    assert distance(result.model(), law(work, BY_HAND, **options)[-1]) < EXACT
    assert [event["staleness"] for event in cohorts(result)] == [{"0": 2}, {"0": 2}, {"0": 1, "2": 1}, {"0": 1, "1": 1}]
    assert [event["seconds"] for event in cohorts(result)] == [3.0, 3.0, 2.0, 2.0]
    other = train(work, strategy, workers=workers, epochs=3)
    assert distance(other.model(), law(work, BY_HAND[:3], **options)[-1]) < EXACT


def test_with_everyone_in_one_buffer_it_is_fedavg():
    work = Fed(clients=9, n=36)
    for speed in (None, "lognormal(sigma=1)"):
        buffered = train(work, FedBuff(buffer=9, speed=speed, local_epochs=2), workers=2, epochs=4)
        synchronous = train(work, FedAvg(speed=speed, local_epochs=2), workers=2, epochs=4)
        assert distance(buffered.model(), synchronous.model()) < EXACT
        assert [e["seconds"] for e in cohorts(buffered)] == [e["seconds"] for e in cohorts(synchronous)]
        assert all(event["staleness"] == {"0": 9} for event in cohorts(buffered))


def test_the_same_bits_and_events_for_any_number_of_workers():
    results = [train(Fed(rule="uneven", n=90), HARD, workers=workers, epochs=8) for workers in (1, 2, 4)]
    for other in results[1:]:
        assert torch.equal(other.snapshot.params, results[0].snapshot.params)
        assert [told(event) for event in cohorts(other)] == [told(event) for event in cohorts(results[0])]
    events = cohorts(results[0])
    assert {reason for event in events for _, reason in event["dropped"]} >= {"dropout", "deadline"}
    assert any(set(event["staleness"]) != {"0"} for event in events)


@pytest.mark.parametrize("cut", [1, 4])
@pytest.mark.parametrize("workers", [(2, 2), (1, 3)])
def test_a_run_goes_on_where_it_was(tmp_path, cut, workers):
    work = Fed(rule="uneven", n=90)
    whole = train(work, HARD, workers=1, epochs=8)
    train(work, HARD, workers=workers[0], epochs=cut, checkpoint=tmp_path)
    rest = train(work, HARD, workers=workers[1], epochs=8, checkpoint=tmp_path, resume=True)
    assert torch.equal(rest.snapshot.params, whole.snapshot.params)
    assert [(e["round"], e["seconds"], e["staleness"]) for e in cohorts(rest)] == [
        (e["round"], e["seconds"], e["staleness"]) for e in cohorts(whole)[cut:]
    ]


def test_old_parameters_are_kept_as_long_as_somebody_trains_from_them():
    result = train(
        Fed(clients=3, n=36), FedBuff(buffer=2, concurrency=3, speed=[2 / 12, 3 / 12, 7 / 12]), workers=1, epochs=4
    )
    kept = sorted(name for name in result.snapshot.shared if name.startswith("version/"))
    assert kept == ["version/2", "version/3"]  # from which clients 2 and 1 train when round 3 ends
    versions = law(Fed(clients=3, n=36), BY_HAND)
    for name in kept:
        assert distance(result.snapshot.shared[name], vector(versions[int(name[-1])])) < EXACT


def test_a_client_that_begins_again_from_one_version_goes_through_other_batches():
    """One client, two updates a buffer: the second one is not the first one again."""
    work = Fed(clients=1, n=36)
    result = train(work, FedBuff(buffer=2, concurrency=1, local_steps=3), workers=1, epochs=1)
    start = drawn(work)
    same = trained(work, start, work.data(), 0, 0, 0, steps=3)
    assert distance(result.model(), same) > 1e-4
    assert cohorts(result)[0]["trained"] == ["0", "0"]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"buffer": 0}, "buffer"),
        ({"buffer": True}, "buffer"),
        ({"concurrency": 0}, "concurrency"),
        ({"server_lr": 0}, "server_lr"),
        ({"decay": -1}, "decay"),
        ({"max_staleness": -1}, "max_staleness"),
        ({"rule": "krum(f=1)"}, "rule"),
        ({"enough": 3}, "enough"),
        ({"over_selection": 0.5}, "over_selection"),
        ({"min_replies": 2}, "min_replies"),
    ],
)
def test_bad_options_are_refused(options, field):
    with pytest.raises(ConfigError) as caught:
        FedBuff(**options)
    assert caught.value.data["field"] == field


def test_more_under_way_than_there_are_is_refused_before_anything_starts():
    with pytest.raises(ConfigError, match="there are 9 clients: give at most 9"):
        train(Fed(clients=9), FedBuff(concurrency=10), workers=1, epochs=1)


def test_in_words():
    words = "fedbuff:buffer=3,concurrency=7,max_staleness=4,speed=lognormal(sigma=0.7),local_epochs=2"
    strategy = parse(words)[0].strategy
    assert strategy == FedBuff(
        buffer=3, concurrency=7, max_staleness=4, local_epochs=2, speed={"name": "lognormal", "sigma": 0.7}
    )
    assert parse(wire(parse(words)))[0].strategy == strategy
    assert np.isclose(strategy.weight(50, 3), 0.5)
