"""The contracts by name."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["Delivery"]


class Delivery(StrEnum):
    #: Never twice; what may be lost is counted.
    AT_MOST_ONCE = "at-most-once"
    #: Never lost; what may come twice is bounded.
    AT_LEAST_ONCE = "at-least-once"
    #: Never lost, and known by its id when it comes again.
    EFFECTIVELY_ONCE = "effectively-once"
    #: Result and position are one transaction, of the cluster or of a database.
    EXACTLY_ONCE = "exactly-once"
