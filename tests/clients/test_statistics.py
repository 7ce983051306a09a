"""Federated statistics: beside numpy on all rows, beside the formula of the noise, and the bound of each client."""

import itertools
import threading

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from client_site import Clinic, until
from rayps_client.errors import CheckpointError, ConfigError, RaypsError, WorkloadError
from rayps_client.exchange.connection import ServiceConnection
from rayps_client.exchange.signed_orders import ClientToken
from rayps_client.exchange.update_codec import decode_start
from rayps_client.machine.client_folder import ClientFolder
from rayps_client.process import ClientProcess
from rayps_client.statistic_columns import WITHIN
from rayps_client.stats import crossing, cumulative_fit, histogram, mean, quantile
from small_work import train
from statistics_work import CLIENTS, EDGES, FILE, QUERIES, Hospital, Pooled, data, rows

import rayps
from rayps.clients.workload_trainer import WorkloadTrainer, own_data
from rayps.cluster.local import LocalCluster
from rayps.federated.remote_codec import encode_parameters, layout_rows
from rayps.privacy.noise import KeyedNoise
from rayps.strategies.catalogue import parse, wire
from rayps.tensors.flat import FlatModel
from rayps.workload.statistics_workload import Accumulators


def computed(source, queries, **options):
    cluster = LocalCluster()
    try:
        return rayps.statistics(source, queries, cluster=cluster, progress=False, **options)
    finally:
        cluster.close()


def pooled(x, weights, q=(0.25, 0.5)):
    """The answers of QUERIES with numpy, for rows with these weights: exact, and the quantiles up to a cell."""
    weights = weights / weights.sum()
    order = np.argsort(x[:, 2])
    below = np.cumsum(weights[order])
    return (
        float(weights @ np.clip(x[:, 0], 0, 110)),
        np.histogram(np.clip(x[:, 1], EDGES[0], EDGES[-1]), EDGES, weights=weights)[0],
        [float(np.clip(x[order, 2], 0, 10)[np.searchsorted(below, each)]) for each in q],
    )


# ---- the queries

VALUES = np.array([-1e300, -5.0, 0.0, 1e-9, 3.3, 9.999, 10.0, 18.5, 55.0, 110.0, 1e300])


@pytest.mark.parametrize(
    "query",
    [
        mean(0, 110),
        mean(-3, -1),
        histogram(EDGES),
        histogram((0, 1)),
        quantile(0.5, 0, 10),
        quantile(0.9, -1, 1, bins=2),
    ],
    ids=["mean", "negative", "histogram", "one bin", "quantile", "two cells"],
)
def test_no_row_has_a_vector_with_a_norm_above_1(query):
    vectors = query.encode(VALUES)
    assert vectors.shape == (len(VALUES), query.size) and vectors.dtype == np.float64
    assert np.linalg.norm(vectors, axis=1).max() <= 1 + 1e-12


@pytest.mark.parametrize("bins", [2, 8, 64])
def test_the_fit_returns_the_fractions_of_exact_nodes(bins):
    values = torch.rand(500, dtype=torch.float64, generator=torch.Generator().manual_seed(bins))
    fractions = np.histogram(values.numpy(), bins, (0, 1))[0] / 500
    nodes = quantile(0.5, 0, 1, bins=bins).encode(values.numpy()).mean(axis=0)
    assert np.allclose(cumulative_fit(bins) @ nodes, np.cumsum(fractions), atol=1e-12)


def test_crossing_minimizes_the_check_loss():
    made = np.random.default_rng(3)
    for _ in range(40):
        heights = np.concatenate([[0.0], made.normal(0.5, 0.6, 6)])  # noised: neither increasing nor in [0, 1]
        q = float(made.uniform(0.05, 0.95))
        t = np.linspace(0, 6, 60_001)
        gap = np.interp(t, np.arange(7), heights) - q
        integral = np.concatenate([[0.0], np.cumsum((gap[1:] + gap[:-1]) / 2) * 1e-4])
        found = crossing(heights, q)
        assert np.interp(found, t, integral) <= integral.min() + 1e-6


def test_crossing_of_an_increasing_function_is_its_inverse():
    assert crossing(np.array([0.0, 0.5, 1.0]), 0.75) == pytest.approx(1.5)
    assert crossing(np.array([0.0, 1.0, 1.0]), 0.5) == pytest.approx(0.5)
    assert crossing(np.array([0.0, 0.0, 1.0]), 0.25) == pytest.approx(1.25)


@pytest.mark.parametrize("query", [mean(0, 110), histogram(EDGES), quantile((0.3, 0.5), 0, 10, bins=16)])
def test_the_errors_are_the_standard_deviations_of_the_noise(query):
    x = np.random.default_rng(5).normal(8, 5, 4000)
    exact, tau = query.encode(x).mean(axis=0), 0.01
    made = np.random.default_rng(6)
    draws = []
    for _ in range(600):
        sums, count = exact + made.normal(0, tau, query.size), 1 + made.normal(0, tau)
        draws.append(query.decode(sums / count, tau / count))
    spread = np.std([each.values for each in draws], axis=0)
    claimed = np.mean([each.errors for each in draws], axis=0)
    assert np.allclose(spread, claimed, rtol=0.15)
    assert not query.decode(exact, 0.0).errors.any()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: mean(5, 5), "low below high"),
        (lambda: mean(0, float("nan")), "low below high"),
        (lambda: histogram((1,)), "at least two numbers"),
        (lambda: histogram((1, 1)), "numbers that increase"),
        (lambda: quantile(1.0, 0, 1), "above 0 and below 1"),
        (lambda: quantile(0.5, 0, 1, bins=48), "a power of 2"),
        (lambda: quantile(0.5, 0, 1, bins=1024), "from 2 to 512"),
    ],
)
def test_a_query_that_cannot_be_computed_is_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


# ---- without noise


@pytest.mark.parametrize(("by", "workers"), [("rows", 1), ("rows", 2), ("clients", 1), ("clients", 2)])
def test_without_noise_the_answers_are_those_of_numpy(by, workers):
    x, who = rows()
    found = computed(data(x, who), QUERIES, by=by, workers=workers)
    age, bmi, doses = pooled(x, np.ones(len(x)) if by == "rows" else 1 / np.bincount(who)[who])
    assert found.values["age"] == pytest.approx(age, abs=1e-11)
    assert found.values["bmi"] == pytest.approx(bmi, abs=1e-12)
    assert np.abs(np.array(found.values["dose"]) - doses).max() <= 10 / 16
    assert found.errors == {"age": 0.0, "bmi": [0.0] * 4, "dose": [0.0] * 2} and found.privacy is None
    assert "loss" not in found.run.metrics and found.run.history.column("loss").to_pylist() == [None]
    assert (
        found.run.metrics["age"] == found.values["age"] and found.run.metrics["bmi_18.5..25"] == found["bmi"].values[1]
    )


def test_a_client_counts_as_at_most_so_many_rows():
    x, who = rows()
    found = computed(data(x, who), QUERIES, by="rows", rows_per_client=25)
    sizes = np.bincount(who)
    assert sizes.max() > 25 > sizes.min()
    age, bmi, _ = pooled(x, (np.minimum(sizes, 25) / sizes)[who])
    assert found.values["age"] == pytest.approx(age, abs=1e-11) and found.values["bmi"] == pytest.approx(bmi, abs=1e-12)


def in_a_file(folder, **options):
    x, who = rows()
    columns = {"age": x[:, 0], "bmi": x[:, 1], "dose": x[:, 2], "hospital": who}
    pq.write_table(pa.table(columns), folder / "rows.parquet")
    features = ["age", "bmi", "dose"]
    return rayps.data.parquet(folder / "rows.parquet", features=features, client="hospital", dtype="float64", **options)


def test_the_columns_of_a_parquet_file_are_found_by_name(tmp_path):
    x, _ = rows()
    found = computed(in_a_file(tmp_path), {"dose": mean(0, 10), "years": mean(0, 110, column="age")}, by="rows").values
    assert found["dose"] == pytest.approx(np.clip(x[:, 2], 0, 10).mean())
    assert found["years"] == pytest.approx(np.clip(x[:, 0], 0, 110).mean())


def test_an_unknown_column_is_named_before_a_worker_starts(tmp_path, monkeypatch):
    source = in_a_file(tmp_path)
    monkeypatch.setattr(Accumulators, "forward", None)
    with pytest.raises(WorkloadError, match="needs the column 'wieght', and the rows have age, bmi, dose"):
        computed(source, {"wieght": mean(0, 110)})
    with pytest.raises(WorkloadError, match=r"needs the column 'doze', .*did you mean 'dose'"):
        computed(data(*rows()), {"doze": mean(0, 9)}, columns=("age", "bmi", "dose"))
    work = Hospital(queries={"dose": mean(0, 9), "age": mean(0, 9), "bmi": mean(0, 9)})
    work.data = lambda: source
    with pytest.raises(WorkloadError, match=r"set `columns` to \('age', 'bmi', 'dose'\)"):
        own_data(work, None)


class Derived(rayps.Workload):
    """A workload that is trained elsewhere, with columns that are functions of its rows."""

    def model(self):
        return torch.nn.Linear(3, 1).double()

    def data(self):
        return data(*rows())

    def loss(self, model, batch):
        return model(batch.x).mean()

    def statistics(self, batch):
        return {
            "product": batch.x[:, 1] * batch.x[:, 2],
            "old": (batch.x[:, 0] > 65).double(),
            "log": batch.x.log()[:, 0],
        }


def test_columns_may_be_functions_of_the_rows():
    x, _ = rows()
    queries = {
        "old": mean(0, 1),
        "mean": mean(0, 300, column="product"),
        "half": quantile(0.5, 0, 300, column="product"),
    }
    found = computed(Derived(), queries, by="rows").values
    assert found["old"] == pytest.approx(np.mean(x[:, 0] > 65))
    assert found["mean"] == pytest.approx(np.clip(x[:, 1] * x[:, 2], 0, 300).mean())
    assert abs(found["half"] - np.median(x[:, 1] * x[:, 2])) <= 300 / 64


# ---- with noise


def sent(x, queries, share=1.0):
    """What a client with the rows x [n, columns] sends."""
    parts = [query.encode(x[:, k]).mean(axis=0) for k, query in enumerate(queries.values())]
    return share * np.concatenate([[1.0], *parts]) * WITHIN / np.sqrt(len(queries) + 1)


@pytest.mark.parametrize("by", ["clients", "rows"])
def test_with_seeded_noise_the_answers_are_the_formula(by):
    x, who = rows()
    z, most = 0.3, 25 if by == "rows" else None
    privacy = rayps.dp(noise_multiplier=z, noise="seeded", sampling="all")
    found = computed(data(x, who), QUERIES, by=by, rows_per_client=most, privacy=privacy, workers=2)
    sizes = np.bincount(who)
    shares = np.ones(CLIENTS) if most is None else np.minimum(sizes, most) / most
    total = sum(sent(x[who == k], QUERIES, shares[k]) for k in range(CLIENTS))
    total = (total + KeyedNoise.of_seed(0).normal(len(total) + 1, z, 0)[:-1]) / CLIENTS  # the last element has no use
    at, tau = 1, z / CLIENTS / total[0]
    for name, query in QUERIES.items():
        wanted = query.decode(total[at : at + query.size] / total[0], tau)
        assert np.allclose(found[name].values, wanted.values, atol=1e-9)
        assert np.allclose(found[name].errors, wanted.errors, atol=1e-9) and found[name].errors.all()
        at += query.size
    assert found.privacy["releases"] == 1 and found.privacy["noise_multiplier"] == z and not found.privacy["proves"]


@pytest.mark.parametrize("share", [1.0, 0.37])
def test_no_client_changes_the_sum_by_more_than_the_clip(share):
    made = np.random.default_rng(9)
    for scale, (q, r) in itertools.product((1e-3, 1, 1e9), ((1, 1), (40, 3))):
        queries = {f"a{k}": each for k, each in enumerate([*QUERIES.values(), mean(-1, 2)][: 2 + r])}
        vector = sent(made.normal(0, scale, (q, len(queries))), queries, share)
        assert np.linalg.norm(vector) <= share * WITHIN * (1 + 1e-12) < 1 - 2e-6  # below the margin of a private clip


def test_the_noise_is_found_from_epsilon_and_the_claim_is_returned():
    x, who = rows()
    queries = {"old age": mean(0, 110, column="age")}
    privacy = rayps.dp(epsilon=20.0, rounds=1, delta=1e-3)
    found = computed(data(x, who), queries, columns=("age", "bmi", "dose"), privacy=privacy)
    assert 19 < found.privacy["epsilon"] <= 20.0 and found.privacy["proves"] and found.privacy["unit"] == "client"
    assert found.errors["old age"] > 0
    assert "differentially private" in repr(found)


def test_noise_above_the_number_of_clients_gives_no_answer():
    x, who = rows()
    privacy = rayps.dp(noise_multiplier=1e6, noise="seeded")
    with pytest.raises(ConfigError, match="the noise exceeds the number of clients"):
        for seed in range(20):  # the noised count is negative for half of the seeds
            computed(data(x, who), {"age": mean(0, 110)}, columns=("age", "bmi", "dose"), privacy=privacy, seed=seed)


ONE = rayps.dp(noise_multiplier=0.4, delta=1e-3)


def asked(name, **options):
    return computed(data(*rows()), {name: mean(0, 110)}, columns=("age", "bmi", "dose"), **options)


def test_calls_that_share_a_ledger_are_charged_together_until_the_budget_is_spent(tmp_path):
    privacy = rayps.dp(epsilon=20.0, rounds=2, delta=1e-3)
    first, second = (asked(name, privacy=privacy, ledger=tmp_path).privacy for name in ("age", "bmi"))
    assert (first["releases"], second["releases"]) == (1, 2) and "2 noised sums" in second["claim"]
    assert first["epsilon"] < 15 < 19 < second["epsilon"] <= 20
    with pytest.raises(ConfigError, match=r"epsilon=20 is spent: the 2 releases .* 0\.0\d+ is left.* give epsilon="):
        asked("dose", privacy=privacy, ledger=tmp_path)
    more = asked("dose", privacy=rayps.dp(noise_multiplier=2.0, epsilon=30.0, delta=1e-3), ledger=tmp_path)
    assert more.privacy["releases"] == 3 and more.privacy["epsilon"] > second["epsilon"]  # the ledger is free again


def test_a_call_that_is_repeated_from_its_checkpoint_returns_its_answer_and_its_account(tmp_path):
    options = {"privacy": ONE, "checkpoint": tmp_path / "age", "ledger": tmp_path}
    first = asked("age", **options)
    again = asked("age", **options, resume=True)
    assert again.values == first.values and again.privacy == first.privacy and again.privacy["releases"] == 1
    for options["resume"] in (False, True):
        with pytest.raises(CheckpointError, match="give other queries another checkpoint="):
            asked("bmi", **options)


def test_a_ledger_is_for_private_runs(tmp_path):
    with pytest.raises(ConfigError, match="no privacy, so it has no releases"):
        asked("age", ledger=tmp_path)


def test_noise_that_hides_the_answers_warns_of_the_answers():
    """A job of statistics has no model."""
    found = asked("age", privacy=rayps.dp(noise_multiplier=30.0, noise="seeded"), seed=2)
    (said,) = [event["message"] for event in found.run.events if event["kind"] == "warning"]
    assert "so the answers will hardly say anything: for 1 query (3 numbers), 7 clients are few" in said
    assert "model" not in said and "model" not in str(found.privacy)


class Ages(rayps.StatisticsWorkload):
    """One query of the first of three columns."""

    columns = ("age", "bmi", "dose")

    def __init__(self):
        self.queries = {"age": mean(0, 110)}

    def data(self):
        return data(*rows())


def test_a_second_round_releases_nothing():
    result = train(Ages(), rayps.Statistics(privacy=rayps.dp(noise_multiplier=0.5)), epochs=4)
    assert result.history.num_rows == 1 and result.privacy["releases"] == 1
    assert isinstance(result.model(), Accumulators) and result.metrics["age_error"] > 0


# ---- what is refused


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ("statistics:rule=median", "a statistic is a ratio of sums"),
        ("statistics:clip=2.0", "bound each client already"),
        ("statistics:finetune=1", "no model is trained"),
        ("statistics:buffers=keep", "there are none"),
        ("statistics:by=people", "by is 'people'"),
        ("statistics:rows_per_client=5", "give by=rows"),
        ("statistics:by=rows,privacy=dp(noise_multiplier=1)", "give rows_per_client"),
        ("statistics:privacy=dp(noise_multiplier=1,clip=2.0)", "leave clip out"),
        ("statistics:privacy=dp(noise_multiplier=1,clip=adaptive)", "leave clip out"),
        ("statistics:privacy=dp(noise_multiplier=1,mechanism=tree)", "one release"),
    ],
)
def test_options_that_do_not_fit_are_refused(strategy, message):
    with pytest.raises(ConfigError, match=message):
        parse(strategy)


def test_statistics_and_training_are_not_mixed():
    x, who = rows()
    with pytest.raises(ConfigError, match="belong together"):
        train(Derived(), "statistics", epochs=1)
    with pytest.raises(ConfigError, match="belong together"):
        train(Ages(), "fedavg", epochs=1)
    with pytest.raises(WorkloadError, match="rows of 3 values, but 1 columns"):
        computed(data(x, who), {"age": mean(0, 110)})
    with pytest.raises(WorkloadError, match="needs the column 'weight'"):
        computed(data(x, who), {"weight": mean(0, 110)}, columns=("age", "bmi", "dose"))
    queries = {"log": mean(0, 1), "product": mean(0, 1)}
    with pytest.raises(WorkloadError, match="not finite"):
        computed(Derived(), queries)


def test_the_strategy_travels_as_json():
    strategy = rayps.Statistics(by="rows", rows_per_client=9, privacy=rayps.dp(noise_multiplier=2.0))
    assert parse(wire(parse(strategy)))[0].strategy == strategy


# ---- real clients


@pytest.fixture
def clinic(tmp_path):
    (tmp_path / "hospital.py").write_text(FILE)
    made = Clinic(tmp_path)
    yield made
    made.close()


def joined(clinic, job, workload, token):
    """A real client as a thread, and the list of its errors."""
    found, errors = ClientToken.read(token), []
    folder = ClientFolder(clinic.path / f"h{workload.k}-{len(workload.queries)}")
    connection = ServiceConnection(clinic.url, token, 20.0, lambda text: None)
    name = f"h{workload.k}"
    client = ClientProcess(WorkloadTrainer(workload, workload.data()), found, job.id, connection, folder, name=name)

    def run():
        try:
            client.run()
        except RaypsError as error:
            errors.append(error)
        connection.close()
        folder.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    until(lambda: name in clinic.joined(job) or errors)
    return thread, errors


@pytest.mark.parametrize(
    ("private", "secure"),
    [("", ""), (",privacy=dp(noise_multiplier=0.2,noise=seeded)", ""), ("", ",secure=secagg(clip=1.0,max_weight=1)")],
    ids=["exact", "noised", "masked"],
)
def test_real_clients_give_the_answers_of_simulated_ones(clinic, private, secure):
    text = "statistics:by=rows,rows_per_client=30" + private
    job = clinic.user.submit(
        "hospital.py:Elsewhere",
        working_dir=clinic.path,
        strategy=f"{text}{secure},clients=remote(least=3,wait=100)",
        epochs=1,
    )
    token = clinic.invite(job)["token"]
    hospitals = [joined(clinic, job, Hospital(k), token) for k in range(3)]
    assert clinic.trained(job) is not None
    for thread, errors in hospitals:
        thread.join(60)
        assert not errors
    x, who = rows()
    some = who < 3
    simulated = train(Pooled(x[some], who[some]), text, epochs=1)
    found = job.refresh().data["metrics"]
    if not secure:
        assert found == simulated.metrics
        return
    assert found.keys() == simulated.metrics.keys() and found != simulated.metrics  # updates were rounded
    assert found["age"] == pytest.approx(simulated.metrics["age"], abs=0.01)
    assert found["bmi_25..30"] == pytest.approx(simulated.metrics["bmi_25..30"], abs=1e-3)


def test_a_client_with_other_bounds_is_refused():
    """The vectors have the same lengths, so that only the names of the parameters tell the difference."""
    ours, theirs = (FlatModel(Accumulators({"bmi": histogram(edges)})) for edges in ((10, 18.5, 60), (10, 19.5, 60)))
    raw = encode_parameters(ours.vector, ours.layout, {}, {})
    with pytest.raises(WorkloadError, match=r"the job has bmi histogram\(edges=10;18_5;60\) .*none of that name"):
        decode_start(raw, layout_rows(theirs.layout))
