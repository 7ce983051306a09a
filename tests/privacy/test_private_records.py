"""What a private job writes is a function of its released sums: with these fixed, other secret draws change no byte.

Each case runs one small job twice: of one seed, with other secret draws (who takes part, which rows, the noise), and
with every released sum replaced by one fixed value. All files must then be equal, but for the times in them: `CLOCK`.
"""

import json
import shutil
import threading
from dataclasses import fields

import numpy as np
import pytest
import torch
from federated_work import Fed
from rayps_client.errors import ConfigError, WorkloadError
from service_site import Site
from small_work import rows, train
from statistics_work import Pooled
from statistics_work import rows as rows_of_hospitals
from torch import nn

import rayps
from rayps.cluster.local import LocalCluster, until
from rayps.comm.ring.choose_algorithm import Autotuner
from rayps.core.job.job_status import Status
from rayps.core.strategy.nested_options import options_of
from rayps.federated.combine_replies import Aggregate
from rayps.federated.population.cohort import number
from rayps.federated.strategy_interface import FederatedView
from rayps.privacy.ledger import KEY
from rayps.privacy.noise import KeyedNoise, SecretNoise
from rayps.privacy.options import PrivacySpec, privacy_in
from rayps.runtime.driver.driver import Driver
from rayps.runtime.driver.workload_job import WorkloadJob
from rayps.runtime.records.journal import Journal
from rayps.strategies.catalogue import CATALOGUE, parse, wire
from rayps.strategies.job import JobSpec
from rayps.tensors.checkpoints import checkpoint
from rayps.worker.noised_sums import NoisedSums
from rayps.worker.rows import private_rows

CLIENTS, ROUNDS = 40, 4

# ---- the cases: every strategy and every option that privacy accepts, from the catalogue

# the options whose values do not follow from their type: one example, or all options that belong together
EXAMPLES = {
    "compression": "int8",
    "replica": "pipeline(stages=2)",
    "replicas": {"shards": 2, "replicas": 1},
    "shard": "gradients",
    "slice_backup": {"shard": "optimizer", "slice_backup": False},
    "late_limit": {"backup": 1, "late_limit": 1},
    "replace_late": {"backup": 1, "replace_late": True},
    "rule": "median",
    "attack": "sign_flip(clients=4)",
    "speed": "lognormal",
    "available": "diurnal",
    "deadline": {"deadline": 0.005, "speed": "lognormal"},
    "buffers": "keep",
    "report": "clients",
    "clients": "remote(least=3)",
    "secure": {"clients": "remote(least=3)", "secure": "secagg(clip=1.0,max_weight=1)"},
    "upload": {"clients": "remote(least=3)", "upload": "int8"},
    "download": {"clients": "remote(least=3)", "download": "int8"},
    "client_evaluation": {"clients": "remote(least=3)", "client_evaluation": True},
    "metric_bound": {
        "clients": "remote(least=3)",
        "client_evaluation": True,
        "secure": "secagg(clip=1.0,max_weight=1)",
        "metric_bound": 2.0,
    },
    "private": "3",
    "by": {"by": "rows", "rows_per_client": 20},
    "rows_per_client": {"by": "rows", "rows_per_client": 20},
}
# the same for the options of dp
OF_DP = {
    "clip": "adaptive",
    "epsilon": 30.0,
    "rounds": {"noise_multiplier": None, "epsilon": 30.0, "rounds": 3},
    "mechanism": "tree",
    "sampling": "fixed",
    "noise": "seeded",
    "noise_by": "clients",
    "honest": {"noise_by": "clients", "honest": 0.9},
    "quantile": {"clip": "adaptive", "quantile": 0.7},
    "clip_lr": {"clip": "adaptive", "clip_lr": 0.4},
    "first_clip": {"clip": "adaptive", "first_clip": 0.4},
    "bit_noise": {"clip": "adaptive", "bit_noise": 2.0},
    "restart": {"mechanism": "tree", "restart": 2},
}
ON_GPUS = {"shard_resources"}  # where a shard is has no part in what its job writes
PRIVACY = {"name": "dp", "noise_multiplier": 1.1, "delta": 1e-2}
SAMPLINGS = ({}, {"sampling": "fixed"}, {"sampling": "all"}, {"mechanism": "tree"})  # tried in this order


def example(option, given):
    """Return options by name, in which `option` has another value than its default; `given` are examples by name."""
    found = given.get(option.name)
    if found is None:
        kind = str(option.type).partition(" ")[0]
        assert kind in ("int", "float", "bool"), f"give an example of the option {option.name} in EXAMPLES or OF_DP"
        half = option.default / 2 if isinstance(option.default, float) else None
        found = half or {"float": 0.5, "int": 2, "bool": not option.default}[kind]
    return found if isinstance(found, dict) else {option.name: found}


def asked(name, options, privacy):
    """Return a private strategy in wire form, if it is accepted and its draws are secret; else None."""
    fraction = {"fraction": 0.3} if "fraction" in map(name_of, options_of(CATALOGUE[name])) else {}
    given = {key: value for key, value in {**PRIVACY, **privacy}.items() if value is not None}
    try:
        [phase] = parse({"name": name, **fraction, **options, "privacy": given})
    except ConfigError:
        return None
    return wire([phase]) if privacy_in(phase.strategy).proves and not has_real_clients(phase.strategy) else None


def name_of(option):
    return option.name


def own_options(kind):
    return [option for option in options_of(kind) if option.name not in {"privacy", *ON_GPUS}]


def has_real_clients(strategy):
    """Real clients come and go: that they take part is visible, and no draw decides it."""
    return isinstance(strategy, FederatedView) and strategy.federation.joining is not None


class Case:
    """Options that are accepted together: one job tries several."""

    def __init__(self, name, options, privacy):
        self.name, self.options, self.privacy, self.tried = name, options, privacy, []

    @property
    def strategy(self):
        return asked(self.name, self.options, self.privacy)

    def __str__(self):
        return ":".join([self.name, *self.tried])

    def takes(self, option, options, privacy):
        """Try another option in this case if it can be; return whether it can."""
        for mine, others in ((self.options, options), (self.privacy, privacy)):
            if any(mine.get(key, value) != value for key, value in others.items()):
                return False
        if self.privacy.keys() & {"sampling", "mechanism"} != privacy.keys() & {"sampling", "mechanism"}:
            return False  # another way of sampling than it would be tried with alone
        options, privacy = {**self.options, **options}, {**self.privacy, **privacy}
        if asked(self.name, options, privacy) is None:
            return False
        self.options, self.privacy = options, privacy
        self.tried.append(option)
        return True


def cases_of(name, known):
    """Return the cases of a strategy, which try its options that are not in `known`, and add these to it.

    An option that several strategies inherit is one object, and tried once.
    """
    kind = CATALOGUE[name]
    found = [Case(name, {}, {})] if asked(name, {}, {}) is not None else []
    wanted = [(option, option.name, example(option, EXAMPLES), {}) for option in own_options(kind)]
    wanted += [(None, f"dp.{next(iter(way.values()))}", {}, way) for way in SAMPLINGS[1:]]
    wanted += [(option, f"dp.{option.name}", {}, example(option, OF_DP)) for option in fields(PrivacySpec)]
    for option, label, options, privacy in wanted:
        family = (kind.loop, label) if label.startswith("dp.") else id(option)
        ways = [privacy] if privacy else SAMPLINGS
        way = next((each for each in ways if asked(name, options, each) is not None), None)
        if family in known or way is None:
            continue
        known.add(family)
        if not any(case.takes(label, options, way) for case in found):
            found.append(Case(name, options, way))
            found[-1].tried.append(label)
    return found


def all_cases():
    known = set()
    return [case for name in PRIVATE for case in cases_of(name, known)]


PRIVATE = [name for name, kind in CATALOGUE.items() if "privacy" in map(name_of, options_of(kind))]
CASES = all_cases()


def test_every_example_is_an_option_that_is_valid_without_privacy():
    """An example that its strategy would refuse anyhow would not ask whether privacy accepts the option."""
    never = {}
    for name in PRIVATE:
        for option in own_options(CATALOGUE[name]):
            try:
                parse({"name": name, **example(option, EXAMPLES)})
            except ConfigError as error:
                never.setdefault(option.name, error.message)
            else:
                never[option.name] = None
    assert {option: why for option, why in never.items() if why} == {}


def test_the_cases_are_those_that_privacy_accepts():
    """They are asked from the catalogue; these are a few of them, by which a broken list would be seen."""
    tried = {(case.name, option) for case in CASES for option in case.tried}
    assert {"fedavg", "fedadam", "fedprox", "statistics", "all_reduce", "parameter_server"} <= {c.name for c in CASES}
    assert not {"scaffold", "fedbuff", "ditto"} & {case.name for case in CASES}
    assert {("fedavg", "dropout"), ("fedavg", "available"), ("parameter_server", "shards")} <= tried
    assert {("fedavg", "dp.clip"), ("fedavg", "dp.tree"), ("all_reduce", "dp.physical_batch")} <= tried
    refused = {("fedavg", "rule"), ("fedavg", "buffers"), ("fedper", "private"), ("all_reduce", "compression")}
    assert not refused & tried


# ---- two runs


class Drawing(Fed):
    """Draws random numbers while it trains, and while it is evaluated on rows that are public."""

    def __init__(self, evaluates=True):
        self.evaluates = evaluates  # with random numbers: those of a process, which two workers on threads share
        self.who = np.repeat(np.arange(CLIENTS), 1 + np.arange(CLIENTS) % 20)
        super().__init__(clients=CLIENTS, n=len(self.who), batch=10)

    def data(self):
        return rayps.data.tensors(*rows(self.n), batch_size=self.batch, client=self.who)

    def model(self):
        return nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.4), nn.Tanh(), nn.Linear(7, 1)).double()

    def evaluation_data(self):
        return rayps.data.tensors(*rows(20, seed=9), batch_size=20)

    def evaluate(self, model, batch):
        found = super().evaluate(model, batch)
        return found | ({"drawn": torch.rand(len(batch.x)).mean()} if self.evaluates else {})


class EachState(rayps.Callback):
    """Makes the workers wait until the state after each evaluation is saved."""

    checkpoint_each_evaluation = True


class Draws:
    """The secret draws of one run, and the fixed values of its released sums."""

    def __init__(self, run, patch):
        self.drawn, self.seeds, source = [], set(), KeyedNoise(f"secret draws of run {run}".encode())

        def uniform(_, size, *at):
            found = source.uniform(size, *at)
            self.drawn.append((at, found.tobytes()))
            return found

        patch.setattr(SecretNoise, "uniform", uniform)
        patch.setattr(SecretNoise, "normal", lambda _, size, std, *at: source.normal(size, std, *at))
        self._fix_sums_of_clients(patch)
        self._fix_sums_of_rows(patch)
        patch.setattr(Autotuner, "_time", lambda *_: 1e-4)  # the ring's choices follow from measured times

    @staticmethod
    def _fix_sums_of_clients(patch):
        combine = Aggregate.combine

        def fixed(self, ring, memory=None):
            found, now = combine(self, ring, memory), self._now
            found.delta = torch.linspace(-0.1, 0.2, self.size, dtype=self.dtype) / (now.round + 1)
            found.mean = now.w_t + found.delta
            found.sums = {name: torch.full_like(value, 0.25) for name, value in found.sums.items()}
            return found

        patch.setattr(Aggregate, "combine", fixed)

    def _fix_sums_of_rows(self, patch):
        part, seeds, seed_torch = NoisedSums.part, self.seeds, private_rows.seed_torch
        worker = threading.local()  # torch's generator is the process's, and another worker's thread may seed it, too

        def seed(value):
            worker.seed = value
            seed_torch(value)

        patch.setattr(private_rows, "seed_torch", seed)

        def fixed(self, batch):
            seeds.add(getattr(worker, "seed", torch.initial_seed()))
            total = part(self, batch)
            return total.copy_(torch.linspace(-3, 5, len(total)))

        patch.setattr(NoisedSums, "part", fixed)


def run(folder, strategy, workers, work=None):
    """Run a job as the service does, with a checkpoint after each evaluation."""
    if work is None:
        work = Pooled(*rows_of_hospitals()) if strategy["name"] == "statistics" else Drawing(evaluates=workers == 1)
    by_client = isinstance(parse(strategy)[0].strategy, FederatedView)
    length = {"epochs": ROUNDS} if by_client else {"steps": ROUNDS, "evaluate_every": 1}
    spec = JobSpec("x:Y", strategy, workers, **length, keep_checkpoints=9).check()
    journal, cluster = Journal(folder), LocalCluster()
    each = [EachState()]
    driver = Driver(WorkloadJob(work, spec, journal, checkpoints=folder / "checkpoints", capture=False, callbacks=each))
    try:
        outcome = driver.run(cluster)
    finally:
        driver.close()
        cluster.close()
        journal.close()
    assert outcome.status is Status.SUCCEEDED, outcome.message


def run_twice(folder, strategy, workers, work=None):
    """Run the job of a strategy with two secret draws; return both folders, and what was drawn in each run."""
    homes, draws = [], []
    for name in ("first", "second"):
        with pytest.MonkeyPatch.context() as patch:
            draws.append(Draws(name, patch))
            run(folder / "job", strategy, workers, work)  # in the same place, whose path is in the files
        homes.append((folder / "job").rename(folder / name))
    return homes, draws


# ---- what may differ: the clock

# the keys of JSON data whose values are measured by a clock, or follow from such values
CLOCK = {
    *("time", "finished_at", "seconds", "compute", "data", "data_share", "wait", "move"),  # of points and events
    *("imbalance", "slowest", "exposed", "hidden"),  # of the event `costs`, and its message
    *("account", "samples_per_second", "eta_seconds"),  # of the progress
    *("callbacks", "sha256"),  # of a manifest: how far the callbacks were called when it was written, and its hash
}


def timeless(value):
    """Return JSON data without what `CLOCK` names."""
    if isinstance(value, list):
        return [timeless(each) for each in value]
    if not isinstance(value, dict):
        return value
    clock = CLOCK | ({"message"} if value.get("kind") == "costs" else set())
    return {key: "clock" if key in clock else timeless(held) for key, held in value.items()}


def contents(path):
    """Return a file's content without times. A report in `time.jsonl` is all times, but for the member's name."""
    if path.suffix == ".json":
        return timeless(json.loads(path.read_bytes()))
    if path.suffix != ".jsonl":
        return path.read_bytes()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    others = [timeless(line) for line in lines if "parts" not in line]
    members = sorted({line["name"] for line in lines if "parts" in line})
    return in_order(others) if path.name == "metrics.jsonl" else others, members


def in_order(points):
    """Return a job's points by round: when an evaluation is reported is a matter of time."""
    return sorted(points, key=lambda point: (point["kind"], point["round"]))


def records(home):
    """Return the content of each file of a job, but for the secret key of tree noise, which is a draw itself."""
    paths = sorted(path for path in home.rglob("*") if path.is_file() and path.name != KEY)
    return {str(path.relative_to(home)): contents(path) for path in paths}


def different(first, second):
    """Return the names of what differs."""
    return [name for name in {**first, **second} if first.get(name) != second.get(name)]


def first_of_each(cases):
    """Return the first case of each strategy."""
    return {case.name: case for case in reversed(cases)}.values()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_other_secret_draws_change_no_file(case, tmp_path):
    """The first case of each strategy has two workers, which exchange sums."""
    homes, draws = run_twice(tmp_path, case.strategy, 2 if case in first_of_each(CASES) else 1)
    if not {"sampling", "mechanism"} & case.privacy.keys():
        assert draws[0].drawn != draws[1].drawn  # so that a file could show it
    assert different(*map(records, homes)) == []
    assert draws[0].seeds.isdisjoint(draws[1].seeds)  # of a step's dropout: see `RowReleases.seed_step`


class Counting(Drawing):
    """Counts its forward passes in a buffer."""

    def model(self):
        model = super().model()
        model.register_buffer("passes", torch.zeros((), dtype=torch.int64))
        return model

    def loss(self, model, batch):
        model.passes.add_(1)
        return super().loss(model, batch)


class Following(Drawing):
    """Has a copy of its last layer without a gradient, which follows that layer in each forward pass."""

    def model(self):
        model = super().model()
        model.register_parameter("follower", nn.Parameter(model[3].weight.detach().clone(), requires_grad=False))
        return model

    def loss(self, model, batch):
        with torch.no_grad():
            model.follower.lerp_(model[3].weight, 0.1)
        return super().loss(model, batch)


def test_a_buffer_that_counts_is_the_same_after_each_client(tmp_path):
    homes, draws = run_twice(tmp_path, asked("fedavg", {}, {}), 1, Counting())
    assert draws[0].drawn != draws[1].drawn
    assert different(*map(records, homes)) == []


@pytest.mark.parametrize(
    ("name", "work", "tensor"),
    [("fedavg", Following, "follower"), ("all_reduce", Following, "follower"), ("all_reduce", Counting, "passes")],
)
def test_a_loss_that_changes_what_no_sum_contains_is_refused(name, work, tensor):
    with pytest.raises(WorkloadError, match=f"changed '{tensor}' of the model.*would disclose rows"):
        train(work(), asked(name, {}, {}), **({"epochs": 1} if name == "fedavg" else {"steps": 2}))


# ---- what REST and the page show, which is read from these files


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    made = Site(tmp_path_factory.mktemp("state"))
    yield made
    made.close()


# of the answers: the account of times, and places in files in which times are written
OF_ANSWERS = {"members", "timeline", "verdict", "goodput", "shares", "cursor", "seq"}


def untimed(value):
    if isinstance(value, list):
        return [untimed(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {key: "clock" if key in OF_ANSWERS else untimed(held) for key, held in timeless(value).items()}


@pytest.mark.parametrize("name", ["fedavg", "all_reduce"])
def test_other_secret_draws_change_no_answer(name, site, tmp_path):
    """The answers about a job are asked of the interface, so that a new one joins by itself."""
    homes, _ = run_twice(tmp_path, asked(name, {}, {}), 2)
    job, answers = site.add(), []
    paths = [
        path.format(job_id=job)
        for path, ways in site.app.openapi()["paths"].items()
        if "{job_id}" in path and "get" in ways and not path.endswith("/file")  # a file is compared above
    ]
    home = site.start(job)
    for each in homes:
        shutil.rmtree(home)
        shutil.copytree(each, home)
        assert until(lambda: site.http.get(f"/api/v1/jobs/{job}").json()["status"] == "SUCCEEDED", 60)
        answers.append({path: untimed(site.http.get(path).json()) for path in paths})
        points = answers[-1][f"/api/v1/jobs/{job}/metrics"]["points"]
        assert len(points) == 2 * ROUNDS
        points[:] = in_order(points)
    assert different(*answers) == []


# ---- what an attacker could do


def clients_of_states(home):
    """Return (round, client) of each random state in the checkpoints that the training of a client begins with.

    Anybody can compute these states: their seed is a function of the job's seed, the round and the client.
    """
    begins = {}
    for round in range(ROUNDS):
        for client in range(CLIENTS):
            torch.manual_seed(number(0, "model", round, client) >> 1)
            begins[torch.get_rng_state().numpy().tobytes()] = round, client
    states = [checkpoint.load(path).tensors for path in sorted((home / "checkpoints").glob("step-*"))]
    assert len(states) == ROUNDS
    held = [value.numpy().tobytes() for state in states for name, value in state.items() if name.startswith("rng/")]
    return [begins[state] for state in held if state in begins]


def test_no_checkpoint_names_a_member_of_a_secret_cohort(tmp_path):
    """The random state names the last client of each worker, the clock the slowest, the bytes how many there were."""
    strategy = wire(parse("fedavg:fraction=0.2,privacy=dp(noise_multiplier=1.1,delta=1e-2)"))
    run(tmp_path, strategy, 2, Fed(clients=CLIENTS, n=2 * CLIENTS))
    assert clients_of_states(tmp_path) == []
    states = [checkpoint.load(path).tensors for path in sorted((tmp_path / "checkpoints").glob("step-*"))]
    assert not [name for state in states for name in state if not name.startswith("model/")]
    points = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert len({point["bytes"] for point in points if point["kind"] == "round"}) == 1


@pytest.mark.parametrize("name", ["fedavg", "all_reduce"])
def test_the_trace_of_a_private_job_is_refused(name, tmp_path):
    """A trace has a span for each operation of a round: no clock is needed to count the rows or the clients."""
    with pytest.raises(ConfigError, match="profile was given for a private job"):
        train(Drawing(), asked(name, {}, {}), profile=tmp_path / "traces", steps=1)
