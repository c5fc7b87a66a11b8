"""A node that was started by another process ends with it, even when that one is killed outright.

The other process holds the far end of stdin and never writes to it: when it is gone, stdin has ended.
"""

import os
import signal
import threading

_STDIN = 0


def stop_with_stdin() -> None:
    """From now on the end of stdin is a SIGTERM for this process, once."""
    threading.Thread(target=_await_end, name="lifeline", daemon=True).start()


def _await_end() -> None:
    try:
        while os.read(_STDIN, 4096):
            pass
    except OSError:
        pass  # not open at all: it has ended
    os.kill(os.getpid(), signal.SIGTERM)
