"""Regular expressions in subscriptions, matched against whole names."""

from collections.abc import Iterable
from typing import Any

from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.regex import InvalidExpression, compile_expression


def matching(expression: str, names: Iterable[str]) -> frozenset[str]:
    """Raises ApiError for an expression that RE2 does not take."""
    match = compiled(expression).fullmatch
    return frozenset(name for name in names if match(name) is not None)


def compiled(expression: str) -> Any:
    """Raises ApiError."""
    try:
        return compile_expression(expression)
    except InvalidExpression as error:
        message = f"SubscribedTopicRegex `{expression[:256]}` is not a valid regular expression: {error}."
        raise ApiError(ErrorCode.invalid_regular_expression, message) from None
