"""Whose connection it is: of nodes that cannot be given a source address of their own, by their process (Linux)."""

import os
import socket
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

_LOCAL, _INODE = 1, 9  # columns of /proc/net/tcp
_MAPPED = "0000000000000000" + f"{socket.htonl(0xFFFF):08X}"  # ::ffff:0:0/96
#: The tables are no snapshots: a line may be missing while others come and go.
_LOOKS = 3


def caller(address: tuple[str, int], pids: Mapping[str, int]) -> str | None:
    """The node that holds the socket bound to this address; None if none of them does."""
    for _ in range(_LOOKS):
        for inode in _inodes_of(address):
            for node, pid in pids.items():
                if _holds(pid, f"socket:[{inode}]"):
                    return node
    return None


def _inodes_of(address: tuple[str, int]) -> Iterator[str]:
    """More than one where the port was used before: what is left of that connection has the inode 0."""
    (packed,) = struct.unpack("=I", socket.inet_aton(address[0]))
    host, port = f"{packed:08X}", f"{address[1]:04X}"
    # A socket of both families has its address in the newer one's form.
    tables = {"tcp": f"{host}:{port}", "tcp6": f"{_MAPPED}{host}:{port}"}
    for table, local in tables.items():
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[_LOCAL] == local:
                yield fields[_INODE]


def _holds(pid: int, target: str) -> bool:
    with suppress(OSError):  # the process has ended
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with suppress(OSError):  # this one was closed meanwhile
                if os.readlink(entry.path) == target:
                    return True
    return False
