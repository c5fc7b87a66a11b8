"""Connections that are opened, asked one thing and closed again: what a set-up costs, with its handshake and login."""

import socket
import struct
from typing import NamedTuple

from benchmarks.load.processes import Phase, Slot
from benchmarks.wire.access import Access, Address

#: ApiVersions, the first request of every client.
_FIRST = struct.pack(">ihhih", 10, 18, 0, 1, -1)
#: Closing sends a reset, so that no address of the client is kept waiting.
_RESET = struct.pack("ii", 1, 0)
_TIMEOUT_S = 60.0
_ANSWER_BYTES = 65_536


class LoginPlan(NamedTuple):
    address: Address
    access: Access


def connect_flat_out(slot: Slot, plan: LoginPlan) -> int:
    """One connection after the other; returns how many there were."""
    slot.set_ready()
    slot.wait_for(Phase.RUN)
    count = 0
    while slot.phase < Phase.STOP:
        with plan.access.open(plan.address, _TIMEOUT_S) as opened:
            opened.sendall(_FIRST)
            opened.recv(_ANSWER_BYTES)
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        count += 1
        slot.publish(count, count)
    return count
