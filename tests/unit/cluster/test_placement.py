"""Placement: racks first, brokers evenly, fenced brokers last and never leading."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cluster.controller.placement import UsableBroker, place_replicas
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.steps import finish


def first(_: int) -> int:
    return 0


def test_one_broker_takes_everything() -> None:
    placed = finish(place_replicas([UsableBroker(7)], partitions=3, replication_factor=1, draw=first))
    assert placed == [(7,), (7,), (7,)]


def test_brokers_take_turns_and_followers_change_with_every_round() -> None:
    brokers = [UsableBroker(1), UsableBroker(2), UsableBroker(3)]
    assert finish(place_replicas(brokers, partitions=6, replication_factor=2, draw=first)) == [
        (1, 2), (2, 3), (3, 1),
        (1, 3), (2, 1), (3, 2),
    ]  # fmt: skip


def test_the_start_is_drawn() -> None:
    brokers = [UsableBroker(1), UsableBroker(2), UsableBroker(3)]
    placed = finish(place_replicas(brokers, partitions=1, replication_factor=1, draw=lambda n: n - 1))
    assert placed == [(3,)]


def test_replicas_go_to_different_racks() -> None:
    brokers = [UsableBroker(1, "a"), UsableBroker(2, "a"), UsableBroker(3, "b"), UsableBroker(4, "b")]
    rack = {broker.id: broker.rack for broker in brokers}
    placed = finish(place_replicas(brokers, partitions=8, replication_factor=2, draw=first))
    assert all(len({rack[broker] for broker in replicas}) == 2 for replicas in placed)
    assert Counter(replicas[0] for replicas in placed) == {1: 2, 2: 2, 3: 2, 4: 2}
    assert Counter(broker for replicas in placed for broker in replicas) == {1: 4, 2: 4, 3: 4, 4: 4}
    # Each leader is followed by both brokers of the other rack, not always by the same one.
    assert len(set(placed)) == 8


def test_more_replicas_than_racks_use_a_rack_again() -> None:
    brokers = [UsableBroker(1, "a"), UsableBroker(2, "a"), UsableBroker(3, "b")]
    (placed,) = finish(place_replicas(brokers, partitions=1, replication_factor=3, draw=first))
    assert set(placed) == {1, 2, 3}


def test_a_fenced_broker_is_the_last_choice_and_never_leads() -> None:
    brokers = [UsableBroker(1, None, True), UsableBroker(2), UsableBroker(3)]
    assert {
        broker
        for replicas in finish(place_replicas(brokers, partitions=10, replication_factor=2, draw=first))
        for broker in replicas
    } == {2, 3}
    placed = finish(place_replicas(brokers, partitions=10, replication_factor=3, draw=first))
    assert all(replicas[2] == 1 for replicas in placed)


def test_a_rack_that_is_wholly_fenced_does_not_lead() -> None:
    brokers = [UsableBroker(1, "a", True), UsableBroker(2, "b")]
    placed = finish(place_replicas(brokers, partitions=4, replication_factor=2, draw=first))
    assert placed == [(2, 1)] * 4


def test_a_rack_that_is_wholly_fenced_is_chosen_when_there_are_too_few_others() -> None:
    brokers = [UsableBroker(1, "a", True), UsableBroker(2, "b"), UsableBroker(3, "c")]
    assert finish(place_replicas(brokers, partitions=4, replication_factor=2, draw=first)) == [
        (2, 3), (3, 2), (2, 3), (3, 2),
    ]  # fmt: skip
    placed = finish(place_replicas(brokers, partitions=4, replication_factor=3, draw=first))
    assert all(replicas[2] == 1 for replicas in placed)


@pytest.mark.parametrize(
    ("brokers", "replication_factor", "reason"),
    [
        ([], 1, "fenced"),
        ([UsableBroker(1, None, True)], 1, "All brokers are currently fenced"),
        ([UsableBroker(1)], 2, "only 1 broker"),
        ([UsableBroker(1)], 0, "larger than 0"),
    ],
)
def test_the_impossible_is_refused(brokers: list[UsableBroker], replication_factor: int, reason: str) -> None:
    with pytest.raises(ApiError, match=reason) as refused:
        finish(place_replicas(brokers, partitions=1, replication_factor=replication_factor, draw=first))
    assert refused.value.code is ErrorCode.invalid_replication_factor


@given(
    racks=st.lists(st.sampled_from(["a", "b", "c", None]), min_size=1, max_size=9),
    fenced=st.sets(st.integers(0, 8)),
    partitions=st.integers(1, 40),
    data=st.data(),
)
def test_every_placement_is_sound(
    racks: list[str | None], fenced: set[int], partitions: int, data: st.DataObject
) -> None:
    brokers = [UsableBroker(number, rack, number in fenced) for number, rack in enumerate(racks)]
    live = {broker.id for broker in brokers if not broker.fenced}
    if not live:
        return
    replication_factor = data.draw(st.integers(1, len(brokers)))
    placed = finish(
        place_replicas(
            brokers,
            partitions=partitions,
            replication_factor=replication_factor,
            draw=lambda n: data.draw(st.integers(0, n - 1)),
        )
    )
    assert len(placed) == partitions
    for replicas in placed:
        assert len(set(replicas)) == replication_factor
        assert replicas[0] in live
        used = {racks[broker] or "" for broker in replicas}
        assert len(used) == min(replication_factor, len({rack or "" for rack in racks}))


@given(brokers=st.integers(1, 8), rounds=st.integers(1, 4), data=st.data())
def test_full_rounds_without_racks_are_perfectly_even(brokers: int, rounds: int, data: st.DataObject) -> None:
    replication_factor = data.draw(st.integers(1, brokers))
    placed = finish(
        place_replicas(
            [UsableBroker(number) for number in range(brokers)],
            partitions=brokers * rounds,
            replication_factor=replication_factor,
            draw=first,
        )
    )
    assert set(Counter(replicas[0] for replicas in placed).values()) == {rounds}
    assert set(Counter(b for replicas in placed for b in replicas).values()) == {rounds * replication_factor}
