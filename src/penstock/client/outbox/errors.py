"""What can go wrong with an outbox."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.client.errors import ClientError

__all__ = ["Disturbed", "OutboxError", "RowsRefused"]


class OutboxError(ClientError):
    """It cannot work until somebody changes something; the sentence says what."""


class Disturbed(ClientError):
    """A broker, a database or a lock went away. What was under way is settled by beginning anew.

    `cause` is the client library's own error, where it was the one to say so.
    """

    def __init__(self, sentence: str, *, cause: Any = None) -> None:
        super().__init__(sentence)
        self.cause = cause


class RowsRefused(ClientError):
    """The broker does not take these rows, however often they are sent. Their transaction was aborted.

    `culprits` are rows by id with the reason. Where it is empty, it is at least one of those sent together.
    """

    def __init__(self, reason: str, culprits: Mapping[int, str] | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.culprits = dict(culprits or {})
