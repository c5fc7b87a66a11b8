"""A node that was started by a supervisor ends with it, even when the supervisor is killed outright."""

import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def end_with(parent: int) -> bool:
    """From now on the parent's end is a SIGTERM for this process (on Linux). False: it has ended already."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    return os.getppid() == parent
