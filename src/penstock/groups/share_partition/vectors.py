"""Many bytes at once, as one large number: what a loop over records would do, at the speed of memory."""

from functools import cache
from typing import Final

Bytes = bytes | bytearray

#: In a mask: these bytes.
YES: Final = 0xFF
NO: Final = 0x00


def mask_table(*codes: int) -> bytes:
    """Translates a byte to YES where it is one of these."""
    return bytes(YES if code in codes else NO for code in range(256))


@cache
def only(code: int) -> bytes:
    return mask_table(code)


@cache
def at_least(code: int) -> bytes:
    return bytes(YES if each >= code else NO for each in range(256))


def number(data: Bytes) -> int:
    return int.from_bytes(data, "little")


def both(one: Bytes, other: Bytes) -> bytes:
    return (number(one) & number(other)).to_bytes(len(one), "little")


def blend(old: Bytes, new: Bytes, mask: Bytes) -> bytes:
    """The new bytes where the mask says so, the old ones elsewhere."""
    before = number(old)
    return (before ^ ((before ^ number(new)) & number(mask))).to_bytes(len(old), "little")


def covers(whole: Bytes, part: Bytes) -> bool:
    """Whether every YES of the part is one of the whole."""
    asked = number(part)
    return asked & number(whole) == asked
