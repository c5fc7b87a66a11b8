"""Timers, the hash that maps groups to partitions, and parsing of consumer subscriptions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.groups.classic.script import subscription

from penstock.groups.classic.classic_group_data import CLASSIC_GROUP_TRANSITIONS, ClassicGroupState
from penstock.groups.embedded_protocol import subscribed_topics
from penstock.groups.timers import Timers
from penstock.groups.topics import coordinator_partition


def due(timers: Timers[str], now_ms: int) -> list[str]:
    keys = []
    while (key := timers.pop_due(now_ms)) is not None:
        keys.append(key)
    return keys


def test_timers_come_up_once_in_order() -> None:
    timers: Timers[str] = Timers()
    timers.schedule("late", 30)
    timers.schedule("early", 10)
    timers.schedule("also early", 10)
    assert timers.next_deadline_ms() == 10
    assert due(timers, 9) == []
    assert due(timers, 20) == ["early", "also early"]
    assert due(timers, 30) == ["late"]
    assert timers.next_deadline_ms() is None


def test_a_moved_timer_has_only_its_new_deadline() -> None:
    timers: Timers[str] = Timers()
    timers.schedule("a", 10)
    timers.schedule("a", 20)
    assert timers.next_deadline_ms() == 20
    timers.schedule("a", 5)
    assert due(timers, 5) == ["a"]
    assert due(timers, 100) == []


def test_the_clock_is_set_and_deadlines_move_along() -> None:
    timers: Timers[str] = Timers()
    timers.schedule("a", 10)
    timers.schedule("b", 20)
    timers.shift(1_000)
    assert due(timers, 1_009) == []
    assert due(timers, 1_020) == ["a", "b"]


timer_steps = st.lists(
    st.one_of(
        st.tuples(st.just("schedule"), st.integers(0, 4), st.integers(0, 50)),
        st.tuples(st.just("cancel"), st.integers(0, 4), st.just(0)),
        st.tuples(st.just("pop"), st.just(0), st.integers(0, 50)),
        st.tuples(st.just("shift"), st.just(0), st.integers(-10, 10)),
    )
)


@given(timer_steps)
def test_timers_are_a_dictionary_of_deadlines(steps: list[tuple[str, int, int]]) -> None:
    timers: Timers[int] = Timers()
    model: dict[int, int] = {}
    for action, key, at_ms in steps:
        match action:
            case "schedule":
                timers.schedule(key, at_ms)
                model[key] = at_ms
            case "cancel":
                timers.cancel(key)
                model.pop(key, None)
            case "shift":
                timers.shift(at_ms)
                model = {each: deadline + at_ms for each, deadline in model.items()}
            case "pop":
                popped = timers.pop_due(at_ms)
                ready = {each: deadline for each, deadline in model.items() if deadline <= at_ms}
                assert (popped is None) == (not ready)
                if popped is not None:
                    assert model.pop(popped) == min(ready.values())
        assert timers.next_deadline_ms() == min(model.values(), default=None)


@pytest.mark.parametrize(
    ("name", "hash_code"),
    [
        ("", 0),
        ("hello", 99_162_322),
        ("polygenelubricants", -(2**31)),
        ("\N{GRINNING FACE}", 31 * 0xD83D + 0xDE00),
    ],
)
def test_groups_are_placed_by_javas_hash(name: str, hash_code: int) -> None:
    expected = 0 if hash_code == -(2**31) else abs(hash_code)
    assert coordinator_partition(name, 2**31) == expected
    assert coordinator_partition(name, 50) == expected % 50


def test_the_topics_of_a_subscription() -> None:
    assert subscribed_topics(subscription(("a", "bc"))) == {"a", "bc"}
    assert subscribed_topics(subscription(())) == frozenset()
    newer = b"\x00\x03" + subscription(("a",), b"data")[2:] + b"whatever later versions add"
    assert subscribed_topics(newer) == {"a"}


@pytest.mark.parametrize(
    "metadata",
    [b"", b"\x00", b"\xff\xff\x00\x00\x00\x00", b"\x00\x00\x7f\xff\xff\xff", b"\x00\x00\x00\x00\x00\x01\x00\x05ab",
     b"\x00\x00\x00\x00\x00\x01\x00\x01\xff", b"\x00\x00\xff\xff\xff\xff"],
)  # fmt: skip
def test_what_is_no_subscription_is_not_misread(metadata: bytes) -> None:
    assert subscribed_topics(metadata) is None


@given(st.binary(max_size=60))
def test_any_bytes_may_come(metadata: bytes) -> None:
    subscribed_topics(metadata)


def test_every_state_has_its_transitions() -> None:
    assert set(CLASSIC_GROUP_TRANSITIONS) == set(ClassicGroupState)
    assert all(
        ClassicGroupState.DEAD in followers
        for state, followers in CLASSIC_GROUP_TRANSITIONS.items()
        if state is not ClassicGroupState.DEAD
    )
