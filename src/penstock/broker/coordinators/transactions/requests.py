"""Checks that the handlers of transactional requests share: transactional ids, error codes that old clients know,
and late requests.

All transactions of a producer of the older protocol have the same epoch, so nothing in a request says to which
transaction it belongs. But a producer opens a new connection only after it has given up the previous one. A request
on an older connection is therefore late and must not touch the current transaction. The broker closes that
connection; a producer that still uses it connects again and retries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.protocol.errors import ApiError, ErrorCode
from penstock.transactions.messages import EPOCH_PER_TRANSACTION

if TYPE_CHECKING:
    from penstock.broker.network.requests import RequestContext


#: From this version on, most responses can contain PRODUCER_FENCED.
PRODUCER_FENCED_FROM_VERSION: Final = 2


def error_for_version(error: ErrorCode, *, knows_fenced: bool) -> ErrorCode:
    """Old clients know only INVALID_PRODUCER_EPOCH for a fenced producer."""
    if error is ErrorCode.producer_fenced and not knows_fenced:
        return ErrorCode.invalid_producer_epoch
    return error


def protocol_version(is_newer: bool) -> int:
    """The version of the transaction protocol that the client uses."""
    return EPOCH_PER_TRANSACTION if is_newer else 0


def check_transactional_id(transactional_id: str | None) -> None:
    """Raises ApiError."""
    if not transactional_id:
        raise ApiError(ErrorCode.invalid_request, "there is no transactional id")


#: The most recently active producers are remembered, up to this number.
_PRODUCERS_MAX: Final = 10_000


class ProducerConnections:
    """The newest connection of each producer for one kind of request; clients may use one connection per kind."""

    def __init__(self) -> None:
        self._newest: dict[str, int] = {}

    def check_newest_connection(self, ctx: RequestContext, transactional_id: str) -> None:
        """Raises ApiError and closes the connection, so the client does not receive the error."""
        connection = ctx.connection
        if connection is None:
            return
        newest = self._newest.pop(transactional_id, 0)
        self._newest[transactional_id] = max(newest, connection.number)
        if connection.number < newest:
            connection.close()
            raise ApiError(ErrorCode.invalid_txn_state, "the producer has opened a newer connection")
        if len(self._newest) > _PRODUCERS_MAX:
            del self._newest[next(iter(self._newest))]
