"""What a process arranges with the operating system and with the process that started it.

Readiness: one datagram to the socket that NOTIFY_SOCKET names, as systemd expects it. The supervisor of several
nodes listens on such a socket too, so a node reports in the same way whether systemd or a supervisor started it.

Shutdown: a child process stops when its parent is gone, even if the parent was killed with SIGKILL. The parent holds
the other end of the child's stdin and never writes to it; when the parent is gone, the child reads the end of stdin.

Open files: as many as the system allows. A partition needs several, and shells usually allow 1,024.
"""

import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

NOTIFY_SOCKET = "NOTIFY_SOCKET"


def notify_ready() -> None:
    """Reports to the waiting process, if there is one, that this process serves requests."""
    address = os.environ.get(NOTIFY_SOCKET)
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.sendto(f"READY=1\nMAINPID={os.getpid()}".encode(), address)


def parse_ready_pid(message: bytes) -> int | None:
    """The pid of the sender, if the datagram reports readiness."""
    facts = dict(line.partition("=")[::2] for line in message.decode(errors="replace").splitlines())
    pid = facts.get("MAINPID", "")
    return int(pid) if facts.get("READY") == "1" and pid.isdecimal() else None


_STDIN_FD = 0


def stop_with_stdin() -> None:
    """Makes the process send itself SIGTERM, once, when stdin ends."""
    threading.Thread(target=_terminate_when_stdin_ends, name="lifeline", daemon=True).start()


def _terminate_when_stdin_ends() -> None:
    try:
        while os.read(_STDIN_FD, 4096):
            pass
    except OSError:
        pass  # stdin is not open: same as ended
    os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def stop_on_first_signal() -> Iterator[threading.Event]:
    """Yields an event that SIGTERM or Ctrl-C sets. A second signal raises KeyboardInterrupt."""
    # `serve` starts faster without it.
    from penstock.client.signals import SignalEvent, stop_on_signals

    stopping = SignalEvent()

    def stop() -> None:
        if stopping.is_set():
            raise KeyboardInterrupt
        stopping.set()

    with stop_on_signals(stop):
        yield stopping


def raise_open_file_limit() -> None:
    """Applies to this process and to processes that it starts."""
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed != most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def penstock_command() -> str:
    """How to run this program from the current directory: by name if the shell finds it, else by the shortest path."""
    import shutil  # `serve` starts faster without it

    program = os.path.abspath(sys.argv[0])
    if os.path.basename(program) == "__main__.py":
        return f"{sys.executable} -m penstock"
    if shutil.which("penstock") == program:
        return "penstock"
    return min(os.path.relpath(program), program, key=len)
