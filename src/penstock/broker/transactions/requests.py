"""What the handlers of transactional requests share."""

from __future__ import annotations

from typing import Final

from penstock.protocol.errors import ApiError, ErrorCode
from penstock.transactions.messages import EPOCH_PER_TRANSACTION

#: From this version on, most requests can be told PRODUCER_FENCED.
FENCED_FROM: Final = 2


def told(error: ErrorCode, *, knows_fenced: bool) -> ErrorCode:
    """Clients of older versions know only the other code for a producer that was fenced."""
    if error is ErrorCode.producer_fenced and not knows_fenced:
        return ErrorCode.invalid_producer_epoch
    return error


def protocol_version(is_newer: bool) -> int:
    """Of the transaction protocol that who asks has shown to speak."""
    return EPOCH_PER_TRANSACTION if is_newer else 0


def refuse_nameless(transactional_id: str | None) -> None:
    """Raises ApiError."""
    if not transactional_id:
        raise ApiError(ErrorCode.invalid_request, "there is no transactional id")
