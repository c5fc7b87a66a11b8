"""For how long retention waits for held records to be taken over: a schedule that is stuck must not fill the disk."""

from __future__ import annotations

import logging

logger = logging.getLogger("penstock.schedule")

_Key = tuple[str, int]


class Hold:
    def __init__(self, seconds_max: float) -> None:
        self._seconds_max = seconds_max
        self._stuck: dict[_Key, tuple[int, float]] = {}  # at which offset, since when
        self._given_up: set[_Key] = set()

    def bounded(self, key: _Key, offset: int, end_offset: int, now: float) -> int:
        """`offset`, up to which all is taken over, or `end_offset` when it has not moved for too long."""
        stuck = self._stuck.get(key)
        if offset >= end_offset or stuck is None or stuck[0] != offset:
            self._given_up.discard(key)
            self._stuck[key] = offset, now
            return offset
        if now - stuck[1] < self._seconds_max:
            return offset
        if key not in self._given_up:
            self._given_up.add(key)
            extra = {"partition": f"{key[0]}-{key[1]}", "offset": offset}
            logger.error("retention no longer waits for held records: some may be lost", extra=extra)
        return end_offset
