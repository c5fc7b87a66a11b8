"""Where to start reading: offsets and times as users type them."""

from datetime import UTC, datetime

import pytest

from penstock.cli.options import (
    OffsetSpec,
    OffsetSpecKind,
    parse_offset_spec,
    parse_timestamp,
    resolve_offset,
)

NOW_MS = 1_700_000_000_000


@pytest.mark.parametrize(
    ("text", "position"),
    [
        ("beginning", OffsetSpec(OffsetSpecKind.BEGINNING)),
        ("Latest", OffsetSpec(OffsetSpecKind.END)),
        ("42", OffsetSpec(OffsetSpecKind.OFFSET, 42)),
        ("-5", OffsetSpec(OffsetSpecKind.LAST, 5)),
        ("@1600000000000", OffsetSpec(OffsetSpecKind.TIMESTAMP, 1_600_000_000_000)),
        ("15m", OffsetSpec(OffsetSpecKind.TIMESTAMP, NOW_MS - 900_000)),
        ("2d", OffsetSpec(OffsetSpecKind.TIMESTAMP, NOW_MS - 172_800_000)),
        ("2023-11-14T22:13:20Z", OffsetSpec(OffsetSpecKind.TIMESTAMP, NOW_MS)),
        ("2023-11-14T23:13:20.5+01:00", OffsetSpec(OffsetSpecKind.TIMESTAMP, NOW_MS + 500)),
    ],
)
def test_positions(text: str, position: OffsetSpec) -> None:
    assert parse_offset_spec(text, now_ms=NOW_MS) == position


def test_a_time_without_a_zone_is_local() -> None:
    local = datetime.fromtimestamp(NOW_MS / 1000)
    assert parse_timestamp(local.isoformat(), now_ms=0) == NOW_MS
    assert parse_timestamp(datetime.fromtimestamp(NOW_MS / 1000, UTC).isoformat(), now_ms=0) == NOW_MS


@pytest.mark.parametrize("text", ["", "yesterday", "15 minutes", "--5", "2023-13-01"])
def test_what_is_no_position_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ValueError, match="is not a time: write"):
        parse_offset_spec(text, now_ms=NOW_MS)


@pytest.mark.parametrize(
    ("position", "at_timestamp", "offset"),
    [
        (OffsetSpec(OffsetSpecKind.BEGINNING), None, 10),
        (OffsetSpec(OffsetSpecKind.END), None, 20),
        (OffsetSpec(OffsetSpecKind.OFFSET, 15), None, 15),
        (OffsetSpec(OffsetSpecKind.OFFSET, 3), None, 10),
        (OffsetSpec(OffsetSpecKind.OFFSET, 99), None, 20),
        (OffsetSpec(OffsetSpecKind.LAST, 3), None, 17),
        (OffsetSpec(OffsetSpecKind.LAST, 99), None, 10),
        (OffsetSpec(OffsetSpecKind.TIMESTAMP, 1), 12, 12),
        (OffsetSpec(OffsetSpecKind.TIMESTAMP, 1), -1, 20),
    ],
)
def test_a_position_stays_within_what_the_partition_holds(
    position: OffsetSpec, at_timestamp: int | None, offset: int
) -> None:
    assert resolve_offset(position, first=10, end=20, at_timestamp=at_timestamp) == offset


@pytest.mark.parametrize(
    ("text", "expected_ms"),
    [("9" * 30, 2**63 - 1), ("99999999999d", 0), ("1960-01-01T00:00", 0), ("0002-01-01", 0), ("0s", NOW_MS)],
)
def test_times_that_no_request_can_have_are_the_nearest(text: str, expected_ms: int) -> None:
    assert parse_timestamp(text, now_ms=NOW_MS) == expected_ms
