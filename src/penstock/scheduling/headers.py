"""When a record wants to be delivered: the two headers that say so, and how they are read."""

import re
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple

#: All schedule headers begin so: a batch without these bytes has none.
PREFIX: Final = b"penstock-deliver-"
DELIVER_AT: Final = b"penstock-deliver-at"
DELIVER_AFTER: Final = b"penstock-deliver-after"
#: What a released record carries instead: the time it was due, in milliseconds.
SCHEDULED_FOR: Final = b"penstock-scheduled-for"

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND: Final = timedelta(milliseconds=1)
_DIGITS: Final = re.compile(rb"[0-9]{1,18}")
#: Months and years have no fixed length, so they are not taken.
_DURATION: Final = re.compile(
    r"P(?=.)(?:(\d{1,9})W)?(?:(\d{1,9})D)?(?:T(?=.)(?:(\d{1,9})H)?(?:(\d{1,9})M)?(?:(\d{1,9})(?:[.,](\d{1,9}))?S)?)?"
)
_TEXT_BYTES_MAX: Final = 64


class When(NamedTuple):
    """A moment in milliseconds since 1970, or a time from the append on."""

    ms: int
    is_relative: bool

    def due_ms(self, appended_ms: int) -> int:
        return appended_ms + self.ms if self.is_relative else self.ms


def parse_when(name: bytes, value: bytes | None) -> When:
    """Raises ValueError, whose text says what is expected."""
    if name == DELIVER_AT:
        return When(_moment_ms(value), False)
    assert name == DELIVER_AFTER
    return When(_delay_ms(value), True)


def _moment_ms(value: bytes | None) -> int:
    text = _text(value)
    if text is not None and _DIGITS.fullmatch(text):
        return int(text)
    try:
        moment = datetime.fromisoformat((text or b"").decode())
        if moment.tzinfo is None:
            raise ValueError
        # Rounded up, for a record must not come before its time.
        return max(-((_EPOCH - moment) // _MILLISECOND), 0)
    except (ValueError, OverflowError):
        raise ValueError(
            f"{DELIVER_AT.decode()} {_shown(value)} is neither milliseconds since 1970 nor ISO 8601 with a zone"
        ) from None


def _delay_ms(value: bytes | None) -> int:
    text = _text(value)
    if text is not None and _DIGITS.fullmatch(text):
        return int(text)
    found = None if text is None else _DURATION.fullmatch(text.decode())
    if found is None:
        raise ValueError(
            f"{DELIVER_AFTER.decode()} {_shown(value)} is neither milliseconds nor an ISO 8601 duration of "
            "weeks, days, hours, minutes and seconds"
        )
    weeks, days, hours, minutes, seconds = (int(part or 0) for part in found.groups()[:5])
    fraction = (found[6] or "").ljust(9, "0")
    whole_s = ((weeks * 7 + days) * 24 + hours) * 3600 + minutes * 60 + seconds
    return whole_s * 1000 + -(-int(fraction) // 1_000_000)


def _text(value: bytes | None) -> bytes | None:
    """None for what cannot be a time."""
    return value if value is not None and value.isascii() and len(value) <= _TEXT_BYTES_MAX else None


def _shown(value: bytes | None) -> str:
    return "null" if value is None else repr(value[:_TEXT_BYTES_MAX].decode("ascii", "backslashreplace"))
