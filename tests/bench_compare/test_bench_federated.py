"""`python -m benchmarks federated`: what its runs say as rows, how peers are run, and its own contenders without
Ray."""

import gc
import sys
import time

import pytest
import torch
from rayps_client.errors import ClusterError, ConfigError
from small_work import train

from benchmarks.federated import federated
from benchmarks.federated.federated import SCENES, bench_federated, run_of
from benchmarks.federated.federated_flower import draw_rows, make_model, train_plain_client
from benchmarks.federated.federated_own import (
    Nothing,
    PeerImages,
    Watched,
    WatchedStates,
    on_disk,
    read_records,
    run_bare,
)
from benchmarks.peers import _install, run_script

SMALL = SCENES["train"] | {"clients": 3, "rows": 4, "epochs": 1, "hidden": 5, "workers": 1, "rounds": 7}


def test_the_ends_of_rounds_as_numbers():
    """Two rounds of start, then steps of 2, 3 and 7 seconds."""
    run = run_of(
        100.0,
        {
            "stamps": [104.0, 105.0, 107.0, 110.0, 117.0],
            "cpu": [9, 10, 11, 12.5, 14.5],
            "rss": [1e6, 3e6, 4e6, 4e6, 5e6],
        },
        2,
    )
    assert (run.steady, run.first, run.cpu, run.memory, run.growth) == (3.0, 5.0, 1.5, 3.0, 2.0)
    run = run_of(100.0, {"stamps": [104.0, 105.0, 107.0]}, 2)
    assert (run.steady, run.cpu, run.memory, run.growth) == (2.0, None, None, None)


def test_rows_by_hand(monkeypatch):
    """Contenders take turns; 20 clients on 2 workers in 2, 4, 3 and (bare) 3 seconds a round."""
    asked, seconds = [], {"own": 2.0, "flower": 4.0, "pfl": 3.0, "bare": 3.0}

    def ran(name, command, config, limit):
        asked.append(name)
        stamps = [1000.0 + seconds[name] * k for k in range(1, config["rounds"] + 1)]
        cpu = {"own": [1.2 * k for k in range(len(stamps))], "bare": [2.0 * k for k in range(len(stamps))]}
        return 1000.0, {"stamps": stamps} | ({"cpu": cpu[name]} if name in cpu else {})

    monkeypatch.setattr(federated, "make_command", lambda name, workers, folder: [name])
    monkeypatch.setattr(federated, "run_script", ran)
    own, flower, pfl, alone = bench_federated(["train"], repeats=2, rounds=4)
    assert asked == ["own", "flower", "pfl", "bare", "flower", "pfl", "bare", "own"]
    assert (own.updates_s, own.of_bare, own.times_flower, own.times_pfl) == pytest.approx((10, 0.75, 2.0, 1.5))
    assert (own.first_s, own.first_times_flower) == pytest.approx((10.0, 2.0))
    assert (own.cpu_ms, own.cpu_of_bare, alone.cpu_ms) == pytest.approx((120.0, 2.0 / 2.4, 100.0))
    assert (flower.of_bare, pfl.of_bare) == pytest.approx((3 / 8, 0.5))
    assert (alone.first_s, alone.of_bare, alone.workers, flower.times_flower) == (None, None, 1, None)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"scenes": ["trian"]}, "no scene 'trian'; use some of train"),
        ({"contenders": ["flwr"]}, "no contender 'flwr'"),
        ({"rounds": 0}, "rounds is 0"),
        ({"workers": 0}, "workers is 0"),
    ],
)
def test_bad_options(options, words):
    with pytest.raises(ConfigError, match=words):
        bench_federated(**options)


def test_a_script_that_answers_and_scripts_that_do_not(tmp_path):
    script = tmp_path / "peer.py"
    script.write_text(
        "import json, sys, pathlib, time\nconfig = json.loads(sys.argv[1])\ntime.sleep(config['sleep'])\n"
        "print('what went wrong')\npathlib.Path(sys.argv[2]).write_text(config['out'])\n"
    )
    before = time.time()
    began, out = run_script("peer", [sys.executable, str(script)], {"sleep": 0, "out": "[1, 2]"}, 60.0)
    assert before <= began <= time.time() and out == [1, 2]
    with pytest.raises(ClusterError, match=r"peer did not end within 0\.5 s"):
        run_script("peer", [sys.executable, str(script)], {"sleep": 60, "out": ""}, 0.5)
    script.write_text("import sys\nprint('what went wrong')\nsys.exit(3)\n")
    with pytest.raises(ClusterError, match="peer failed:\nwhat went wrong"):
        run_script("peer", [sys.executable, str(script)], {}, 60.0)
    with pytest.raises(ConfigError, match="omit flower from --contenders"):
        _install("flower", [sys.executable, str(script)])


def test_own_contenders_do_what_the_peers_do(tmp_path):
    """One client, one round: the bits of the bare loop but for the order of its rows, which has one batch here."""
    gc.collect()
    before = on_disk()  # of tests in this process whose runs are not collected yet
    config = SMALL | {"clients": 1, "batch": 4, "epochs": 3}
    result = train(PeerImages(config), Watched(local_epochs=3, log=str(tmp_path / "log")), workers=2, epochs=1)
    torch.manual_seed(0)
    net = make_model(5)
    x, y = draw_rows(0, config)
    train_plain_client(net, x, y, config)
    for ours, theirs in zip(result.model().parameters(), net.parameters(), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)
    found = read_records(tmp_path / "log")
    assert {key: len(values) for key, values in found.items()} == {"stamps": 1, "cpu": 1, "rss": 1, "disk": 1}
    assert found.pop("disk") == [before] and all(value > 0 for values in found.values() for value in values)


def test_what_states_take_on_disk_is_seen(tmp_path):
    """Three clients' states of 3.97 KB model, on one worker, in a file that is nowhere to be found by name."""
    gc.collect()
    before = on_disk()
    result = train(PeerImages(SMALL), WatchedStates(log=str(tmp_path / "log")), workers=1, epochs=2)
    size = sum(4 * parameter.numel() for parameter in result.model().parameters())
    first, second = (held - before for held in read_records(tmp_path / "log")["disk"])
    assert 3 * size < first <= second < 3 * size + 100_000


def test_clients_that_do_nothing_leave_the_model(tmp_path):
    result = train(PeerImages(SMALL | {"hidden": 0}), Nothing(log=str(tmp_path / "log")), workers=2, epochs=2)
    torch.manual_seed(0)
    begun = make_model(0)
    for ours, theirs in zip(result.model().parameters(), begun.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert result.history["replied"].to_pylist() == [3, 3]


def test_the_bare_loop_says_when_each_round_ended():
    told = run_bare(SMALL)
    assert len(told["stamps"]) == len(told["cpu"]) == 7 and told["stamps"] == sorted(told["stamps"])
