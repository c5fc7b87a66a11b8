"""Where to start reading, as people write it: beginning, end, an offset, the last few, a point in time."""

import re
from datetime import datetime
from enum import Enum
from typing import NamedTuple

from penstock.client.durations import UNITS_MS


class Anchor(Enum):
    BEGINNING = "beginning"
    END = "end"
    OFFSET = "offset"
    LAST = "last"
    TIMESTAMP = "timestamp"


class Position(NamedTuple):
    anchor: Anchor
    value: int = 0  # an offset, a count of records or milliseconds, as the anchor says


def parse_position(text: str, *, now_ms: int) -> Position:
    """Raises ValueError. A plain number is an offset, a negative one counts from the end."""
    text = text.strip()
    match text.lower():
        case "beginning" | "earliest":
            return Position(Anchor.BEGINNING)
        case "end" | "latest":
            return Position(Anchor.END)
    if re.fullmatch(r"-\d+", text):
        return Position(Anchor.LAST, int(text[1:]))
    if re.fullmatch(r"\d+", text):
        return Position(Anchor.OFFSET, int(text))
    return Position(Anchor.TIMESTAMP, parse_timestamp(text.removeprefix("@"), now_ms=now_ms))


def parse_timestamp(text: str, *, now_ms: int) -> int:
    """ISO 8601 (local time where it names no zone), milliseconds since 1970, or an age such as 15m."""
    text = text.strip()
    if re.fullmatch(r"\d+", text):
        return int(text)
    if age := re.fullmatch(r"(\d+)([smhd])", text):
        return now_ms - int(age[1]) * UNITS_MS[age[2]]
    try:
        return round(datetime.fromisoformat(text).timestamp() * 1000)
    except ValueError:
        raise ValueError(
            f"{text!r} is no point in time: write 2025-01-31T12:00, milliseconds, or an age such as 15m"
        ) from None


def resolve(position: Position, *, first: int, end: int, at_timestamp: int | None) -> int:
    """The offset to start at in a partition that holds [first, end); `at_timestamp` is -1 beyond its end."""
    match position.anchor:
        case Anchor.BEGINNING:
            return first
        case Anchor.END:
            return end
        case Anchor.OFFSET:
            return min(max(position.value, first), end)
        case Anchor.LAST:
            return max(end - position.value, first)
        case Anchor.TIMESTAMP:
            assert at_timestamp is not None
            return end if at_timestamp < 0 else at_timestamp
