"""Requests that are held on their way to a node, while their client waits, gives up, and goes on over a new connection.

What is behind a held request on its connection is held too, as a network would do it. Let go, it arrives as if nothing
had happened meanwhile; the connection to the node stays open whatever the client has done to its own.
"""

import struct
from collections import Counter

_HEAD = struct.Struct(">ih")  # length and api key


class Ambush:
    """Which requests to catch: so many of each kind."""

    def __init__(self) -> None:
        self.wanted: Counter[int] = Counter()

    def catches(self, api_key: int) -> bool:
        if self.wanted[api_key] <= 0:
            return False
        self.wanted[api_key] -= 1
        return True


class Road:
    """What a client sends over one connection, request by request."""

    def __init__(self, ambush: Ambush) -> None:
        self._ambush = ambush
        self._data = b""
        self.is_blocked = False
        self.has_been_blocked = False

    def send(self, data: bytes) -> bytes:
        """Returns what goes through."""
        self._data += data
        passed = 0
        while not self.is_blocked and len(self._data) - passed >= _HEAD.size:
            size, api_key = _HEAD.unpack_from(self._data, passed)
            if len(self._data) - passed < 4 + size:
                break
            if self._ambush.catches(api_key):
                self.is_blocked = self.has_been_blocked = True
            else:
                passed += 4 + size
        through, self._data = self._data[:passed], self._data[passed:]
        return through

    def let_go(self) -> bytes:
        self.is_blocked = False
        return self.send(b"")
