"""Readiness as systemd understands it: one datagram to the socket named by NOTIFY_SOCKET.

The supervisor of several nodes listens on such a socket too, so a node reports in one way, whoever started it.
"""

import os
import socket
from contextlib import suppress

VARIABLE = "NOTIFY_SOCKET"


def ready() -> None:
    """Tell whoever waits for it that this process serves; nobody may be waiting, and that is fine."""
    address = os.environ.get(VARIABLE)
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.sendto(f"READY=1\nMAINPID={os.getpid()}".encode(), address)


def pid_that_is_ready(message: bytes) -> int | None:
    """The sender of such a datagram, where it says that it is ready."""
    facts = dict(line.partition("=")[::2] for line in message.decode(errors="replace").splitlines())
    pid = facts.get("MAINPID", "")
    return int(pid) if facts.get("READY") == "1" and pid.isdecimal() else None
