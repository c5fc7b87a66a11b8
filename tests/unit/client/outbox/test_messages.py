"""Rows of the outbox, without a database."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.client.outbox.messages import (
    NewOutboxRow,
    OutboxRow,
    decode_headers,
    encode_headers,
    fingerprint,
    new_row,
    row_headers,
    shard_hash,
)

HEADERS = st.lists(st.tuples(st.text(), st.none() | st.binary()))


def row(**more: object) -> NewOutboxRow:
    given = {"key": b"k", "headers": [], "partition": None, "message_id": "m1", **more}
    return new_row("orders", b"v", **given)  # type: ignore[arg-type]


def test_the_shard_of_a_key_never_changes() -> None:
    """Rows of an older version are still divided as they were."""
    assert shard_hash("orders", b"customer-7") == 201_869_613
    assert shard_hash("orders", b"") == 357_895_951
    assert shard_hash("orders", None, 3) == 1_904_148_121


def test_the_same_key_of_two_topics_is_in_two_shards() -> None:
    assert shard_hash("orders", b"k") != shard_hash("parcels", b"k")
    assert shard_hash("a", b"bc") != shard_hash("ab", b"c")


def test_nothing_says_where_a_message_without_key_and_partition_belongs() -> None:
    assert shard_hash("orders", None) is None


@given(st.text(min_size=1, max_size=20), st.binary())
def test_hashes_fit_into_a_column(topic: str, key: bytes) -> None:
    found = shard_hash(topic, key)
    assert found is not None
    assert 0 <= found < 1 << 31


@given(HEADERS)
def test_headers_come_back_in_order(headers: list[tuple[str, bytes | None]]) -> None:
    assert decode_headers(encode_headers(headers)) == headers


def test_headers_can_be_read_by_people() -> None:
    assert encode_headers([("kind", b"sale"), ("raw", b"\xff"), ("none", None)]) == (
        '[["kind", "sale"], ["raw", {"base64": "/w=="}], ["none", null]]'
    )


@pytest.mark.parametrize(
    "text", ["", "7", '{"a": 1}', '[["a"]]', '[["a", 7]]', '[[1, "b"]]', '[["a", {"b": 1}]]']
)
def test_headers_that_are_none_are_told_of(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode_headers(text)


def test_the_message_id_of_the_headers_counts() -> None:
    made = row(headers=[("message-id", b"mine"), ("a", b"b")])
    assert (made.message_id, made.headers) == ("mine", '[["a", "b"]]')
    read = OutboxRow(1, made.topic, made.partition, made.key, made.value, made.headers, made.message_id)
    assert row_headers(read) == [("a", b"b"), ("message-id", b"mine")]


@pytest.mark.parametrize(
    ("topic", "words"),
    [("", "not a topic name"), ("a b", "not a topic name"), ("..", "not a topic name"), ("x" * 250, "249")],
)
def test_topics_that_no_broker_takes_are_refused_at_once(topic: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        new_row(topic, b"", key=None, headers=[], partition=None, message_id="m")


@pytest.mark.parametrize(
    "more", [{"partition": -1}, {"message_id": ""}, {"message_id": "a\0"}, {"message_id": "x" * 1001}]
)
def test_what_cannot_be_relayed_is_refused_at_once(more: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"partition|message id"):
        row(**more)


def test_fingerprints_tell_messages_apart() -> None:
    assert len({fingerprint(str(number)) for number in range(10_000)}) == 10_000
    assert len(fingerprint("x" * 1000)) == 12
