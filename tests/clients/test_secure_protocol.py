"""Secure aggregation without a network: whoever dies where, the sum is exact or the round is void, never wrong."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from rayps_client.errors import ConfigError, Conflict, TrainingError
from rayps_client.secure import noise, noise_sizes, shamir
from rayps_client.secure.graph import draw_graph, failures, least_neighbours, neighbours_for, shares_needed
from rayps_client.secure.masks import Keystream, add_mask, new_private, public_of
from rayps_client.secure.pinned_keys import PinnedKeys, public_text, read_peers
from rayps_client.secure.protocol import AdvertisedKeys, RoundName, Stage, VoidRound, bytes_of, decode, encode
from rayps_client.secure.quantise import EXTRAS, ClientNumbers, Quantiser, Words
from rayps_client.secure.release_record import ReleaseRecord
from rayps_client.secure.secure_turn import SecureTurn, TurnRules
from rayps_client.secure.server_sum import NO_KEYS, ServerRules, ServerSum

ROUND = RoundName("0" * 26, 7)
SIZE = 9
STAGES = (Stage.ADVERTISE, Stage.SHARE, Stage.MASK, Stage.CONFIRM, Stage.UNMASK)


class Memory(ReleaseRecord):
    """A record that is not written: most of these tests kill nobody's disk."""

    def __init__(self) -> None:
        super().__init__(Path("/nowhere"))

    def _save(self) -> None:
        pass


def vectors(n: int, word: Any = np.uint32) -> dict[int, Words]:
    made = np.random.default_rng(n)
    return {k: made.integers(0, np.iinfo(word).max, SIZE, dtype=word, endpoint=True) for k in range(n)}


class Round:
    """A round in memory. `dies` is a dict from client to the stage whose message it does not send any more."""

    def __init__(self, n: int, threshold: float = 0.5, k: int | None = None, verify: bool = False, **dies: Any) -> None:
        self.plain, self.dies, self.verify = vectors(n), dies.get("dies", {}), verify
        pinned = dies.get("pinned", {})
        self.server = ServerSum(ServerRules(ROUND, threshold, 2, k))
        self.turns = {
            number: SecureTurn(TurnRules(ROUND, number, f"c{number}", threshold, 2, pinned.get(number)), Memory())
            for number in self.plain
        }
        self.sent: dict[Stage, dict[int, Any]] = {}  # all that the server gets
        self.answers: dict[Stage, dict[int, Any]] = {}

    def _ask(self, stage: Stage, asked: Any, message: Any) -> dict[int, Any]:
        self.sent[stage] = {}
        for number in asked:
            if STAGES.index(self.dies.get(number, Stage.UNMASK)) < STAGES.index(stage) or (
                self.dies.get(number) is stage
            ):
                continue
            self.sent[stage][number] = message(number)
        return self.sent[stage]

    def run(self) -> Words:
        turns, server, answers = self.turns, self.server, self.answers
        answers[Stage.ADVERTISE] = server.advertised(self._ask(Stage.ADVERTISE, turns, lambda k: turns[k].advertise()))
        keys = answers[Stage.ADVERTISE]
        answers[Stage.SHARE] = server.shared(self._ask(Stage.SHARE, keys, lambda k: turns[k].share(keys[k])))
        sealed = answers[Stage.SHARE]
        masked = self._ask(Stage.MASK, sealed, lambda k: turns[k].mask(sealed[k], self.plain[k].copy(), f"update {k}"))
        answers[Stage.MASK] = survivors = server.masked(masked)
        signed: Mapping[int, Any] = dict.fromkeys(survivors)
        if self.verify:
            signed = server.confirmed(self._ask(Stage.CONFIRM, survivors, lambda k: turns[k].confirm(survivors[k])))
            answers[Stage.CONFIRM] = dict(signed)
        shares = self._ask(Stage.UNMASK, signed, lambda k: turns[k].unmask(survivors[k], signed[k]))
        assert server.suffices(shares) or not self._is_total(shares, masked, survivors)
        return self._total(shares, masked, survivors)

    def _total(self, shares: Any, masked: Any, survivors: Any) -> Words:
        return self.server.total(shares, [masked[k] for k in survivors])

    def _is_total(self, *sent: Any) -> bool:
        try:
            self._total(*sent)
        except VoidRound:
            return False
        return True

    def expected(self) -> Words:
        """The plain sum over the clients whose masked vector came: the slow twin."""
        total = np.zeros(SIZE, dtype=np.uint32)
        for number, vector in self.plain.items():
            if STAGES.index(self.dies.get(number, Stage.UNMASK)) > STAGES.index(Stage.MASK):
                total = total + vector
        return total


# ---- the law: exact or void


@pytest.mark.parametrize(("n", "threshold"), [(3, 0.5), (4, 0.5), (4, 0.7), (5, 0.6)])
def test_whoever_dies_where_the_sum_is_exact_or_the_round_is_void(n: int, threshold: float) -> None:
    ways = [None, Stage.ADVERTISE, Stage.SHARE, Stage.MASK, Stage.UNMASK]
    seen = {"exact": 0, "void": 0}
    every = itertools.product(ways, repeat=n) if n == 3 else itertools.combinations_with_replacement(ways, n)
    for pattern in every:  # clients are alike, up to the sign of their masks
        order = pattern if sum(map(ways.index, pattern)) % 2 else pattern[::-1]
        dies = {number: stage for number, stage in enumerate(order) if stage is not None}
        round = Round(n, threshold, dies=dies)
        advertised = n - list(order).count(Stage.ADVERTISE)
        needed, left = shares_needed(advertised, threshold), n - len(dies)
        try:
            found = round.run()
        except VoidRound as void:
            assert left < max(2, needed), (dies, void)
            seen["void"] += 1
        else:
            assert left >= needed and np.array_equal(found, round.expected()), dies
            seen["exact"] += 1
    assert min(seen.values()) > 3, seen


@pytest.mark.parametrize("word", [np.uint32, np.uint64])
def test_masks_cancel_in_both_moduli(word: Any) -> None:
    round = Round(5, dies={1: Stage.MASK, 2: Stage.UNMASK})
    round.plain = vectors(5, word)
    total = round.run()
    assert total.dtype == word and np.array_equal(total, sum(round.plain[k] for k in (0, 2, 3, 4)))


@pytest.fixture
def any_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a test choose a graph that is below the bound."""
    monkeypatch.setattr("rayps_client.secure.server_sum.least_neighbours", lambda clients, threshold: 0)


def test_a_sparse_graph_gives_the_same_sum(any_graph: None) -> None:
    for dead in range(0, 20, 3):
        round = Round(20, 0.5, 8, dies={dead: Stage.MASK, (dead + 7) % 20: Stage.UNMASK, (dead + 3) % 20: Stage.SHARE})
        assert np.array_equal(round.run(), round.expected())
        assert {len(each) for each in round.server.graph.values()} == {8}
    alone = Round(20, 0.5, 4, dies={k: Stage.MASK for k in range(20) if k % 2})
    try:
        assert np.array_equal(alone.run(), alone.expected())
    except VoidRound as void:
        assert "mask each other" in str(void)


def parts_of(graph: Mapping[int, Any], clients: set[int]) -> list[set[int]]:
    """The connected parts of these clients: by merging, the slow twin of `is_connected`."""
    parts = [{client} for client in clients]
    for one in clients:
        for other in clients.intersection(graph[one]):
            near = [part for part in parts if one in part or other in part]
            parts = [part for part in parts if part not in near] + [set().union(*near)]
    return parts


@pytest.mark.parametrize(("n", "k", "threshold"), [(8, 2, 0.5), (10, 2, 0.5), (11, 4, 0.5), (10, 2, 0.7)])
def test_no_sum_of_a_part_of_the_survivors_is_seen(any_graph: None, n: int, k: int, threshold: float) -> None:
    made, seen = np.random.default_rng(n), {"exact": 0, "apart": 0, "few": 0}
    for _ in range(40):
        dead = made.permutation(n)[: made.integers(0, n // 2 + 1)].tolist()
        round = Round(n, threshold, k, dies=dict.fromkeys(dead, Stage.MASK))
        try:
            found = round.run()
        except VoidRound as void:
            apart = len(parts_of(round.server.graph, set(range(n)) - set(dead))) > 1
            assert ("do not all mask" in str(void)) <= apart
            seen["apart" if "do not all mask" in str(void) else "few"] += 1
        else:
            assert len(parts_of(round.server.graph, set(range(n)) - set(dead))) == 1, dead
            assert np.array_equal(found, round.expected())
            seen["exact"] += 1
    assert seen["exact"] > 3 and (seen["apart"] > 0 or k > 2 or threshold > 0.5), seen


@pytest.mark.parametrize("n", [2, 3, 5, 10, 60, 120])
@pytest.mark.parametrize("threshold", [0.5, 0.7])
@pytest.mark.parametrize("given", [2, 10, 80, None])
def test_no_round_has_fewer_neighbours_than_the_bound(n: int, threshold: float, given: int | None) -> None:
    server = ServerSum(ServerRules(ROUND, threshold, 2, given))
    keys = {k: AdvertisedKeys(f"c{k}", public_of(new_private()), public_of(new_private())) for k in range(n)}
    server.advertised({k: encode(each.facts()) for k, each in keys.items()})
    (degree,) = {len(others) for others in server.graph.values()}
    assert degree == n - 1 or failures(n, degree, threshold)[0] <= 2.0**-40
    least = least_neighbours(n, threshold)
    assert degree >= least and (given is None or degree == min(n - 1, max(given, least)))
    if 2 < least < n - 1:  # and no fewer would do
        assert max(failures(n, less, threshold)[0] for less in (least - 2, least - 4) if less > 1) > 2.0**-40


def test_a_server_that_starts_again_gives_the_same_answers() -> None:
    first = Round(5, dies={4: Stage.MASK})
    total = first.run()
    again = ServerSum(ServerRules(ROUND, 0.5, 2))
    assert again.advertised(first.sent[Stage.ADVERTISE]) == first.answers[Stage.ADVERTISE]
    assert again.shared(first.sent[Stage.SHARE]) == first.answers[Stage.SHARE]
    assert again.masked(first.sent[Stage.MASK]) == first.answers[Stage.MASK]
    masked = first.sent[Stage.MASK]
    assert np.array_equal(again.total(first.sent[Stage.UNMASK], list(masked.values())), total)


def test_wrong_shares_make_the_round_void_and_unreadable_messages_drop_their_sender() -> None:
    round = Round(4, dies={3: Stage.MASK})
    shares: dict[int, Any] = {}
    real = round._total

    def changed(given: Any, masked: Any, survivors: Any) -> Words:
        shares.update(given)
        facts = decode(given[0])
        facts["seeds"] = {**facts["seeds"], "1": facts["seeds"]["0"]}  # type: ignore[dict-item, index]
        return real({**given, 0: encode(facts)}, masked, survivors)

    round._total = changed  # type: ignore[method-assign]
    round._is_total = lambda *sent: False  # type: ignore[method-assign]
    with pytest.raises(VoidRound, match="the shares about the client 'c1' are wrong"):
        round.run()
    masked = [round.sent[Stage.MASK][k] for k in range(3)]
    assert np.array_equal(round.server.total({**shares, 0: shares[0]}, masked), round.expected())
    for bad in (b"", b"[]", b"{}", b'{"seeds":3,"keys":{}}', b'{"seeds":{},"keys":{}}'):
        with pytest.raises(VoidRound, match="2 clients have sent their shares"):
            round.server.total({**shares, 0: bad}, masked)
        assert 0 in round.server.unusable


@pytest.mark.parametrize("which", ["seal", "mask"])
def test_a_point_of_low_order_is_no_key(which: str) -> None:
    """X25519 with such a point gives zeros whatever the other key is, so that the library refuses it."""
    zero, twice = bytes(32), public_of(new_private())
    keys = {k: AdvertisedKeys(f"c{k}", public_of(new_private()), public_of(new_private())) for k in range(4)}
    keys[3] = dataclasses.replace(keys[3], **{which: zero})
    keys[4] = AdvertisedKeys("c4", twice, twice)  # the others would refuse both keys
    server = ServerSum(ServerRules(ROUND, 0.5, 2))
    answers = server.advertised({k: encode(each.facts()) for k, each in keys.items()})
    assert answers.keys() == {0, 1, 2} and server.unusable == {3: NO_KEYS, 4: NO_KEYS}  # the round goes on without it
    turn = SecureTurn(TurnRules(ROUND, 0, "c0", 0.5, 2), Memory())
    turn.advertise()
    neighbours = {str(k): keys[k].facts() for k in (1, 2, 3)}  # a server that does not check
    with pytest.raises(VoidRound, match="the client 'c3' has sent a point that is not a key") as refused:
        turn.share({"neighbours": neighbours})
    assert refused.value.data["refused"] == [3]


# ---- what the server can see


def secrets_of(turn: SecureTurn) -> dict[str, bytes]:
    return {"seed": turn._seed, "mask key": turn._mask, "seal key": turn._seal}


def all_bytes(value: Any) -> list[bytes]:
    """Every text and number in what the server holds, decoded as far as it can be."""
    if isinstance(value, np.ndarray):
        return [value.tobytes()]
    if isinstance(value, bytes):
        try:
            return [value, *all_bytes(json.loads(value))]
        except ValueError:
            return [value]
    if isinstance(value, Mapping):
        return [part for each in value.values() for part in all_bytes(each)]
    if isinstance(value, (list, tuple, set, frozenset)):
        return [part for each in value for part in all_bytes(each)]
    if dataclasses.is_dataclass(value):
        return all_bytes({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    if isinstance(value, str):
        try:
            return [value.encode(), bytes_of(value)]
        except ValueError:
            return [value.encode()]
    return all_bytes(vars(value)) if hasattr(value, "__dict__") else []


def test_the_server_holds_no_update_and_nothing_that_unmasks_one() -> None:
    round = Round(5, 0.5, dies={3: Stage.MASK, 4: Stage.UNMASK})
    round.run()
    held = all_bytes([round.sent, round.answers, round.server])
    assert len(held) > 100
    for number, turn in round.turns.items():
        assert not any(round.plain[number].tobytes() in each for each in held), number
        assert not any(secret in each for each in held for secret in secrets_of(turn).values()), number
    seeds: dict[int, dict[int, bytes]] = {}
    keys: dict[int, dict[int, bytes]] = {}
    for sender, message in round.sent[Stage.UNMASK].items():
        for kind, into in (("seeds", seeds), ("keys", keys)):
            for about, share in decode(message)[kind].items():  # type: ignore[union-attr]
                into.setdefault(int(about), {})[sender + 1] = bytes_of(share)
    assert set(seeds) == {0, 1, 2, 4} and set(keys) == {3}  # one kind about each, all over the round
    assert {k: shamir.combine(shares, 3) for k, shares in seeds.items()} == {k: round.turns[k]._seed for k in seeds}
    assert shamir.combine(keys[3], 3) == round.turns[3]._mask
    for number in (0, 1, 2, 4):  # with its seed alone a vector is still masked by its neighbours
        half = round.sent[Stage.MASK][number].copy()
        add_mask(half, round.turns[number]._seed, -1)
        assert not np.array_equal(half, round.plain[number])


def test_the_search_above_would_find_a_vector_and_a_seed() -> None:
    round = Round(3)
    round.run()
    planted = {"deep": [{"in": encode({"x": "AAAA" + public_text(Ed25519PrivateKey.generate())})}], "v": round.plain[1]}
    assert round.plain[1].tobytes() in all_bytes(planted)
    round.server.unusable[5] = secret = "c" * 40
    assert secret.encode() in all_bytes(round.server)


def test_a_masked_vector_is_uniform() -> None:
    plain = np.zeros(1 << 16, dtype=np.uint32)
    masked = plain.copy()
    add_mask(masked, bytes(range(32)), 1)
    counts = np.bincount(masked.view(np.uint8), minlength=256)
    expected = counts.sum() / 256
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert 180 < chi_square < 345  # 255 degrees of freedom: outside with a probability of 1e-4; the key is fixed
    add_mask(masked, bytes(range(32)), -1)
    assert not masked.any()
    long = np.arange((1 << 18) + 5, dtype=np.uint64)  # more than one block
    add_mask(long, b"k" * 32, 1)
    stream = np.frombuffer(Keystream(b"k" * 32).read(long.nbytes), dtype="<u8")
    assert np.array_equal(long, np.arange((1 << 18) + 5, dtype=np.uint64) + stream)


# ---- what a client refuses


@pytest.mark.parametrize("dies_at", range(6))
def test_a_client_that_is_killed_anywhere_never_releases_both_shares(tmp_path: Path, dies_at: int) -> None:
    """At each write a client may die, before or after it: started again, it releases nothing more in this round."""
    folder, round, released = tmp_path, Round(4), list[bytes]()

    class Dying(ReleaseRecord):
        writes = 0

        def _save(self) -> None:
            if type(self).writes == dies_at // 2 and dies_at % 2 == 0:
                raise KeyboardInterrupt
            super()._save()
            type(self).writes += 1
            if type(self).writes == dies_at // 2 + 1 and dies_at % 2 == 1:
                raise KeyboardInterrupt

    rules = TurnRules(ROUND, 0, "c0", 0.5, 2)
    round.turns[0] = SecureTurn(rules, Dying(folder))
    real = round.turns[0].unmask
    round.turns[0].unmask = lambda *a: released.append(real(*a)) or released[-1]  # type: ignore
    with pytest.raises(KeyboardInterrupt):
        round.run()
    again = SecureTurn(rules, ReleaseRecord(folder))
    if dies_at == 0:
        again.advertise()  # nothing had been sent: the round may begin
    else:
        with pytest.raises(Conflict, match="was begun before"):
            again.advertise()
    assert released == []


def test_a_client_answers_one_unmasking_only() -> None:
    round = Round(4)
    round.run()
    turn, survivors = round.turns[0], round.answers[Stage.MASK][0]
    with pytest.raises(AssertionError):
        turn.unmask({"survivors": [0, 1, 2]}, None)
    turn._stage = Stage.MASK  # even then
    with pytest.raises(Conflict, match="a second kind of share"):
        turn.unmask({"survivors": [0, 1, 2]}, None)
    turn._stage = Stage.MASK
    with pytest.raises(Conflict, match="a second kind of share"):
        turn.unmask(survivors, None)


def test_a_client_sends_an_update_once(tmp_path: Path) -> None:
    record = ReleaseRecord(tmp_path)
    record.begin(3)
    record.send_update(3, "round 1 from abc")
    again = ReleaseRecord(tmp_path)
    again.begin(4)
    with pytest.raises(Conflict, match="sent these numbers from the same parameters before"):
        again.send_update(4, "round 1 from abc")
    again.send_update(4, "round 1 from abd")
    with pytest.raises(Conflict, match="not the one"):
        again.release(3, [1], [2])
    with pytest.raises(Conflict, match="second kind"):
        again.release(4, [1, 2], [2])


def test_a_client_remembers_the_newest_names_of_each_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayps_client.secure.release_record._KEPT", 3)
    record = ReleaseRecord(tmp_path)
    names = ["evaluation of abc", *(f"round {at} from abc" for at in range(9))]
    assert all(record.add_once(name) for name in names)
    again = ReleaseRecord(tmp_path)
    assert not again.add_once("evaluation of abc")  # however many void rounds came after it
    assert [again.add_once(f"round {at} from abc") for at in (8, 7, 6, 5)] == [False, False, False, True]


def test_too_few_survivors_get_nothing_of_a_client() -> None:
    round = Round(5, 0.6)
    round.run()
    turn = round.turns[0]
    for survivors, why in (([0], "0 neighbours"), ([0, 1], "1 neighbours"), ([1, 2, 3, 4], "4 neighbours")):
        turn._stage = Stage.MASK
        with pytest.raises(VoidRound, match=why):
            turn.unmask({"survivors": survivors}, None)


def test_shares_for_another_client_round_or_job_are_refused() -> None:
    for change in ("swap", "round", "flip"):
        round = Round(3)
        real = round.server.shared

        def forged(messages: Any, real: Any = real, change: str = change) -> Any:
            found = real(messages)
            sealed = dict(found[0]["sealed"])
            if change == "swap":
                sealed["1"], sealed["2"] = sealed["2"], sealed["1"]
            elif change == "flip":
                sealed["1"] = "AAAA" + sealed["1"][4:]
            return found | {0: {"sealed": sealed}}

        round.server.shared = forged  # type: ignore[method-assign]
        if change == "round":
            other = RoundName(ROUND.job, 8)
            round.turns[1]._rules = dataclasses.replace(round.turns[1]._rules, round=other)
        with pytest.raises(VoidRound, match=r"the shares of the client 'c[12]'.* were not sealed by it") as void:
            round.run()
        assert void.value.data["refused"] == {"swap": [1, 2], "round": [1], "flip": [1]}[change]


def pins(n: int, tmp_path: Path) -> dict[int, PinnedKeys]:
    private = {k: Ed25519PrivateKey.generate() for k in range(n)}
    file = tmp_path / "peers.txt"
    file.write_text("# our clinics\n\n" + "".join(f"c{k} {public_text(key)}\n" for k, key in private.items()))
    return {k: PinnedKeys(key, read_peers(file)) for k, key in private.items()}


def test_all_clients_whose_messages_fail_a_check_are_named(tmp_path: Path) -> None:
    pinned = pins(5, tmp_path)
    round = Round(5, 0.5, verify=True, pinned=pinned)
    messages = {k: turn.advertise() for k, turn in round.turns.items()}
    answers = round.server.advertised(messages)[0]

    def refused(**changes: Any) -> Any:
        turn = SecureTurn(TurnRules(ROUND, 0, "c0", 0.5, 2, pinned[0]), Memory())
        turn._stage = Stage.ADVERTISE
        with pytest.raises(VoidRound) as void:
            turn.share({"neighbours": {**answers["neighbours"], **changes}})
        return void.value.data["refused"], str(void.value)

    own = answers["neighbours"]
    unsigned = {**own["3"], "signature": ""}
    assert refused(**{"3": unsigned})[0] == [3]
    numbers, text = refused(**{"3": unsigned, "4": {**own["4"], "name": "c1"}})  # under the name of another
    assert numbers == [3, 4] and "the keys of the client 'c3' (and 1 more) are not signed with its key" in text
    assert refused(**{"3": own["4"]})[0] == [3]  # a copy of another's message: the signature names its number
    one = pinned[4]
    twin = AdvertisedKeys("c4", public_of(new_private()), public_of(new_private()))
    signed = dataclasses.replace(twin, signature=one.sign(twin.signed_text(ROUND, 3)))
    numbers, text = refused(**{"3": signed.facts()})  # one key's owner under two numbers
    assert numbers == [3, 4] and "a name that another client has too" in text


def test_pinned_keys_bear_crashes_and_find_a_lying_server(tmp_path: Path) -> None:
    pinned = pins(5, tmp_path)
    for stage in STAGES:
        round = Round(5, 0.5, verify=True, pinned=pinned, dies={2: stage})
        assert np.array_equal(round.run(), round.expected())
    own_keys = Round(5, 0.5, verify=True, pinned=pinned)
    own_keys.turns[3] = SecureTurn(TurnRules(ROUND, 3, "c3", 0.5, 2), Memory())  # the server in the place of c3
    with pytest.raises(VoidRound, match="'c3' are not signed"):
        own_keys.run()
    two_worlds = Round(5, 0.5, verify=True, pinned=pinned)
    real = two_worlds.server.masked

    def lies(numbers: Any) -> Any:
        found = real(numbers)
        return {k: {"survivors": [0, 1, 2, 3, 4] if k % 2 else [0, 1, 2, 4]} for k in found}

    two_worlds.server.masked = lies  # type: ignore[method-assign]
    with pytest.raises(VoidRound, match="have signed the survivors"):
        two_worlds.run()
    (tmp_path / "bad").write_text("c0\n")
    with pytest.raises(ConfigError, match="line 1"):
        read_peers(tmp_path / "bad")


# ---- shares, numbers, graph


def test_any_t_shares_give_the_secret_and_the_field_is_one() -> None:
    assert pow(3, shamir.PRIME - 1, shamir.PRIME) == 1 and all(
        _is_strong_probable_prime(shamir.PRIME, a) for a in BASES
    )
    assert not any(_is_strong_probable_prime(2**256 + offset, 3) for offset in range(1, 297, 2))  # none in between
    secret = bytes(range(224, 256))
    shares = shamir.split(secret, 3, [1, 2, 5, 9, 1000])
    for some in itertools.combinations(shares, 3):
        assert shamir.combine({point: shares[point] for point in some}, 3) == secret
    assert shamir.combine(shares, 3) == secret
    assert all(len(share) == shamir.SHARE_BYTES for share in shares.values())
    assert len({share[-8:] for share in shamir.split(secret, 2, range(1, 50)).values()}) == 49
    assert set(shamir.split(secret, 1, [3, 4]).values()) == {b"\0" + secret}
    with pytest.raises(ConfigError, match="2 shares of a secret that needs 3"):
        shamir.combine({1: shares[1], 2: shares[2]}, 3)
    for bad in ((b"short", 2, [1, 2]), (secret, 3, [1, 2]), (secret, 1, [0, 1]), (secret, 2, [1, 1])):
        with pytest.raises(ConfigError):
            shamir.split(*bad)


BASES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41)


def _is_strong_probable_prime(n: int, base: int) -> bool:
    """Miller and Rabin's test."""
    odd, twos = n - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    x = pow(base, odd, n)
    return x in (1, n - 1) or any((x := x * x % n) == n - 1 for _ in range(twos - 1))


@pytest.mark.parametrize(
    ("bits", "max_weight", "clients", "size"), [(16, 1000, 50, 4), (16, 1000, 100, 8), (8, 1, 3, 4)]
)
def test_sums_of_whole_numbers_do_not_wrap_and_are_near_the_plain_sum(
    bits: int, max_weight: int, clients: int, size: int
) -> None:
    quantiser, made = Quantiser(1.5, bits, max_weight, clients), np.random.default_rng(1)
    assert quantiser.word.itemsize == size
    extreme = [ClientNumbers(np.array([1e9, 0.0]), 10**9, 1e9, 10**12)] * clients  # the largest of everything
    total = quantiser.read_sum(_summed(quantiser, extreme))
    assert total.weight == clients * max_weight and total.update.tolist() == [1.5 * total.weight, 0.0]
    assert total.loss == 128.0 * total.weight
    some = [
        ClientNumbers(made.normal(size=40) * 0.1, int(made.integers(1, max_weight + 1)), float(made.normal()), 7)
        for _ in range(clients)
    ]
    total = quantiser.read_sum(_summed(quantiser, some))
    counted = 7 if max_weight > 1 else 0  # with equal weights nothing tells how many samples a client has
    assert total.weight == sum(each.weight for each in some) and total.samples == counted * clients
    plain = sum(each.weight * each.update for each in some)
    assert np.abs(total.update - plain).max() <= quantiser.step * clients / 2 * (1 + 1e-9)
    assert math.isclose(total.loss, sum(s.weight * s.loss for s in some), abs_tol=128 * clients / quantiser.levels)


def _summed(quantiser: Quantiser, numbers: list[ClientNumbers]) -> Words:
    total = quantiser.words(quantiser.integers(numbers[0]))
    for each in numbers[1:]:
        total = total + quantiser.words(quantiser.integers(each))
    return total


def test_an_update_is_clipped_and_what_cannot_be_written_is_refused() -> None:
    quantiser = Quantiser(2.0, 16, 10, 3)
    long = quantiser.integers(ClientNumbers(np.array([3.0, 4.0]), 1, 0.0, 1))[:2] * quantiser.step
    assert np.allclose(long, [1.2, 1.6], atol=quantiser.step)
    for update, loss in ((np.array([np.nan]), 0.0), (np.array([np.inf]), 0.0), (np.zeros(1), math.inf)):
        with pytest.raises(TrainingError, match="not finite"):
            quantiser.integers(ClientNumbers(update, 1, loss, 1))
    with pytest.raises(ConfigError, match="does not fit into 64 bits"):
        Quantiser(1.0, 32, 1 << 20, 1 << 20)


def test_the_graph_is_regular_connected_and_as_large_as_the_bounds_say() -> None:
    for n, k in ((7, 6), (10, 4), (50, 20), (100, 99)):
        graph = draw_graph(range(n), k, b"seed")
        assert {len(others) for others in graph.values()} == {k}
        assert all(number in graph[other] for number, others in graph.items() for other in others)
        reached, edge = {0}, [0]
        while edge:
            edge = [other for each in edge for other in graph[each] if other not in reached and not reached.add(other)]  # type: ignore[func-returns-value]
        assert len(reached) == n
    assert draw_graph(range(50), 8, b"a") != draw_graph(range(50), 8, b"b")
    assert [neighbours_for(n, 0.5) for n in (1, 2, 3, 50)] == [0, 1, 2, 49]  # few clients: the complete graph
    last = 0
    for n in (1000, 10_000, 100_000):
        k = neighbours_for(n, 0.5)
        broken, void = failures(n, k, 0.5)
        assert broken <= 2.0**-40 and void <= 2.0**-30 and last < k < 200
        assert max(failures(n, k - 4, 0.5)[1] / 2.0**-30, failures(n, k - 4, 0.5)[0] / 2.0**-40) > 1
        last = k


def test_the_bounds_of_the_graph_count_what_a_simulation_counts() -> None:
    made, n, k, threshold = np.random.default_rng(3), 40, 14, 0.5
    t, hits, trials = shares_needed(k + 1, threshold), 0, 2000
    graph = draw_graph(range(n), k, b"x")
    for _ in range(trials):
        dead = set(made.permutation(n)[: math.ceil(0.2 * n)].tolist())
        hits += sum(sum(other not in dead for other in graph[each]) < t for each in graph if each not in dead)
    expected = failures(n, k, threshold)[1] * 0.8  # the bound counts the dead ones too
    assert 0.7 * expected < hits / trials < 1.3 * expected


# ---- noise


@pytest.mark.parametrize("sigma", [1, 3, 50])
def test_discrete_noise_has_the_distribution_of_its_formula(sigma: int) -> None:
    drawn = noise.NoiseSource(bytes([sigma] * 32)).gaussian(20_000, sigma)
    edge = 6 * sigma
    values = np.arange(-edge, edge + 1)
    weights = np.exp(-(values**2) / (2 * sigma**2))
    cells = np.array_split(values, min(len(values), 13))
    share = np.array([weights[cell + edge].sum() for cell in cells]) / weights.sum() * len(drawn)
    found = np.array([np.isin(drawn, cell).sum() for cell in cells])
    large = share > 5
    chi_square = (((found - share) ** 2 / share)[large]).sum()
    assert chi_square < 40, (chi_square, large.sum())  # at most 12 degrees of freedom: 7e-5; the key is fixed
    assert found.sum() >= len(drawn) - 1


def test_noise_is_sized_for_the_fewest_survivors() -> None:
    assert noise_sizes.share_of(100.0, 25) == 20 and noise_sizes.share_of(1.0, 100) == 1
    assert noise_sizes.rounding(400) == 10
    worst = Quantiser(1.0, 8, 1, 3)
    made = np.random.default_rng(0)
    for _ in range(50):
        update = made.normal(size=64)
        rounded = worst.integers(ClientNumbers(update, 1, 0.0, 1))[:-3]
        assert np.linalg.norm(rounded) <= worst.levels + noise_sizes.rounding(64)
    for bad in (0, 1 << 25):
        with pytest.raises(ConfigError, match="standard deviation"):
            noise.NoiseSource().gaussian(1, bad)
    large = noise.NoiseSource(b"l" * 32).gaussian(3000, 1 << 20)
    assert 0.95 < large.std() / (1 << 20) < 1.05
    assert Quantiser(1.0, 16, 1000, 50, margin=noise_sizes.margin_of(1 << 26, 50)).word.itemsize == 8


def test_the_sum_of_the_shares_is_the_noise_that_is_claimed() -> None:
    """Many clients, without masks: mean, variance and independence of the sum, and the numbers after the update."""
    n, size, sigma = 40, 4000, 25
    source = noise.NoiseSource(b"s" * 32)
    total = np.zeros(size + EXTRAS, dtype=np.int64)
    for _ in range(n):
        given = np.zeros_like(total)
        noise.add_share(given, sigma, source)
        total += given
    drawn = total[:-EXTRAS] / (sigma * math.sqrt(n))
    assert not total[-EXTRAS:].any()
    assert abs(drawn.mean()) < 4 / math.sqrt(size)
    assert abs(drawn.var() - 1) < 4 * math.sqrt(2 / size)
    assert abs((drawn[1:] * drawn[:-1]).mean()) < 4 / math.sqrt(size)
    assert abs((drawn**4).mean() - 3) < 4 * math.sqrt(96 / size)  # the fourth moment of a Gaussian
    untouched = np.arange(9)
    noise.add_share(untouched, 0, source)
    assert (untouched == np.arange(9)).all()


def test_the_sum_under_masks_is_that_of_the_updates_and_the_shares_of_the_survivors() -> None:
    quantiser = Quantiser(1.0, 12, 1, 5, counts=False, margin=noise_sizes.margin_of(900, 5))
    made, source = np.random.default_rng(3), noise.NoiseSource(b"m" * 32)
    round = Round(5, dies={1: Stage.MASK, 4: Stage.UNMASK})
    size = SIZE - EXTRAS
    plain = {k: quantiser.integers(ClientNumbers(made.normal(size=size), 1, 0.5, 7)) for k in range(5)}
    noised = {k: integers.copy() for k, integers in plain.items()}
    for integers in noised.values():
        noise.add_share(integers, 900, source)
    round.plain = {k: quantiser.words(integers) for k, integers in noised.items()}
    found = quantiser.read_sum(round.run())
    left = [0, 2, 3, 4]  # the noise of client 1 is gone with it
    assert (found.update == sum(noised[k][:-EXTRAS] for k in left) * quantiser.step).all()
    assert found.weight == 4 and found.loss == 0 and found.samples == 0
    assert not (found.update == sum(plain[k][:-EXTRAS] for k in left) * quantiser.step).any()
