"""Durations: what users write is parsed, and mistakes are reported."""

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.client.retry import DurationError, duration_s


@pytest.mark.parametrize(
    ("written", "length_s"),
    [
        ("250ms", 0.25),
        ("1s", 1),
        ("1.5s", 1.5),
        ("5m", 300),
        ("5min", 300),
        ("2h", 7200),
        ("7d", 604_800),
        (" 10 s ", 10),
        ("0s", 0),
        (3, 3),
        (0.5, 0.5),
        (timedelta(minutes=1, milliseconds=5), 60.005),
    ],
)
def test_what_people_write(written: str | float | timedelta, length_s: float) -> None:
    assert duration_s(written) == pytest.approx(length_s)


@pytest.mark.parametrize(
    "written",
    [
        "",
        "s",
        "5",
        "-1s",
        "1e3s",
        "5 parsecs",
        "1S",
        "1h30m",
        "٣s",
        -1,
        float("nan"),
        float("inf"),
        10**400,
        True,
        None,
        timedelta(seconds=-1),
        "40000d",
        timedelta(days=40_000),
        b"1s",
    ],
)
def test_what_is_no_length_of_time(written: object) -> None:
    with pytest.raises(DurationError, match="is not a duration"):
        duration_s(written)  # type: ignore[arg-type]


@given(st.timedeltas(min_value=timedelta(0), max_value=timedelta(days=36_500)))
def test_text_and_timedelta_agree(length: timedelta) -> None:
    text = f"{length / timedelta(milliseconds=1):.6f}ms"
    assert duration_s(text) == pytest.approx(duration_s(length))
