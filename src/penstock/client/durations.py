"""Lengths of time as people write them: "250ms", "1s", "5m", "2h", "7d", a timedelta, or a number of seconds."""

from __future__ import annotations

import math
import re
from datetime import timedelta
from typing import Final

__all__ = ["UNITS_MS", "Duration", "DurationError", "seconds"]

Duration = str | float | timedelta

UNITS_MS: Final = {"ms": 1, "s": 1_000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}
#: A hundred years: what is longer is a slip of the pen, and would leave the range of timestamps.
_LONGEST_S: Final = 36_500 * 86_400.0
_TEXT: Final = re.compile(r"(\d{1,15}(?:\.\d{1,9})?) ?(ms|s|min|m|h|d)", re.ASCII)


class DurationError(ValueError):
    """No length of time; a sentence for whoever wrote it."""


def seconds(value: Duration) -> float:
    """At least 0. Raises DurationError."""
    length_s = _seconds(value)
    if not 0 <= length_s <= _LONGEST_S:  # false for what is no number, too
        raise DurationError(f"{value!r} is no length of time: it is at least 0, and at most 36500d")
    return length_s


def _seconds(value: object) -> float:
    match value:
        case str():
            return _of_text(value)
        case timedelta():
            return value.total_seconds()
        case bool():
            pass
        case int() | float():
            return float(value) if abs(value) <= _LONGEST_S else math.inf
    raise DurationError(f'{value!r} is no length of time: write "250ms", "1s", "5m", "2h", "7d" or seconds')


def _of_text(text: str) -> float:
    match = _TEXT.fullmatch(text.strip())
    if match is None:
        raise DurationError(
            f'{text!r} is no length of time: write a number and a unit, as in "250ms", "1s", "5m"'
        )
    return float(match[1]) * UNITS_MS[match[2]] / 1000
