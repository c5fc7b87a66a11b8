"""Parcels: what is packed of an order, where it goes, and why it does not get there at once. Pure, but for the lock."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from typing import Final
from zlib import crc32

DISTRICTS: Final = 60
#: Of so many parcels one meets a carrier that is busy, the first time.
_BUSY_EVERY: Final = 25


@dataclass(frozen=True, slots=True)
class Parcel:
    order: str
    customer: str
    district: int


class CarrierBusy(Exception):
    """Passes by itself: it is worth another try."""


class RoadClosed(Exception):
    """Does not pass until somebody opens the road."""


class Roads:
    """One of them is closed at a time. Handlers ask it while somebody else opens it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._closed = 0

    def is_closed(self, district: int) -> bool:
        with self._lock:
            return district == self._closed

    def open(self) -> int:
        """The one that is closed, so that the next one is; which that was."""
        with self._lock:
            opened, self._closed = self._closed, (self._closed + 1) % DISTRICTS
            return opened


def packed(value: bytes | None) -> Parcel | None:
    """None for what is no order: that is for others to look after."""
    try:
        order = json.loads(value or b"")
        number, customer = str(order["id"]), str(order["customer"])
    except (ValueError, KeyError, TypeError):
        return None
    return Parcel(number, customer, crc32(number.encode()) % DISTRICTS)


def deliver(parcel: Parcel, *, attempt: int, roads: Roads) -> None:
    """Raises CarrierBusy, RoadClosed."""
    if roads.is_closed(parcel.district):
        raise RoadClosed(f"the road to district {parcel.district} is closed (order {parcel.order})")
    if attempt == 1 and crc32(b"carrier of " + parcel.order.encode()) % _BUSY_EVERY == 0:
        raise CarrierBusy(f"no carrier has time for order {parcel.order}")
