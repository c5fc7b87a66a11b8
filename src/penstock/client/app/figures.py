"""Counters of what a subscription has done; any thread may read them."""

from __future__ import annotations

import threading
from dataclasses import asdict, dataclass
from typing import Final

__all__ = ["Figures"]

_LOCK: Final = threading.Lock()


@dataclass(slots=True)
class Figures:
    """Counters of messages and events since the subscription started. One thread writes each, or threads use `add`."""

    #: Handled without an error.
    handled: int = 0
    #: Sent to a retry topic after a failure.
    retried: int = 0
    #: Sent to a retry topic behind an earlier message of the same key, without being tried.
    followed: int = 0
    #: Became dead letters.
    dead: int = 0
    #: Skipped, because their id shows that they were handled before.
    duplicates: int = 0
    #: At-most-once: read and abandoned, because it is not known whether their offset was committed.
    dropped: int = 0
    #: At-most-once: committed by an earlier member that has not recorded them as handled. Up to this many are lost.
    lost_max: int = 0
    #: Skipped in retry topics, because they belong to another group.
    skipped: int = 0
    #: Still being handled when their partition was revoked or lost; another member handles them too.
    lost_in_hand: int = 0
    #: Acknowledged too late: the partition was revoked, the lock had expired, or the acknowledgement was lost. They may
    #: be redelivered.
    late: int = 0
    #: Share groups: released untried, because their lock was about to expire.
    overdue: int = 0
    #: How often the member left and joined again, or repeated a transaction.
    restarts: int = 0
    #: How often the circuit breaker has opened.
    breaks: int = 0

    def add(self, name: str, count: int = 1) -> None:
        """Adds to a counter that several threads write."""
        with _LOCK:
            setattr(self, name, getattr(self, name) + count)

    def as_dict(self) -> dict[str, int]:
        return asdict(self)
