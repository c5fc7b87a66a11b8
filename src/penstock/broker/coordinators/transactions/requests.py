"""By which connection a producer of the older protocol spoke last.

All transactions of such a producer have one epoch, so nothing in a request tells to which of them it belongs. But a
producer opens a new connection only when it has given up the one before: what still comes by an older one is late, and
may not touch the transaction of now. That connection is cut; who is there after all comes back by a new one, and asks
again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.protocol.errors import ApiError, ErrorCode

if TYPE_CHECKING:
    from penstock.broker.context import RequestContext

#: Producers that are remembered, those that spoke last.
_PRODUCERS_MAX: Final = 10_000


class Callers:
    """Of one kind of request: clients may have a connection for each kind."""

    def __init__(self) -> None:
        self._newest: dict[str, int] = {}

    def refuse_late(self, ctx: RequestContext, transactional_id: str) -> None:
        """Raises ApiError, which nobody gets to read."""
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
