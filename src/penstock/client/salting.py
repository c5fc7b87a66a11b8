"""Salting: spreads a hot key over several partitions by appending a salt, so that one key becomes several.

The price: records of one key keep their order only within each salted key, because the salted keys lie in different
partitions. A caller who needs some records in order together passes what they have in common as `of`. A consumer that
works by key sees several keys until it removes the salt, a compacted topic keeps one value for each salted key, and
`buckets` is only an upper bound for the number of partitions: two salted keys may land in the same one.
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
    """Returns one of `buckets` salted keys: a random one, or always the same one for the same `of`.

    Raises ValueError if `buckets` is out of range.
    """
    _check_buckets(buckets)
    if of is not None:
        return _salted_key(key, zlib.crc32(of) % buckets)
    return _salted_key(key, (chance or _RANDOM).randrange(buckets))


def salted_keys(key: bytes, buckets: int) -> list[bytes]:
    """Returns all salted keys of a key, to look it up. Raises ValueError."""
    _check_buckets(buckets)
    return [_salted_key(key, bucket) for bucket in range(buckets)]


def unsalted(key: bytes) -> bytes:
    """Removes the salt; returns a key without a salt unchanged."""
    return _SALT.sub(b"", key, count=1)


_RANDOM: Final = random.Random()


def _salted_key(key: bytes, bucket: int) -> bytes:
    return b"%b%b%d" % (key, _SEPARATOR, bucket)


def _check_buckets(buckets: int) -> None:
    if not 1 <= buckets <= BUCKETS_MAX:
        raise ValueError(f"a key is spread over 1 to {BUCKETS_MAX} buckets, not {buckets}")
