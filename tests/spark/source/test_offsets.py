"""Positions: equal ones have equal text, and ranges between two of them."""

import json
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.client.errors import ClientError
from penstock.spark.offsets import OffsetRange, Position, TopicPosition, ranges_between

names = st.text("abcversiontopics", min_size=1, max_size=8)
topics = st.builds(
    TopicPosition,
    st.none() | st.uuids(),
    st.dictionaries(st.integers(0, 20), st.integers(0, 1 << 62), min_size=1, max_size=4),
)
kept = st.dictionaries(names, topics, max_size=4)
positions = st.builds(Position, kept, st.none() | kept)
A, B = UUID(int=1), UUID(int=2)


def at(*offsets: int, id: UUID | None = A) -> Position:
    return Position({"t": TopicPosition(id, dict(enumerate(offsets)))})


@given(positions)
def test_a_position_survives_a_round_trip(position):
    assert Position.from_json(json.loads(json.dumps(position.to_json()))) == position


@given(positions, st.randoms())
def test_equal_positions_have_equal_text(position, chance):
    shuffled = {}
    for name in chance.sample(sorted(position.topics), len(position.topics)):
        topic = position.topics[name]
        order = chance.sample(sorted(topic.offsets), len(topic.offsets))
        shuffled[name] = TopicPosition(topic.id, {part: topic.offsets[part] for part in order})
    assert json.dumps(Position(shuffled, position.since).to_json()) == json.dumps(position.to_json())


def test_checkpoints_of_sparks_own_connector_are_accepted():
    content = {"orders": {"1": 7, "0": 5}, "version": {"0": 1}}
    position = Position.from_json(content)
    assert position.offsets == {("orders", 0): 5, ("orders", 1): 7, ("version", 0): 1}
    assert position.ids == {"orders": None, "version": None}


@pytest.mark.parametrize(
    "content", [{"version": 2, "topics": {}}, {"topics": 5}, {"t": [1]}, {"t": {"x": 1}}]
)
def test_other_content_is_refused(content):
    with pytest.raises(ClientError, match="position that this version cannot read"):
        Position.from_json(content)


def test_ranges_between_two_positions():
    assert ranges_between(at(5, 3), at(9, 3)) == [OffsetRange("t", A, 0, 5, 9)]


def test_new_partitions_are_read_from_their_first_offset():
    assert ranges_between(at(5), at(5, 4)) == [OffsetRange("t", A, 1, 0, 4)]


def test_new_topics_are_read_from_their_first_offset():
    assert ranges_between(Position({}), at(4)) == [OffsetRange("t", A, 0, 0, 4)]


def test_offsets_do_not_apply_to_a_recreated_topic():
    assert ranges_between(at(5, id=A), at(9, id=B)) == [OffsetRange("t", B, 0, 0, 9)]
    assert ranges_between(at(5, id=None), at(9, id=B)) == [OffsetRange("t", B, 0, 5, 9)]


def test_a_truncated_log_has_nothing_to_read():
    assert ranges_between(at(9), at(5)) == []


def test_the_end_of_the_first_batch_contains_its_start():
    first = at(5).as_initial()
    end = first.next_position(at(9).topics)
    later = at(30).as_initial()
    assert ranges_between(later, end) == ranges_between(first, end) == [OffsetRange("t", A, 0, 5, 9)]
    assert ranges_between(later, first) == [], "a batch in which only other sources have data"
    second = end.next_position(at(12).topics)
    assert second == at(12)
    assert ranges_between(end, second) == [OffsetRange("t", A, 0, 9, 12)]


@given(positions)
def test_an_idle_query_keeps_the_same_text(position):
    same = position.next_position(dict(position.topics))
    assert json.dumps(same.to_json()) == json.dumps(position.to_json())
