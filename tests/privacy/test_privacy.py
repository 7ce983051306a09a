"""Differential privacy without training: epsilon beside published figures, noise, the ledger, the claim."""

import dataclasses
import json
import math
import os
import re
import subprocess
import sys

import numpy as np
import pytest
from rayps_client.errors import ConfigError
from scipy import stats

from rayps.privacy import accountant
from rayps.privacy.account import PrivacyAccount, solve_noise
from rayps.privacy.adaptive_clip import next_clip, update_noise
from rayps.privacy.budget import must_allow_one
from rayps.privacy.claim import Setting, claim, with_releases
from rayps.privacy.ledger import ReleaseLedger
from rayps.privacy.mechanism import Mechanism, Spent
from rayps.privacy.noise import KeyedNoise, SecretNoise
from rayps.privacy.noise_shares import NoiseShares, share_noise
from rayps.privacy.options import PrivacySpec, dp, privacy_of
from rayps.privacy.tree_noise import nodes, tree_noise

POISSON = Mechanism("poisson", 1.1, 0.01)


def cost(mechanism, releases, delta=1e-5, restart=None):
    return accountant.epsilon({mechanism: Spent().plus(releases, restart)}, delta)


# ---- options


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dp", "privacy has no noise"),
        ("dp(epsilon=8)", "epsilon=8 and no rounds: give rounds"),
        ("dp(noise=1.1)", "is noise_multiplier=1.1"),
        ("dp(noise_multiplier=0)", "noise_multiplier is 0"),
        ("dp(noise_multiplier=1,clip=none)", "clip is None"),
        ("dp(noise_multiplier=1,delta=0)", "delta is 0"),
        ("dp(noise_multiplier=1,delta=1)", "delta is 1"),
        ("dp(noise_multiplier=1,mechanism=tree,sampling=poisson)", "tree noise needs a constant clip"),
        ("dp(noise_multiplier=1,mechanism=tree,clip=adaptive)", "tree noise needs a constant clip"),
        ("dp(noise_multiplier=1,sampling=fixed,clip=adaptive)", "sampling=fixed"),
        ("dp(noise_multiplier=1,rounds=3)", "leave one of them out"),
        ("dp(noise=loud,noise_multiplier=1)", "noise is 'loud'"),
        ("dp(noise_multiplier=1,honest=0.5)", "the server adds it"),
        ("dp(noise_multiplier=1,noise_by=nobody)", "noise_by is 'nobody'"),
        ("dp(noise_multiplier=1,noise_by=clients,honest=0)", "honest is 0"),
        ("dp(noise_multiplier=1,noise_by=clients,mechanism=tree)", "mechanism=tree: the noise of a tree"),
        ("dp(noise_multiplier=1,noise_by=clients,clip=adaptive)", "clip=adaptive: a client's"),
        ("dp(noise_multiplier=1,noise_by=clients,noise=seeded)", "in secret only"),
        ("dp(noise_multiplier=1,noise_by=clients,sampling=poisson)", "no random sample"),
        ("dp(sigma=1)", "dp has no option 'sigma'"),
        ("gaussian(1)", "give dp("),
    ],
)
def test_options_are_refused(text, message):
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        privacy_of(text)


def test_options_have_one_meaning_in_text_and_python():
    text = "dp(noise_multiplier=1.1,clip=adaptive,delta=1e-6,epsilon=8)"
    assert privacy_of(text) == dp(noise_multiplier=1.1, clip="adaptive", delta=1e-6, epsilon=8)
    assert privacy_of(None) is None and privacy_of(dp(noise_multiplier=2.0)) == PrivacySpec(2.0)
    assert privacy_of({"noise_multiplier": 2.0}) == PrivacySpec(2.0)  # a mapping of a job file


# ---- epsilon


@pytest.mark.parametrize(
    ("mechanism", "releases", "expected"),
    [
        # Abadi et al. 2016, figure 2: q = 0.01, sigma = 4, 10,000 steps: 1.26 by moments; the bound here is tighter
        (Mechanism("poisson", 4.0, 0.01), 10_000, (0.90, 1.26)),
        # TensorFlow Privacy's tutorial: 60,000 rows, batches of 250, z = 1.3, 15 epochs: 1.19 by an older RDP bound
        (Mechanism("poisson", 1.3, 250 / 60_000), 3_600, (0.80, 1.19)),
        # Kairouz et al. 2021: one tree of 64 rounds with z = 7: sqrt(2 ln(1/delta)) sqrt(7) / 7 + 7 / (2 * 49) by RDP
        (Mechanism("tree", 7.0), 64, (1.2, 1.9)),
    ],
)
def test_epsilon_beside_published_figures(mechanism, releases, expected):
    low, high = expected
    restart = 64 if mechanism.kind == "tree" else None
    assert low < cost(mechanism, releases, restart=restart) <= high


@pytest.mark.parametrize("noise", [0.7, 1.0, 3.0])
@pytest.mark.parametrize("releases", [1, 7, 100])
def test_without_sampling_epsilon_is_that_of_one_gaussian(noise, releases):
    """The law: delta(eps) = Phi(mu/2 - eps/mu) - e^eps Phi(-mu/2 - eps/mu), mu = sqrt(k) / z (Balle and Wang 2018)."""
    found, mu = cost(Mechanism("all", noise), releases), math.sqrt(releases) / noise
    delta = stats.norm.cdf(mu / 2 - found / mu) - math.exp(found + stats.norm.logcdf(-mu / 2 - found / mu))
    assert delta == pytest.approx(1e-5, rel=1e-3)
    renyi = releases / (2 * noise**2) + math.sqrt(2 * releases * math.log(1e5)) / noise
    assert found <= renyi


def test_epsilon_grows_with_releases_and_sampling_and_falls_with_noise():
    many = [cost(POISSON, k) for k in (0, 1, 10, 100)]
    assert many[0] == 0 and many == sorted(many)
    assert cost(Mechanism("poisson", 2.2, 0.01), 10) < many[2] < cost(Mechanism("poisson", 1.1, 0.1), 10)
    fixed = Mechanism("fixed", 1.1, units=1000, drawn=10)
    assert cost(fixed, 10) < cost(fixed, 100) < cost(Mechanism("fixed", 0.6, units=1000, drawn=10), 100)


@pytest.mark.parametrize("mechanism", [Mechanism("poisson", 0.01, 0.2), Mechanism("all", 1e-4), POISSON])
def test_little_noise_and_many_releases_have_a_bound_or_none(mechanism):
    """The bound needs neither much memory nor much time, and is never too small: see the Gaussian law."""
    found = cost(mechanism, 20_000)
    assert found > 5 and (found == math.inf or found < 1e6)


def test_two_kinds_of_releases_are_added_or_refused():
    both = {POISSON: Spent(10), Mechanism("poisson", 2.0, 0.01): Spent(10)}
    assert max(cost(each, 10) for each in both) < accountant.epsilon(both, 1e-5) < sum(cost(each, 10) for each in both)
    with pytest.raises(ConfigError, match="cannot be added"):
        accountant.epsilon({POISSON: Spent(1), Mechanism("tree", 7.0): Spent(1, (1,))}, 1e-5)


@pytest.mark.parametrize("kind", ["poisson", "fixed", "all", "tree"])
def test_the_noise_that_is_found_spends_the_budget_and_not_more(kind):
    def mechanism(noise):
        return Mechanism(kind, noise, 0.05 if kind == "poisson" else 1.0, units=200, drawn=10)

    restart = 8 if kind == "tree" else None
    found = solve_noise(dp(epsilon=6.0, rounds=40), mechanism, restart)
    assert 5.7 < cost(found, 40, restart=restart) <= 6.0
    assert accountant.releases_within(found, 6.0, 1e-5, restart) >= 40


# ---- noise


@pytest.mark.parametrize("source", [SecretNoise(), KeyedNoise.of_seed(3)], ids=["secret", "seeded"])
def test_noise_is_normal(source):
    drawn = source.normal(40_001, 2.5, 7)
    assert drawn.shape == (40_001,) and stats.kstest(drawn / 2.5, "norm").pvalue > 1e-4
    assert stats.kstest(source.uniform(20_000, 1), "uniform").pvalue > 1e-4


def test_keyed_noise_is_a_function_of_key_and_place_and_secret_noise_is_none():
    one, other = KeyedNoise(b"k" * 32), KeyedNoise(b"l" * 32)
    assert np.array_equal(one.normal(9, 1.0, 1, 2), one.normal(9, 1.0, 1, 2))
    assert not np.any(one.normal(9, 1.0, 1, 2) == one.normal(9, 1.0, 2, 1))
    assert not np.any(one.normal(9, 1.0, 1) == other.normal(9, 1.0, 1))
    assert not np.any(SecretNoise().normal(9, 1.0, 1) == SecretNoise().normal(9, 1.0, 1))


@pytest.mark.parametrize("leaves", range(1, 33))
def test_nodes_cover_each_leaf_once(leaves):
    covered = sorted(leaf for level, index in nodes(leaves) for leaf in range(index << level, (index + 1) << level))
    assert covered == list(range(leaves)) and len(nodes(leaves)) == leaves.bit_count()


def test_running_sums_of_tree_noise_have_the_noise_of_their_nodes():
    source, size = KeyedNoise(b"t" * 32), 5
    running = np.zeros(size)
    for leaf in range(20):
        running += tree_noise(source, size, 1.5, tree=2, leaf=leaf)
        naive = sum(source.normal(size, 1.5, 2, level, index) for level, index in nodes(leaf + 1))
        assert np.allclose(running, naive)


# ---- noise that the clients add


def of_clients(sigma, count, norm=1000, size=50, multiplier=1.0):
    shares = NoiseShares(sigma, count, 2 * count, count + 1, norm, size)
    return Mechanism("distributed", multiplier, shares=shares)


def gaussian_by_divergences(noise, releases, delta=1e-5):
    """The law: the continuous Gaussian of the same variance, by the library's own Renyi divergences."""
    from dp_accounting import GaussianDpEvent, rdp

    found = rdp.RdpAccountant()
    found.compose(GaussianDpEvent(noise), releases)
    return found.get_epsilon(delta)


@pytest.mark.parametrize(("sigma", "count", "releases"), [(250, 16, 1), (50, 400, 30), (2000, 2, 100)])
def test_large_shares_cost_what_the_continuous_gaussian_costs(sigma, count, releases):
    law = gaussian_by_divergences(sigma * math.sqrt(count) / 1000, releases)
    assert cost(of_clients(sigma, count), releases) == pytest.approx(law, rel=1e-9)


def test_small_shares_cost_more_and_never_less():
    def factor(sigma):  # of the same variance, from 36 parties, 9 or 4
        count = 36 // sigma**2
        law = gaussian_by_divergences(sigma * math.sqrt(count) / 3, 10)
        return cost(of_clients(sigma, count, 3, 100_000), 10) / law

    assert factor(1) > 1.05 and 1 - 1e-9 < factor(2) < factor(1) and factor(3) == pytest.approx(1, rel=1e-9)


def test_the_bounds_hold_for_the_exact_divergence_of_a_sum_of_discrete_gaussians():
    """The slow twin: the distribution of the sum by convolution, and its Renyi divergence from its shifted self."""
    for sigma, count, shift in ((1, 2, 1), (1, 5, 3), (2, 3, 4)):
        reach = np.arange(-40 * sigma, 40 * sigma + 1)
        one = np.exp(-(reach**2) / (2.0 * sigma**2))
        one /= one.sum()
        whole = one
        for _ in range(count - 1):
            whole = np.convolve(whole, one)
        middle, near = len(whole) // 2, 12 * sigma * int(math.sqrt(count) + 1)
        p = whole[middle - near : middle + near + 1]
        q = whole[middle - near - shift : middle + near + 1 - shift]
        bounds = NoiseShares(sigma, count, 2 * count, count, shift, 1).bounds()
        for order in (2, 4):
            exact = math.log(float((p**order * q ** (1 - order)).sum())) / (order - 1)
            assert exact <= min(xi + rho * order for rho, xi in bounds) * (1 + 1e-9)


def test_shares_are_sized_for_the_honest_among_the_fewest_survivors():
    for asked, least, honest, count in ((10, 6, 0.8, 4), (10, 6, 1.0, 6), (3, 2, 0.8, 1), (100, 51, 0.9, 41)):
        shares = share_noise(1.1, (asked, least, honest), 32767, 500)
        assert (shares.count, shares.colluding) == (count, least - count)
        assert shares.sigma * math.sqrt(count) >= 1.1 * 32767 > (shares.sigma - 1) * math.sqrt(count)
    with pytest.raises(ConfigError, match="raise threshold"):
        share_noise(1.0, (10, 6, 0.4), 32767, 500)
    with pytest.raises(ConfigError, match="lower bits"):
        share_noise(1.0, (3, 2, 0.8), 2**31 - 1, 500)


def test_releases_of_clients_noise_add_up_with_others_in_the_ledger(tmp_path):
    mechanism, ledger = of_clients(300, 9), ReleaseLedger(tmp_path)
    ledger.append(mechanism, 0)
    ledger.append(Mechanism("all", 0.9), 1)
    spent = ledger.spent()
    assert spent == {mechanism: Spent(1), Mechanism("all", 0.9): Spent(1)}
    both = accountant.epsilon(spent, 1e-5)
    assert both > max(cost(mechanism, 1), cost(Mechanism("all", 0.9), 1))
    with pytest.raises(ValueError, match="no mechanism"):
        Mechanism.from_wire({"kind": "distributed", "noise_multiplier": 1.0})
    ledger.close()


def test_the_noise_of_clients_is_found_for_a_budget():
    def mechanism(noise):
        return Mechanism("distributed", noise, shares=share_noise(noise, (20, 11, 0.8), 32767, 1000))

    found = solve_noise(dp(epsilon=8, rounds=20, noise_by="clients"), mechanism)
    assert cost(found, 20) <= 8 < cost(mechanism(found.noise_multiplier * 0.99), 20)


def test_the_claim_names_who_adds_the_noise():
    setting = Setting("client", 10, True, True)
    server = claim(dp(noise_multiplier=1), Mechanism("all", 1.0), setting)
    clients = claim(dp(noise_multiplier=1, noise_by="clients"), of_clients(300, 9), setting)
    assert "is trusted to add the noise" in server["trusted"] and "the service" not in " ".join(server["holds_against"])
    assert clients["trusted"].startswith("The clients are trusted to add the noise: of the 18 that a round asks, at")
    assert "The service adds no noise" in clients["trusted"]
    assert any(text.startswith("the service and whoever reads its disk") for text in clients["holds_against"])
    assert any(text.startswith("up to 1 client of a round") for text in clients["holds_against"])
    honest = claim(
        dp(noise_multiplier=1, noise_by="clients", honest=1),
        Mechanism("distributed", 1.0, shares=share_noise(1.0, (10, 6, 1.0), 32767, 5)),
        setting,
    )
    assert not any("client" in text for text in honest["holds_against"])  # each knows a share of its own


# ---- adaptive clipping


def test_bits_and_updates_together_cost_one_release():
    z, bits = 1.1, 5.0
    assert update_noise(z, bits) ** -2 + (2 * bits) ** -2 == pytest.approx(z**-2)
    assert update_noise(z, bits) > z
    with pytest.raises(ConfigError, match=r"raise bit_noise"):
        update_noise(1.1, 0.55)


def test_the_clip_finds_the_quantile():
    norms, clip = np.random.default_rng(0).lognormal(1.0, 0.7, 400), 0.1
    for _ in range(200):
        clip = next_clip(clip, float((norms <= clip).sum() - 200), 400, 0.5, 0.2)
    assert clip == pytest.approx(np.quantile(norms, 0.5), rel=0.02)


# ---- the ledger


def test_the_ledger_keeps_all_releases(tmp_path):
    ledger = ReleaseLedger(tmp_path / "privacy")
    for round in (0, 1, 1):
        ledger.append(POISSON, round)
    assert ReleaseLedger(tmp_path / "privacy").spent() == {POISSON: Spent(3)}
    lines = [json.loads(line) for line in ledger.path.read_text().splitlines()]
    assert [line["round"] for line in lines] == [0, 1, 1]
    assert ledger.path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_record_that_was_cut_counts_and_harms_no_other(tmp_path, cut):
    ledger = ReleaseLedger(tmp_path)
    ledger.append(POISSON, 0)
    ledger.append(POISSON, 1)
    raw = ledger.path.read_bytes()
    os.truncate(ledger.path, len(raw) - cut)
    again = ReleaseLedger(tmp_path)
    assert again.spent() == {POISSON: Spent(2)}
    again.append(POISSON, 1)
    assert again.spent() == {POISSON: Spent(3)}


def test_a_ledger_without_an_intact_line_is_refused(tmp_path):
    (tmp_path / "ledger.jsonl").write_text('{"round": 0, "mecha')
    with pytest.raises(ConfigError, match="Start the job anew"):
        ReleaseLedger(tmp_path).spent()


@pytest.mark.chaos
@pytest.mark.parametrize("place", ["privacy: nothing recorded", "privacy: recorded, not released"])
def test_a_kill_never_lowers_epsilon(tmp_path, place):
    """Epsilon after the kill is at least that of the releases that were made before it, and of the next one."""
    code = (
        "import sys; from pathlib import Path; from rayps.privacy.ledger import ReleaseLedger\n"
        "from rayps.privacy.mechanism import Mechanism\n"
        "ledger = ReleaseLedger(Path(sys.argv[1]))\n"
        "for round in range(5):\n"
        "    ledger.append(Mechanism('poisson', 1.1, 0.01), round); print(round, flush=True)"
    )
    environ = os.environ | {"RAYPS_FAILPOINT": f"{place}=3"}
    ran = subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=environ, capture_output=True, text=True)
    released = len(ran.stdout.split())
    assert ran.returncode == -9 and released == 2
    assert ReleaseLedger(tmp_path).spent()[POISSON].releases == released + (place == "privacy: recorded, not released")


def test_a_key_is_drawn_once(tmp_path):
    first = ReleaseLedger(tmp_path).key()
    assert (
        len(first) == 32
        and ReleaseLedger(tmp_path).key() == first
        and (tmp_path / "noise.key").stat().st_mode & 0o077 == 0
    )


# ---- the account


def test_the_account_ends_before_the_budget_and_counts_repetitions(tmp_path):
    spec = dp(noise_multiplier=1.1, epsilon=0.5)
    account = PrivacyAccount(spec, POISSON, ReleaseLedger(tmp_path))
    while account.exhausted is None:
        account.charge(account.releases)
    assert account.epsilon <= 0.5 < cost(POISSON, account.releases + 1)
    assert account.releases == accountant.releases_within(POISSON, 0.5, 1e-5)
    assert "one more would make it" in str(account.exhausted)
    again = PrivacyAccount(spec, POISSON, ReleaseLedger(tmp_path))
    assert again.epsilon == account.epsilon and again.exhausted == account.exhausted


def test_a_tree_of_an_earlier_process_is_not_continued(tmp_path):
    mechanism, spec = Mechanism("tree", 7.0), dp(noise_multiplier=7.0, mechanism="tree")
    account = PrivacyAccount(spec, mechanism, ReleaseLedger(tmp_path), restart=4)
    assert [account.charge(round) for round in range(6)] == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1)]
    again = PrivacyAccount(spec, mechanism, ReleaseLedger(tmp_path), restart=4)
    assert again.epsilon == pytest.approx(account.epsilon) and again.leaf == (2, 0)
    again.charge(5)
    assert again.epsilon == cost(mechanism, 4, restart=4) or again.epsilon > account.epsilon
    assert ReleaseLedger(tmp_path).spent() == {mechanism: Spent(7, (4, 2, 1))}


# ---- the claim


def test_the_claim_says_against_whom_it_holds_and_warns_of_delta():
    spec = dp(noise_multiplier=1.1, delta=1e-3)
    found = with_releases(claim(spec, POISSON, Setting("client", 500)), 2.0, 10)
    assert "10 noised sums" in found["claim"] and "(2, 0.001)-differentially private" in found["claim"]
    assert any("final model" in each for each in found["holds_against"]) and "are trusted" in found["trusted"]
    assert found["proves"] and not any("WARNING" in each for each in found["assumes"])
    assert "has no release" in with_releases(found, 0.0, 0)["claim"]
    large = with_releases(claim(dp(noise_multiplier=1.1, delta=0.5), POISSON, Setting("client", 500)), 0.0, 1)
    assert not large["proves"] and "WARNING" in large["assumes"][-1]
    assert re.match("This run proves nothing: delta=0.5 is not below 1 / 500, the number of clients", large["claim"])
    seeded = claim(dp(noise_multiplier=1.1, noise="seeded"), POISSON, Setting("row", 50_000))
    seeded = with_releases(seeded, 2.0, 10)
    assert seeded["claim"].startswith("This run proves nothing") and not seeded["proves"]
    assert not any("WARNING" in each for each in seeded["assumes"])


def test_a_mechanism_is_written_with_the_numbers_that_its_kind_has():
    everyone = Mechanism("poisson", 0.3)
    for mechanism, names in (
        (Mechanism("poisson", 1.1, 0.01), {"probability"}),
        (Mechanism("fixed", 1.1, units=100, drawn=7), {"units", "drawn"}),
        (Mechanism("all", 1.1), set()),
        (Mechanism("tree", 1.1), set()),
        (of_clients(300, 9), {"shares"}),
    ):
        wire = mechanism.to_wire()
        assert wire.keys() == {"kind", "noise_multiplier"} | names and Mechanism.from_wire(wire) == mechanism
    old = {"kind": "poisson", "noise_multiplier": 0.3, "probability": 1.0, "units": 0, "drawn": 0}
    assert Mechanism.from_wire(old) == everyone  # a line of an earlier version
    said = claim(dp(noise_multiplier=0.3), everyone, Setting("client", 9, answers=True))
    assert "Every client takes part in every round" in said["assumes"][0] and "probability" not in said["assumes"][0]
    assert "whoever has the answers" in said["holds_against"][0]


@pytest.mark.parametrize(
    ("spec", "mechanism", "words"),
    [
        (dp(noise_multiplier=0.3, epsilon=1.0), Mechanism("all", 0.3), r"Give epsilon=\d+\.\d+, or noise_multiplier="),
        (dp(noise_multiplier=0.5, epsilon=0.1), Mechanism("tree", 0.5), r"Give epsilon=\d+\.\d+, or noise_multiplier="),
        (dp(noise_multiplier=0.5, epsilon=0.1, noise_by="clients"), of_clients(3, 9), "or more noise"),
    ],
    ids=["all", "tree", "clients"],
)
def test_a_budget_without_a_release_is_refused_and_what_it_needs_is_enough(spec, mechanism, words):
    tree = mechanism.kind == "tree"
    with pytest.raises(ConfigError, match=words) as refused:
        must_allow_one(spec, mechanism, tree=tree)
    named = dict(re.findall(r"(epsilon|noise_multiplier)=([\d.]+)", str(refused.value).partition("Give")[2]))
    must_allow_one(dataclasses.replace(spec, epsilon=float(named["epsilon"])), mechanism, tree=tree)
    if "noise_multiplier" in named:
        enough = dataclasses.replace(mechanism, noise_multiplier=float(named["noise_multiplier"]))
        must_allow_one(spec, enough, tree=tree)
