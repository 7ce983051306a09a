import pytest

from rayps.core.job.records import ROUND_FIELDS
from rayps.core.metrics import COLUMNS, KEPT_ROUNDS, Rounds, Throughput, make_history


def point(rank, number, loss=1.0, samples=2, lead=0, **more):
    return {
        "kind": "round",
        "round": number,
        "rank": rank,
        "epoch": number // 10,
        "loss": loss,
        "samples": samples,
        "seconds": 0.5,
        "compute": 0.25,
        "wait": 0.125,
        "move": 0.0,
        "bytes": 8,
        "lead": lead,
        **more,
    }


def evaluation(rank, number, **sums):
    return {"kind": "evaluation", "round": number, "rank": rank, "sums": sums}


def test_a_round_is_given_out_once_all_have_spoken():
    rounds = Rounds(2, 7, "all_reduce")
    assert rounds.add([point(0, 0, 1.0, 3)]) == []
    [merged] = rounds.add([point(1, 0, 5.0, 1, lead=2)])
    assert merged["loss"] == 2.0
    assert merged["samples"] == 4
    assert merged["bytes"] == 16
    assert merged["seconds"] == 0.5
    assert merged["staleness"] == {"0": 1, "2": 1}
    assert (merged["generation"], merged["strategy"], merged["round"]) == (7, "all_reduce", 0)
    assert rounds.flush() == []


def test_rounds_come_in_order_and_once():
    rounds = Rounds(2, 1, "x")
    points = [point(r, n) for r in (1, 0) for n in (2, 0, 1)]
    assert [p["round"] for p in rounds.add(points)] == [0, 1, 2]
    assert rounds.add(points[:3]) == []


def test_who_had_no_samples_has_no_loss():
    rounds = Rounds(2, 1, "x")
    [merged] = rounds.add([point(0, 0, None, 0), point(1, 0, 3.0, 2)])
    assert (merged["loss"], merged["samples"]) == (3.0, 2)
    [merged] = rounds.add([point(0, 1, None, 0), point(1, 1, None, 0)])
    assert (merged["loss"], merged["samples"]) == (None, 0)


def test_what_a_lost_worker_never_told_is_flushed():
    rounds = Rounds(2, 1, "x")
    assert [p["round"] for p in rounds.add([point(0, 0), point(0, 1), point(1, 1)])] == [1]
    assert [(p["round"], p["samples"]) for p in rounds.flush()] == [(0, 2)]
    assert rounds.flush() == []


def test_it_does_not_grow_without_end():
    rounds = Rounds(2, 1, "x")
    given = rounds.add([point(0, n) for n in range(KEPT_ROUNDS + 50)])
    assert [p["round"] for p in given] == list(range(50))


def test_evaluations_are_means_over_all_samples():
    rounds = Rounds(2, 1, "x")
    assert rounds.add([evaluation(0, 5, accuracy=(3.0, 4), loss=(1.0, 4))]) == []
    [merged] = rounds.add([evaluation(1, 5, accuracy=(1.0, 1), rare=(0.0, 0))])
    assert merged["metrics"] == {"accuracy": 0.8, "loss": 0.25}
    assert merged["round"] == 5


def test_history_keeps_the_last_telling_of_a_round():
    def merged(number, loss, generation=1, staleness=None):
        return {
            "kind": "round",
            "round": number,
            "epoch": 0,
            "time": 1.0,
            "loss": loss,
            "samples": 2,
            "seconds": 0.1,
            "compute": 0.1,
            "wait": 0.0,
            "move": 0.0,
            "bytes": 8,
            "staleness": staleness or {"0": 2},
            "generation": generation,
            "strategy": "all_reduce",
        }

    table = make_history(
        [
            merged(0, 3.0),
            merged(2, 9.0),
            merged(1, 2.0, 2, {"0": 1, "3": 1}),
            {"kind": "evaluation", "round": 2, "time": 1.0, "metrics": {"accuracy": 0.5}},
            merged(2, 1.0, 2),
        ]
    )
    assert table.column("round").to_pylist() == [0, 1, 2]
    assert table.column("loss").to_pylist() == [3.0, 2.0, 1.0]
    assert table.column("generation").to_pylist() == [1, 2, 2]
    assert table.column("staleness").to_pylist() == [0, 3, 0]
    assert table.column("evaluation_accuracy").to_pylist() == [None, 0.5, None]
    assert make_history([]).num_rows == 0


def test_throughput_is_over_the_window():
    rate = Throughput(window=5.0)
    assert rate.rate is None
    rate.add(100, 0.0)
    assert rate.rate is None
    rate.add(50, 1.0)
    rate.add(50, 2.0)
    assert rate.rate == pytest.approx(50.0)
    for second in range(3, 30):
        rate.add(10, float(second))
    assert rate.rate == pytest.approx(10.0)
    still = Throughput()
    still.add(1, 1.0)
    still.add(1, 1.0)
    assert still.rate is None


def test_an_evaluation_lacks_the_share_of_one_who_died_before_it_was_heard():
    def evaluation(rank, loss):
        return {"kind": "evaluation", "round": 1, "rank": rank, "sums": {"loss": (loss, 2)}}

    rounds = Rounds(3, 1, "async")
    assert not [p for p in rounds.add([evaluation(0, 2.0), evaluation(2, 6.0)]) if p["kind"] == "evaluation"]
    assert not [p for p in rounds.add([point(1, 0)]) if p["kind"] == "evaluation"]  # its share may still come
    found = [p for p in rounds.add([point(1, 1)]) if p["kind"] == "evaluation"]
    assert [(p["round"], p["metrics"], p["missing"]) for p in found] == [(1, {"loss": 2.0}, [1])]


def test_pulls_of_rows_are_told_where_there_are_tables():
    rounds = Rounds(2, 1, "hybrid")
    merged = rounds.add([point(0, 0, pull=0.5, pull_hidden=0.25), point(1, 0, pull=0.25, pull_hidden=0.25)])
    assert (merged[0]["pull"], merged[0]["pull_hidden"]) == (0.375, 0.25)
    assert make_history(merged)["pull_hidden"].to_pylist() == [0.25]
    [merged] = Rounds(1, 1, "all_reduce").add([point(0, 0)])
    assert "pull" not in merged and "pull" not in make_history([merged]).column_names


def test_after_a_mending_what_was_said_of_later_rounds_is_void_and_of_earlier_ones_it_may_come_yet():
    rounds = Rounds(2, 1, "all_reduce")
    early = [point(0, n) for n in range(4)] + [point(1, 0), point(1, 1), evaluation(0, 2, loss=(1.0, 1))]
    assert [p["round"] for p in rounds.add(early)] == [0, 1]
    rounds.restart(2, 3)  # rank 1 died after round 3 had begun; what it had said of round 2 comes with its state
    given = rounds.add([point(1, 2), evaluation(1, 2, loss=(3.0, 1))])
    assert [(p["kind"], p["round"]) for p in given] == [("round", 2), ("evaluation", 2)]
    assert given[0]["generation"] == 2
    assert given[1]["metrics"] == {"loss": 2.0}
    assert "missing" not in given[1]
    assert rounds.add([point(1, 3)]) == []  # rank 0 has to say it again
    assert [p["round"] for p in rounds.add([point(0, 3)])] == [3]
    assert rounds.flush() == []


def test_the_fields_of_a_round_are_the_columns_of_the_history():
    assert {"kind", *(name for name, _ in COLUMNS)} == ROUND_FIELDS
