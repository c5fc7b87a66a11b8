"""The `penstock` command: one file or package per verb.

`penstock serve` does not load the command-line library, because that would take longer than the start of a broker.
"""

import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


def main(words: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 0 done, 1 failed, 2 wrong usage."""
    words = sys.argv[1:] if words is None else words
    if words[:1] == ["serve"]:
        # Importing the command-line library takes longer than starting a broker, so `serve` parses its flags itself.
        # It falls back to the library only for help and usage errors.
        with imports_without_gc():
            from penstock.cli.serve import parse_flags, start

        flags = parse_flags(words[1:])
        if flags is not None:
            return start(flags)
    from penstock.cli.commands import run

    return run(words)


@contextmanager
def imports_without_gc() -> Iterator[None]:
    """Pause garbage collection around imports.

    Imported modules live as long as the process, and collecting among them takes a tenth of the startup time.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
