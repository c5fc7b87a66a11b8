"""Ids and scopes as stores keep them: as they are where possible, hashed where they are too long for an index."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Final

__all__ = ["BYTES_MAX", "stored", "stored_ids"]

#: An entry of a PostgreSQL index has room for two of these.
BYTES_MAX: Final = 1024
_PREFIX: Final = "sha256:"


def stored(text: str) -> str:
    """Two texts never have the same stored form: what looks like a hash is hashed too."""
    if text.isascii():  # the usual case, and its bytes need no counting
        is_kept = len(text) <= BYTES_MAX
    else:
        is_kept = len(text) <= BYTES_MAX and _encodes(text)
    if is_kept and "\0" not in text and not text.startswith(_PREFIX):
        return text
    return _PREFIX + hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def stored_ids(ids: Iterable[str]) -> dict[str, str]:
    """The stored form of each id, once, with the id itself; sorted, so that all lock rows in the same order."""
    return dict(sorted((stored(id), id) for id in ids))


def _encodes(text: str) -> bool:
    try:
        return len(text.encode()) <= BYTES_MAX
    except UnicodeEncodeError:
        return False
