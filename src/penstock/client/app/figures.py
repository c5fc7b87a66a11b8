"""What a subscription has done, counted: any thread may look."""

from __future__ import annotations

import threading
from dataclasses import asdict, dataclass
from typing import Final

__all__ = ["Figures"]

_LOCK: Final = threading.Lock()


@dataclass(slots=True)
class Figures:
    """Counts since the subscription was started. Each is written by one thread."""

    #: Handled without an error.
    handled: int = 0
    #: Sent to a retry topic after a failure.
    retried: int = 0
    #: Sent after an earlier message of its key, without being tried.
    followed: int = 0
    #: Became dead letters.
    dead: int = 0
    #: Known by their id as handled before, and left out.
    duplicates: int = 0
    #: At most once: read, and given up because nobody knows whether its position was committed.
    dropped: int = 0
    #: At most once: committed by an earlier member that has not recorded them as handled. So many may be lost.
    lost_max: int = 0
    #: In retry topics, for another group.
    skipped: int = 0
    #: Still being handled when their partition was taken away; another member handles them too.
    lost_in_hand: int = 0
    #: Answered for in vain: their partition or their lock had gone, or the answer got lost. They may come again.
    late: int = 0
    #: In share groups: given back untried, because their lock was about to run out.
    overdue: int = 0
    #: How often the member left and joined again, or a transaction was begun anew.
    restarts: int = 0
    #: How often the circuit breaker has opened.
    breaks: int = 0

    def add(self, name: str, count: int = 1) -> None:
        """For what several threads count."""
        with _LOCK:
            setattr(self, name, getattr(self, name) + count)

    def as_dict(self) -> dict[str, int]:
        return asdict(self)
