"""Who is at fault when clients refuse each other's messages in a secure round: all cases of few clients."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from rayps_client.secure.protocol import Stage

from rayps.federated.remote.blamed_clients import VOID_ROUNDS, Refusal, Refusals, VoidCounts, blamed, counted


def of(clients: int, edges: Iterator[tuple[int, int]] | set[tuple[int, int]]) -> Refusals:
    """Refusals between clients that are all neighbours. An edge is (who refuses, who is refused)."""
    everyone, refused = frozenset(range(clients)), dict[int, Refusal]()
    for who, whom in edges:
        before = refused.get(who, Refusal(Stage.SHARE, frozenset()))
        refused[who] = Refusal(Stage.SHARE, before.whom | {whom})
    return Refusals({number: everyone - {number} for number in everyone}, refused)


@pytest.mark.parametrize("clients", [2, 3, 4])
def test_no_minority_has_another_client_blamed(clients: int) -> None:
    """All sets of refusals of up to 4 clients, with all sets of clients that may have lied in them."""
    pairs = list(itertools.permutations(range(clients), 2))
    groups = [
        set(group)
        for size in range(clients + 1)
        if 2 * size < clients
        for group in itertools.combinations(range(clients), size)
    ]
    seen = set[int]()
    for kept in itertools.product((False, True), repeat=len(pairs)):
        edges = {pair for pair, is_kept in zip(pairs, kept, strict=True) if is_kept}
        found = blamed(of(clients, edges))
        assert found == blamed(of(clients, {(whom, who) for who, whom in edges}))  # either way
        assert 2 * len(found) < clients
        seen.add(len(found))
        for liars in groups:
            if all(set(edge) & liars for edge in edges):  # honest clients refuse liars alone
                assert found <= liars, (edges, liars)
        for number in range(clients):
            others = {other for edge in edges if number in edge for other in edge} - {number}
            if found and 2 * len(others) > clients - 1:
                assert number in found
    assert seen == ({0} if clients == 2 else {0, 1})


def test_five_clients_of_which_two_are_wrong_and_what_is_no_refusal() -> None:
    everyone_refuses_two = {(who, whom) for who in range(5) for whom in (3, 4) if who != whom}
    assert blamed(of(5, everyone_refuses_two)) == {3, 4}
    assert blamed(of(5, {(4, 0), (4, 1), (4, 2)})) == {4}  # one that refuses the others, and not the others
    assert blamed(of(5, {(0, 1), (0, 0), (0, 9)})) == frozenset()  # neither itself, nor one that is no neighbour
    near = {k: frozenset({(k - 1) % 6, (k + 1) % 6}) for k in range(6)}
    ring = Refusals(near, {0: Refusal("x", frozenset({1, 2, 3}))})
    assert blamed(ring) == frozenset()  # 2 and 3 have no keys of 0
    both = Refusals(ring.neighbours, {0: Refusal("x", frozenset({1})), 2: Refusal("x", frozenset({1}))})
    assert blamed(both) == {1}
    assert blamed(Refusals({}, {})) == frozenset()


def test_so_many_void_rounds_exclude_a_client_and_a_sum_with_it_forgives() -> None:
    bad, quiet = of(3, {(0, 2), (1, 2)}), of(3, set())
    none = frozenset[int]()
    counts = VoidCounts()
    for serial in range(1, VOID_ROUNDS):
        counts, decision = counted(counts, serial, bad, none)
        assert (decision.excluded, decision.undecided) == (none, False)
    again, decision = counted(counts, VOID_ROUNDS - 1, bad, none)  # a worker that is started again says the same
    assert again == counts and not decision.excluded
    for between in (quiet, of(3, {(0, 1)})):  # rounds without evidence against it neither count nor forgive
        counts, decision = counted(counts, VOID_ROUNDS + 5, between, none)
        assert not decision.excluded and counts.blamed == {2: VOID_ROUNDS - 1}
    counted_sum, decision = counted(counts, 20, quiet, frozenset({0, 1}))
    assert counted_sum.blamed == {2: VOID_ROUNDS - 1} and not decision.excluded  # it was not in this sum
    assert counted(counts, 20, quiet, frozenset({0, 2}))[0].blamed == {}
    assert not counted(counts, 20, bad, frozenset({0, 1}))[1].excluded  # the round was not void
    counts, decision = counted(counts, 21, bad, none)
    assert decision.excluded == {2} and counts.blamed == {}
    assert VoidCounts.read(counts.facts()) == counts and VoidCounts.read(None) == VoidCounts()


def test_undecided_rounds_are_told_once_until_there_is_a_sum() -> None:
    pair, none = of(2, {(0, 1)}), frozenset[int]()
    counts, told = VoidCounts(), list[bool]()
    for serial in range(1, 3 * VOID_ROUNDS):
        counts, decision = counted(counts, serial, pair, none)
        assert not decision.excluded
        told.append(decision.undecided)
    assert told == [serial == VOID_ROUNDS for serial in range(1, 3 * VOID_ROUNDS)]
    counts, _ = counted(counts, 50, of(2, set()), frozenset({0, 1}))
    assert counts.undecided == 0
    counts, _ = counted(counts, 51, of(2, set()), none)  # void, and nobody has refused anybody
    assert counts.undecided == 0
