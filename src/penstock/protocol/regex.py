"""Regular expressions that clients send: RE2's syntax, matched in time linear in the length of the text.

Python's own `re` takes exponential time for some expressions, which would block the event loop for that long.
"""

from functools import lru_cache
from typing import Any, Final

#: Longer than any expression that a person writes.
_CHARACTERS_MAX: Final = 4_096
#: The memory for the automaton of one expression; an expression that needs more is refused.
_MEMORY_BYTES_MAX: Final = 1 << 20


class InvalidRegex(ValueError):
    """RE2 does not accept the expression; the message says why."""


@lru_cache(maxsize=256)
def compile_regex(expression: str) -> Any:
    """Raises InvalidRegex."""
    import re2  # few nodes ever need it

    if len(expression) > _CHARACTERS_MAX:
        raise InvalidRegex("it is too long")
    options = re2.Options()
    options.max_mem, options.log_errors = _MEMORY_BYTES_MAX, False
    try:
        return re2.compile(expression, options)
    except re2.error as error:
        (reason,) = error.args
        text = reason.decode(errors="replace") if isinstance(reason, bytes) else str(reason)
        raise InvalidRegex(text) from None
