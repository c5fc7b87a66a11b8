"""The `penstock` command: one file per verb, imports kept lazy so that starting stays fast."""

import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


def main(words: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done, 1 failed, 2 wrong usage."""
    words = sys.argv[1:] if words is None else words
    if words[:1] == ["serve"]:
        # A broker is up in a blink, and the command-line library alone would take longer than that: it is
        # loaded only when it has something to say, which is help or a complaint.
        with loading():
            from penstock.cli.flags import read_quickly
            from penstock.cli.serve import start

        flags = read_quickly(words[1:])
        if flags is not None:
            return start(flags)
    from penstock.cli.app import run

    return run(words)


@contextmanager
def loading() -> Iterator[None]:
    """Around imports that last as long as the process: looking for garbage in them takes a tenth of a start."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
