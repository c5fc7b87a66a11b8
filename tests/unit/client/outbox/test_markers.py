"""Markers of the outbox: their encoding, and errors for invalid ones."""

import json

import pytest

from penstock.client.outbox.kafka import Marker, check_name, marker_topic, transactional_id
from penstock.client.outbox.messages import OutboxError, OutboxRow, fingerprint

ROWS = [OutboxRow(number, "orders", None, None, b"v", "[]", f"m{number}") for number in (3, 1, 2)]


def marker() -> Marker:
    return Marker.of(ROWS, identity="db", shards=4, shard=2)


def test_a_marker_comes_back_as_it_was() -> None:
    assert Marker.from_bytes(marker().to_bytes()) == marker()
    assert marker().rows == {number: fingerprint(f"m{number}") for number in (3, 1, 2)}


def test_every_shard_of_every_sharding_has_its_own_place() -> None:
    assert marker().key == b"4/2"
    assert transactional_id("shop", 4, 2) == "penstock-outbox-shop-4-2"
    assert marker_topic("shop") == "penstock.outbox.shop"


def test_a_large_batch_fits_into_a_message() -> None:
    rows = [OutboxRow(10**15 + number, "t", None, None, b"", "[]", f"m{number}") for number in range(10_000)]
    assert len(Marker.of(rows, identity="d" * 32, shards=256, shard=255).to_bytes()) < 1_000_000


@pytest.mark.parametrize("data", [b"", b"7", b"[]", b"{}", b'{"version": 1}', b'{"version": 1, "rows": []}'])
def test_what_is_no_marker_is_told_of(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        Marker.from_bytes(data)


def test_a_newer_marker_is_not_guessed_at() -> None:
    newer = {**json.loads(marker().to_bytes()), "version": 2}
    with pytest.raises(ValueError, match="newer than this program"):
        Marker.from_bytes(json.dumps(newer).encode())


@pytest.mark.parametrize("name", ["", "a b", "a/b", "x" * 101])
def test_names_are_such_that_topics_can_have_them(name: str) -> None:
    with pytest.raises(OutboxError, match="not an outbox name"):
        check_name(name)
