"""The one way that a command fails: a sentence on stderr, a hint where there is one, an exit code."""

import os
import sys

FAILED = 1
WRONG_USAGE = 2


class Failure(Exception):
    """What the user should read; never shown with a traceback."""

    def __init__(
        self, message: str, *, hint: str | None = None, exit_code: int = FAILED, kafka_code: int | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.exit_code = exit_code
        self.kafka_code = kafka_code  # the protocol's number for what went wrong


def report(failure: Failure) -> int:
    """Print it and return the exit code. Plain text, so that a failing start needs no library for it."""
    in_colour = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    label = "\x1b[1;31merror:\x1b[0m" if in_colour else "error:"
    print(f"{label} {failure.message}", file=sys.stderr)
    if failure.hint:
        print(f"       {failure.hint}", file=sys.stderr)
    return failure.exit_code
