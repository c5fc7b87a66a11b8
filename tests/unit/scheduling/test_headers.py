"""Headers for the delivery time of a record."""

import pytest

from penstock.scheduling.intake import DELIVER_AFTER, DELIVER_AT, DeliveryTime, parse_delivery_time


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        (b"0", 0),
        (b"1794754975785", 1794754975785),
        (b"1970-01-01T00:00:01Z", 1000),
        (b"1970-01-01T02:00:01+02:00", 1000),
        (b"19700101T000001Z", 1000),
        (b"1970-01-01T00:00:00.0001+00:00", 1),  # never early: rounded up
        (b"1970-01-01T00:00:00.001Z", 1),
        (b"1969-12-31T00:00:00Z", 0),
    ],
)
def test_moments(text: bytes, ms: int) -> None:
    assert parse_delivery_time(DELIVER_AT, text) == DeliveryTime(ms, is_relative=False)


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        (b"0", 0),
        (b"1500", 1500),
        (b"PT1.5S", 1500),
        (b"PT0,0001S", 1),
        (b"P1W", 604_800_000),
        (b"P1DT2H3M4S", 93_784_000),
        (b"PT90M", 5_400_000),
    ],
)
def test_delays(text: bytes, ms: int) -> None:
    assert parse_delivery_time(DELIVER_AFTER, text) == DeliveryTime(ms, is_relative=True)
    assert parse_delivery_time(DELIVER_AFTER, text).due_ms(10) == 10 + ms


@pytest.mark.parametrize(
    "text",
    [
        None,
        b"",
        b"tomorrow",
        b"-5",
        b"+5",
        b"1e3",
        b" 5",
        b"\xd9\xa1\xd9\xa2",  # digits, but not ASCII
        b"2026-01-01T00:00:00",  # no zone
        b"2026-01-01",
        b"9" * 19,
        b"9" * 100,
    ],
)
def test_what_is_no_moment_is_named(text: bytes | None) -> None:
    with pytest.raises(ValueError, match="penstock-deliver-at"):
        parse_delivery_time(DELIVER_AT, text)


@pytest.mark.parametrize(
    "text", [None, b"", b"P", b"PT", b"P1DT", b"P1Y", b"P1M", b"-PT1S", b"PT-1S", b"1s", b"PT1.5M", b"\xff"]
)
def test_what_is_no_delay_is_named(text: bytes | None) -> None:
    with pytest.raises(ValueError, match="penstock-deliver-after"):
        parse_delivery_time(DELIVER_AFTER, text)
