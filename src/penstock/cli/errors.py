"""The one way in which a command fails: a sentence on stderr, a hint where there is one, and an exit code."""

import os
import sys

EXIT_FAILURE = 1
EXIT_USAGE = 2


class CommandError(Exception):
    """A failure with a message for the user; never shown with a traceback."""

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        exit_code: int = EXIT_FAILURE,
        kafka_code: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.exit_code = exit_code
        self.kafka_code = kafka_code  # the Kafka error code, if there is one


def report_error(failure: CommandError) -> int:
    """Print the error and return its exit code. Plain text, so that a failing start imports no library for it."""
    in_colour = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    label = "\x1b[1;31merror:\x1b[0m" if in_colour else "error:"
    print(f"{label} {failure.message}", file=sys.stderr)
    if failure.hint:
        print(f"       {failure.hint}", file=sys.stderr)
    return failure.exit_code
