"""Hot keys spread over partitions, on request: one key becomes several, told apart by a salt at its end.

What it costs: records of one key are in order only within each of its salted keys, because those lie in different
partitions; who needs the order of some of them together gives what they have in common as `of`. Consumers that
work by key see several keys until they take the salt off, a compacted topic keeps one value for each salted key, and
`buckets` bounds how many partitions a key is spread over: two salted keys may still meet in one.
"""

from __future__ import annotations

import random
import re
import zlib
from typing import Final

_SEPARATOR: Final = b"\x1fsalt:"
_SALT: Final = re.compile(re.escape(_SEPARATOR) + rb"\d{1,6}\Z")
BUCKETS_MAX: Final = 1_000_000


def salted(
    key: bytes, buckets: int, *, of: bytes | None = None, chance: random.Random | None = None
) -> bytes:
    """One of the `buckets` keys that stand for `key`: by chance, or always the same one for the same `of`.

    Raises ValueError where there is nothing to choose from.
    """
    _check(buckets)
    if of is not None:
        return _with(key, zlib.crc32(of) % buckets)
    return _with(key, (chance or _CHANCE).randrange(buckets))


def salted_keys(key: bytes, buckets: int) -> list[bytes]:
    """All that `salted` may answer, for who looks a key up. Raises ValueError."""
    _check(buckets)
    return [_with(key, bucket) for bucket in range(buckets)]


def unsalted(key: bytes) -> bytes:
    """The key as it was before `salted`; a key without a salt as it is."""
    return _SALT.sub(b"", key, count=1)


_CHANCE: Final = random.Random()


def _with(key: bytes, bucket: int) -> bytes:
    return b"%b%b%d" % (key, _SEPARATOR, bucket)


def _check(buckets: int) -> None:
    if not 1 <= buckets <= BUCKETS_MAX:
        raise ValueError(f"a key is spread over 1 to {BUCKETS_MAX} buckets, not {buckets}")
