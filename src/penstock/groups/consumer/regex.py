"""Regular expressions in subscriptions: RE2's syntax, matched against whole names in time linear in their length."""

from collections.abc import Iterable
from functools import lru_cache
from typing import Any, Final

from penstock.protocol.errors import ApiError, ErrorCode

#: Longer than any that a person writes.
_CHARACTERS_MAX: Final = 4_096
#: What the automaton of one expression may take; one that needs more is refused.
_MEMORY_BYTES_MAX: Final = 1 << 20


def matching(expression: str, names: Iterable[str]) -> frozenset[str]:
    """Raises ApiError for an expression that RE2 does not take."""
    match = compiled(expression).fullmatch
    return frozenset(name for name in names if match(name) is not None)


@lru_cache(maxsize=256)
def compiled(expression: str) -> Any:
    """Raises ApiError."""
    import re2

    if len(expression) > _CHARACTERS_MAX:
        raise ApiError(ErrorCode.invalid_regular_expression, "The regular expression is too long.")
    options = re2.Options()
    options.max_mem, options.log_errors = _MEMORY_BYTES_MAX, False
    try:
        return re2.compile(expression, options)
    except re2.error as error:
        (reason,) = error.args
        text = reason.decode(errors="replace") if isinstance(reason, bytes) else str(reason)
        message = f"SubscribedTopicRegex `{expression}` is not a valid regular expression: {text}."
        raise ApiError(ErrorCode.invalid_regular_expression, message) from None
