"""Which dead letters are selected, where they are replayed to, and with which headers, without a broker."""

import json
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kafka.partitioner.default import murmur2 as reference

from penstock.client.deadletters.dead_letter import (
    DeadLetter,
    DeadLetterFilter,
    DeadLetterId,
    Resolution,
    ResolutionState,
    matches_error,
    parse_dead_letter_id,
    parse_resolution,
    resolution_key,
    resolution_value,
)
from penstock.client.deadletters.edit import DeadLetterEdit, apply_edit
from penstock.client.deadletters.headers import (
    Failure,
    Origin,
    failure_headers,
    is_for_group,
    original_headers,
    read_failure,
    read_origin,
)
from penstock.client.deadletters.topics import DeadLetterError, is_dead_letter_topic
from penstock.client.deadletters.writer import (
    NotReplayable,
    ReplayDestination,
    ReplayRoute,
    ReplayTarget,
    ResolutionEntry,
    murmur2,
    outgoing_record,
    partition_for_key,
    replay_route,
    split_batches,
    transaction_chunks,
)
from penstock.protocol.dead_letter_headers import (
    EDITED_FROM_HEADER,
    HANDLER_HEADER,
    TOPIC_HEADER,
    WITHOUT_RECORD_HEADER,
)
from penstock.protocol.record_batch import Record

OWN = (("trace", b"abc"), ("none", None))
HERE = {"topic": "t", "partition": 9, "offset": 9, "timestamp_ms": 9}
NOW_MS = 1_800_000_000_000


def letter(number=7, *, partition=2, headers=OWN, more=(), **fields):
    origin = Origin(topic="orders", partition=partition, offset=70 + number, timestamp_ms=1000 + number)
    failure = Failure(error_class="shop.errors.NoColour", message="no such colour", stack="Trace")
    told = failure_headers(headers, origin, failure, group="billing", attempts=5)
    told = [*told, (HANDLER_HEADER, b"shop.bill"), *more]
    values = {"key": b"k", "value": b"v", "timestamp": 5000 + number, **fields}
    return DeadLetter(
        "orders.dlq", 1, Record(number, values["timestamp"], values["key"], values["value"], tuple(told))
    )


# Which


@pytest.mark.parametrize(
    ("given", "is_meant"),
    [
        ({}, True),
        ({"since_ms": 5007, "until_ms": 5008}, True),
        ({"since_ms": 5008}, False),
        ({"until_ms": 5007}, False),
        ({"errors": ("NoColour",)}, True),
        ({"errors": ("shop.errors.*",)}, True),
        ({"errors": ("*Error", "No*")}, True),
        ({"errors": ("Colour",)}, False),
        ({"keys": (b"x", b"k")}, True),
        ({"keys": (b"x",)}, False),
        ({"headers": (("trace", b"abc"),)}, True),
        ({"headers": (("trace", b"abc"), ("trace", b"x"))}, False),
        ({"groups": ("bill*",), "handlers": ("shop.bill",)}, True),
        ({"groups": ("other",)}, False),
        ({"handlers": ("other",)}, False),
        ({"partitions": (0, 1), "offsets": ((0, 3), (7, 7))}, True),
        ({"partitions": (0,)}, False),
        ({"offsets": ((0, 6), (8, 9))}, False),
        ({"keys": (b"k",), "errors": ("Other",)}, False),
    ],
)
def test_all_that_is_given_must_hold(given, is_meant):
    wanted = DeadLetterFilter(**given)
    assert wanted.matches(letter()) is is_meant
    assert wanted.is_empty is (given == {})


def test_what_tells_nothing_is_of_no_group_and_has_no_error():
    stray = DeadLetter("orders.dlq", 0, Record(0, 5, b"k", b"v"))
    assert DeadLetterFilter().matches(stray)
    assert not DeadLetterFilter(groups=("*",)).matches(stray)
    assert not DeadLetterFilter(handlers=("*",)).matches(stray)
    assert not DeadLetterFilter(errors=("?*",)).matches(stray)
    assert matches_error("*", "")
    assert matches_error("shop.Error[int]", "shop.Error[int]"), "a name is not only a pattern"


def test_places_as_people_write_them():
    assert parse_dead_letter_id("3:42") == DeadLetterId(3, 42)
    assert str(DeadLetterId(3, 42)) == "3:42"
    for text in ("", "3", ":4", "3:", "-1:2", "1:2:3", "a:b", " 1:2", "9" * 30 + ":1"):
        assert parse_dead_letter_id(text) is None


def test_topics_of_letters_by_their_names():
    assert is_dead_letter_topic("orders.dlq")
    for name in ("orders", ".dlq", "orders.retry.1", "orders.dlq.replayed"):
        assert not is_dead_letter_topic(name)


# Where to


def test_to_the_original_topic_they_go_as_they_were():
    destination = ReplayDestination()
    route = replay_route(letter(), destination)
    assert route == ReplayRoute("orders")
    out = outgoing_record(letter(), route, destination, partitions=3, now_ms=NOW_MS)
    assert (out.topic, out.partition) == ("orders", 2)
    assert out.record == Record(0, NOW_MS, b"k", b"v", OWN)
    keeping = ReplayDestination(keeps_times=True)
    assert outgoing_record(letter(), route, keeping, partitions=3, now_ms=NOW_MS).record.timestamp == 1007
    # That partition is not there any more: then it is the key that decides.
    out = outgoing_record(letter(partition=5), route, destination, partitions=3, now_ms=NOW_MS)
    assert out.partition == partition_for_key(b"k", 3)


def test_back_to_the_group_they_tell_whose_they_are_and_are_due_at_once():
    destination = ReplayDestination(target=ReplayTarget.GROUP, keeps_times=True)
    route = replay_route(letter(), destination)
    assert route == ReplayRoute("orders.retry.1", "billing")
    out = outgoing_record(letter(partition=5), route, destination, partitions=3, now_ms=NOW_MS)
    assert (out.topic, out.partition, out.record.timestamp) == ("orders.retry.1", 2, NOW_MS)
    headers = out.record.headers
    assert is_for_group(headers, "billing")
    assert not is_for_group(headers, "shipping")
    origin = read_origin(headers, **HERE)
    assert origin == Origin(
        topic="orders", partition=5, offset=77, timestamp_ms=1007, attempts=0, group="billing"
    )
    assert (HANDLER_HEADER, b"shop.bill") in headers
    assert read_failure(headers).error_class == "shop.errors.NoColour"
    assert tuple(original_headers(headers)) == OWN


def test_to_another_topic_all_of_them_go_by_their_keys():
    destination = ReplayDestination(target=ReplayTarget.TOPIC, topic="elsewhere")
    stray = DeadLetter("orders.dlq", 4, Record(0, 5, None, b"v"))
    assert replay_route(stray, destination) == ReplayRoute("elsewhere")
    assert (
        outgoing_record(stray, ReplayRoute("elsewhere"), destination, partitions=3, now_ms=1).partition == 1
    )
    out = outgoing_record(letter(), ReplayRoute("elsewhere"), destination, partitions=100, now_ms=1)
    assert out.partition == partition_for_key(b"k", 100)


def test_what_cannot_be_replayed():
    for destination in (
        ReplayDestination(),
        ReplayDestination(target=ReplayTarget.GROUP),
        ReplayDestination(target=ReplayTarget.TOPIC, topic="t"),
    ):
        assert (
            replay_route(letter(more=[(WITHOUT_RECORD_HEADER, b"gone")]), destination) is NotReplayable.BARE
        )
        assert replay_route(letter(key=None, value=None), destination) is NotReplayable.BARE
    assert isinstance(replay_route(letter(value=None), ReplayDestination()), ReplayRoute), (
        "a tombstone is a record"
    )
    stray = DeadLetter("orders.dlq", 0, Record(0, 5, b"k", b"v"))
    assert replay_route(stray, ReplayDestination()) is NotReplayable.STRAY
    nobody = DeadLetter("o.dlq", 0, Record(0, 5, b"k", b"v", ((TOPIC_HEADER, b"o"),)))
    assert replay_route(nobody, ReplayDestination(target=ReplayTarget.GROUP)) is NotReplayable.STRAY
    told = tuple(each for each in letter().record.headers if not each[0].endswith(".group"))
    assert replay_route(
        DeadLetter("o.dlq", 0, Record(0, 5, b"k", b"v", told)), ReplayDestination(target=ReplayTarget.GROUP)
    ) is (NotReplayable.UNCLAIMED)


@given(st.binary(max_size=50), st.integers(1, 1000))
def test_keys_go_where_other_producers_send_them(key, count):
    assert murmur2(key) == reference(key)
    assert partition_for_key(key, count) == (reference(key) & 0x7FFFFFFF) % count


# The list


TOPIC_ID = UUID(int=5)


def test_marks_are_read_as_they_were_written():
    mark = Resolution(ResolutionState.EDITED, at_ms=12, replay="dlq-1", to="orders")
    assert parse_resolution(
        resolution_key(DeadLetterId(1, 2)), resolution_value(mark, TOPIC_ID), TOPIC_ID
    ) == (DeadLetterId(1, 2), mark)
    assert parse_resolution(b"1:2", resolution_value(mark, None), TOPIC_ID) == (DeadLetterId(1, 2), mark)


def test_what_replays_on_spark_write_is_replayed():
    value = json.dumps({"at": 5, "replay": "letters-1", "to": "orders", "topicId": str(TOPIC_ID)}).encode()
    mark = Resolution(ResolutionState.REPLAYED, at_ms=5, replay="letters-1", to="orders")
    assert parse_resolution(b"0:7", value, TOPIC_ID) == (DeadLetterId(0, 7), mark)


def test_marks_of_an_earlier_topic_of_the_name_are_nothing():
    value = resolution_value(Resolution(ResolutionState.REPLAYED), UUID(int=6))
    assert parse_resolution(b"0:7", value, TOPIC_ID) is None
    assert parse_resolution(b"0:7", value, None) is not None, "where brokers know no ids"


@given(st.none() | st.binary() | st.sampled_from([b"[]", b'{"state": "later", "at": "x"}', b'{"at": null}']))
def test_whatever_stands_under_a_place_is_done_with(value):
    """The key says it. What the value says may be of a later version, or nothing that makes sense."""
    assert parse_resolution(b"3:4", value, TOPIC_ID) == (
        DeadLetterId(3, 4),
        Resolution(ResolutionState.REPLAYED),
    )
    assert parse_resolution(b"else", value, TOPIC_ID) is None


# Correcting


def test_a_corrected_letter_tells_the_same_and_what_it_took_the_place_of():
    change = DeadLetterEdit(value=b"new", headers=(("trace", b"2"), ("extra", b"3")))
    made = apply_edit(letter(more=[(WITHOUT_RECORD_HEADER, b"gone")]), change, NOW_MS)
    new = DeadLetter("orders.dlq", 1, made)
    assert (made.key, made.value, made.timestamp) == (b"k", b"new", NOW_MS)
    assert new.own_headers == [("none", None), ("trace", b"2"), ("extra", b"3")]
    assert new.origin == letter().origin
    assert new.failure == letter().failure
    assert new.edited_from == DeadLetterId(1, 7)
    assert new.has_record
    again = apply_edit(new._replace(record=made._replace(offset=11)), DeadLetterEdit(key=b"other"), NOW_MS)
    assert [value for name, value in again.headers if name == EDITED_FROM_HEADER] == [b"1:11"]
    assert (again.key, again.value) == (b"other", b"new")


def test_what_is_no_correction():
    with pytest.raises(DeadLetterError, match="1:7 has these values already"):
        apply_edit(letter(), DeadLetterEdit(value=b"v", key=b"k"), NOW_MS)
    with pytest.raises(DeadLetterError, match="cannot be changed"):
        apply_edit(letter(), DeadLetterEdit(headers=((TOPIC_HEADER, b"x"),)), NOW_MS)


# Transactions


@given(st.lists(st.integers(0, 5 << 20), max_size=12), st.integers(1, 5))
def test_a_transaction_is_bounded_and_nothing_is_left_out(sizes, most):
    entries = [
        ResolutionEntry(letter(n, value=bytes(size)), Resolution(ResolutionState.PURGED))
        for n, size in enumerate(sizes)
    ]
    found = list(transaction_chunks(entries, most))
    assert [entry for chunk in found for entry in chunk] == entries
    for chunk in found:
        assert 1 <= len(chunk) <= most
        assert len(chunk) == 1 or sum(entry.size_bytes for entry in chunk) <= 8 << 20
    batches = list(split_batches(entry.letter.record for entry in entries))
    assert [record for batch in batches for record in batch] == [entry.letter.record for entry in entries]
    assert all(len(batch) == 1 or sum(len(each.value) for each in batch) < 256 << 10 for batch in batches)
