"""Which letters are meant, where they go and what they are there: rules without a broker."""

import json
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kafka.partitioner.default import murmur2 as reference

from penstock.client.deadletters.editing import Change, edited
from penstock.client.deadletters.filters import Filter, is_error
from penstock.client.deadletters.letter import Letter, Spot, parse_spot
from penstock.client.deadletters.marks import Mark, State, key_of, read_mark, value_of
from penstock.client.deadletters.placing import murmur2, partition_of
from penstock.client.deadletters.routing import Aim, Destination, Left, Route, outgoing, route_of
from penstock.client.deadletters.topics import DeadLetterError, holds_letters
from penstock.client.deadletters.writing import Entry, _batches, chunks
from penstock.client.letters import Failure, Origin, failure_in, headers_for, is_for, origin_of, restored
from penstock.protocol.letters import EDITED_FROM, HANDLER, TOPIC, WITHOUT_RECORD
from penstock.protocol.records import Record

OWN = (("trace", b"abc"), ("none", None))
HERE = {"topic": "t", "partition": 9, "offset": 9, "timestamp_ms": 9}
NOW_MS = 1_800_000_000_000


def letter(number=7, *, partition=2, headers=OWN, more=(), **fields):
    origin = Origin(topic="orders", partition=partition, offset=70 + number, timestamp_ms=1000 + number)
    failure = Failure(error_class="shop.errors.NoColour", message="no such colour", stack="Trace")
    told = headers_for(headers, origin, failure, group="billing", attempts=5)
    told = [*told, (HANDLER, b"shop.bill"), *more]
    values = {"key": b"k", "value": b"v", "timestamp": 5000 + number, **fields}
    return Letter(
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
    wanted = Filter(**given)
    assert wanted.matches(letter()) is is_meant
    assert wanted.is_empty is (given == {})


def test_what_tells_nothing_is_of_no_group_and_has_no_error():
    stray = Letter("orders.dlq", 0, Record(0, 5, b"k", b"v"))
    assert Filter().matches(stray)
    assert not Filter(groups=("*",)).matches(stray)
    assert not Filter(handlers=("*",)).matches(stray)
    assert not Filter(errors=("?*",)).matches(stray)
    assert is_error("*", "")
    assert is_error("shop.Error[int]", "shop.Error[int]"), "a name is not only a pattern"


def test_places_as_people_write_them():
    assert parse_spot("3:42") == Spot(3, 42)
    assert str(Spot(3, 42)) == "3:42"
    for text in ("", "3", ":4", "3:", "-1:2", "1:2:3", "a:b", " 1:2", "9" * 30 + ":1"):
        assert parse_spot(text) is None


def test_topics_of_letters_by_their_names():
    assert holds_letters("orders.dlq")
    for name in ("orders", ".dlq", "orders.retry.1", "orders.dlq.replayed"):
        assert not holds_letters(name)


# Where to


def test_to_the_original_topic_they_go_as_they_were():
    destination = Destination()
    route = route_of(letter(), destination)
    assert route == Route("orders")
    out = outgoing(letter(), route, destination, partitions=3, now_ms=NOW_MS)
    assert (out.topic, out.partition) == ("orders", 2)
    assert out.record == Record(0, NOW_MS, b"k", b"v", OWN)
    keeping = Destination(keeps_times=True)
    assert outgoing(letter(), route, keeping, partitions=3, now_ms=NOW_MS).record.timestamp == 1007
    # That partition is not there any more: then it is the key that decides.
    out = outgoing(letter(partition=5), route, destination, partitions=3, now_ms=NOW_MS)
    assert out.partition == partition_of(b"k", 3)


def test_back_to_the_group_they_tell_whose_they_are_and_are_due_at_once():
    destination = Destination(aim=Aim.GROUP, keeps_times=True)
    route = route_of(letter(), destination)
    assert route == Route("orders.retry.1", "billing")
    out = outgoing(letter(partition=5), route, destination, partitions=3, now_ms=NOW_MS)
    assert (out.topic, out.partition, out.record.timestamp) == ("orders.retry.1", 2, NOW_MS)
    headers = out.record.headers
    assert is_for(headers, "billing")
    assert not is_for(headers, "shipping")
    origin = origin_of(headers, **HERE)
    assert origin == Origin(
        topic="orders", partition=5, offset=77, timestamp_ms=1007, attempts=0, group="billing"
    )
    assert (HANDLER, b"shop.bill") in headers
    assert failure_in(headers).error_class == "shop.errors.NoColour"
    assert tuple(restored(headers)) == OWN


def test_to_another_topic_all_of_them_go_by_their_keys():
    destination = Destination(aim=Aim.TOPIC, topic="elsewhere")
    stray = Letter("orders.dlq", 4, Record(0, 5, None, b"v"))
    assert route_of(stray, destination) == Route("elsewhere")
    assert outgoing(stray, Route("elsewhere"), destination, partitions=3, now_ms=1).partition == 1
    out = outgoing(letter(), Route("elsewhere"), destination, partitions=100, now_ms=1)
    assert out.partition == partition_of(b"k", 100)


def test_what_cannot_be_replayed():
    for destination in (Destination(), Destination(aim=Aim.GROUP), Destination(aim=Aim.TOPIC, topic="t")):
        assert route_of(letter(more=[(WITHOUT_RECORD, b"gone")]), destination) is Left.BARE
        assert route_of(letter(key=None, value=None), destination) is Left.BARE
    assert isinstance(route_of(letter(value=None), Destination()), Route), "a tombstone is a record"
    stray = Letter("orders.dlq", 0, Record(0, 5, b"k", b"v"))
    assert route_of(stray, Destination()) is Left.STRAY
    nobody = Letter("o.dlq", 0, Record(0, 5, b"k", b"v", ((TOPIC, b"o"),)))
    assert route_of(nobody, Destination(aim=Aim.GROUP)) is Left.STRAY
    told = tuple(each for each in letter().record.headers if not each[0].endswith(".group"))
    assert route_of(Letter("o.dlq", 0, Record(0, 5, b"k", b"v", told)), Destination(aim=Aim.GROUP)) is (
        Left.UNCLAIMED
    )


@given(st.binary(max_size=50), st.integers(1, 1000))
def test_keys_go_where_other_producers_send_them(key, count):
    assert murmur2(key) == reference(key)
    assert partition_of(key, count) == (reference(key) & 0x7FFFFFFF) % count


# The list


TOPIC_ID = UUID(int=5)


def test_marks_are_read_as_they_were_written():
    mark = Mark(State.EDITED, at_ms=12, replay="dlq-1", to="orders")
    assert read_mark(key_of(Spot(1, 2)), value_of(mark, TOPIC_ID), TOPIC_ID) == (Spot(1, 2), mark)
    assert read_mark(b"1:2", value_of(mark, None), TOPIC_ID) == (Spot(1, 2), mark)


def test_what_replays_on_spark_write_is_replayed():
    value = json.dumps({"at": 5, "replay": "letters-1", "to": "orders", "topicId": str(TOPIC_ID)}).encode()
    mark = Mark(State.REPLAYED, at_ms=5, replay="letters-1", to="orders")
    assert read_mark(b"0:7", value, TOPIC_ID) == (Spot(0, 7), mark)


def test_marks_of_an_earlier_topic_of_the_name_are_nothing():
    value = value_of(Mark(State.REPLAYED), UUID(int=6))
    assert read_mark(b"0:7", value, TOPIC_ID) is None
    assert read_mark(b"0:7", value, None) is not None, "where brokers know no ids"


@given(st.none() | st.binary() | st.sampled_from([b"[]", b'{"state": "later", "at": "x"}', b'{"at": null}']))
def test_whatever_stands_under_a_place_is_done_with(value):
    """The key says it. What the value says may be of a later version, or nothing that makes sense."""
    assert read_mark(b"3:4", value, TOPIC_ID) == (Spot(3, 4), Mark(State.REPLAYED))
    assert read_mark(b"else", value, TOPIC_ID) is None


# Correcting


def test_a_corrected_letter_tells_the_same_and_what_it_took_the_place_of():
    change = Change(value=b"new", headers=(("trace", b"2"), ("extra", b"3")))
    made = edited(letter(more=[(WITHOUT_RECORD, b"gone")]), change, NOW_MS)
    new = Letter("orders.dlq", 1, made)
    assert (made.key, made.value, made.timestamp) == (b"k", b"new", NOW_MS)
    assert new.own_headers == [("none", None), ("trace", b"2"), ("extra", b"3")]
    assert new.origin == letter().origin
    assert new.failure == letter().failure
    assert new.edited_from == Spot(1, 7)
    assert new.has_record
    again = edited(new._replace(record=made._replace(offset=11)), Change(key=b"other"), NOW_MS)
    assert [value for name, value in again.headers if name == EDITED_FROM] == [b"1:11"]
    assert (again.key, again.value) == (b"other", b"new")


def test_what_is_no_correction():
    with pytest.raises(DeadLetterError, match="1:7 is like that already"):
        edited(letter(), Change(value=b"v", key=b"k"), NOW_MS)
    with pytest.raises(DeadLetterError, match="not to be changed"):
        edited(letter(), Change(headers=((TOPIC, b"x"),)), NOW_MS)


# Transactions


@given(st.lists(st.integers(0, 5 << 20), max_size=12), st.integers(1, 5))
def test_a_transaction_is_bounded_and_nothing_is_left_out(sizes, most):
    entries = [Entry(letter(n, value=bytes(size)), Mark(State.PURGED)) for n, size in enumerate(sizes)]
    found = list(chunks(entries, most))
    assert [entry for chunk in found for entry in chunk] == entries
    for chunk in found:
        assert 1 <= len(chunk) <= most
        assert len(chunk) == 1 or sum(entry.size_bytes for entry in chunk) <= 8 << 20
    batches = list(_batches(entry.letter.record for entry in entries))
    assert [record for batch in batches for record in batch] == [entry.letter.record for entry in entries]
    assert all(len(batch) == 1 or sum(len(each.value) for each in batch) < 256 << 10 for batch in batches)
