"""AddPartitionsToTxn and AddOffsetsToTxn: which partitions a transaction writes to, and whether one does."""

from penstock.protocol.errors import ErrorCode
from penstock.transactions.decision import Decision
from penstock.transactions.messages import AddReply, AddRequest
from penstock.transactions.transaction import CLIENT_EPOCH_MAX, Transaction


def add(current: Transaction | None, request: AddRequest, *, now_ms: int) -> Decision:
    error = _check(current, request)
    if error is not ErrorCode.none:
        return Decision(_all(request, error))
    assert current is not None
    partitions = frozenset(request.partitions)
    if partitions <= current.partitions:
        return Decision(_all(request, ErrorCode.none))
    extended = current.extended(partitions, transaction_version=request.transaction_version, now_ms=now_ms)
    return Decision(_all(request, ErrorCode.none), extended)


def verify(current: Transaction | None, request: AddRequest) -> AddReply:
    """Whether these partitions may be written to: a leader asks before the first append of a transaction."""
    error = _check(current, request)
    if error is not ErrorCode.none:
        return _all(request, error)
    assert current is not None
    return AddReply(
        partitions=tuple(
            (place, ErrorCode.none if place in current.partitions else ErrorCode.transaction_abortable)
            for place in request.partitions
        )
    )


def check_producer(current: Transaction, producer_id: int, epoch: int) -> ErrorCode:
    # The last epoch is given to nobody.
    if (producer_id, epoch) == current.client and epoch <= CLIENT_EPOCH_MAX:
        return ErrorCode.none
    known = (current.client.id, current.producer.id)
    return ErrorCode.producer_fenced if producer_id in known else ErrorCode.invalid_producer_id_mapping


def _check(current: Transaction | None, request: AddRequest) -> ErrorCode:
    if not request.transactional_id:
        return ErrorCode.invalid_request
    if current is None:
        return ErrorCode.invalid_producer_id_mapping
    error = check_producer(current, request.producer_id, request.epoch)
    if error is not ErrorCode.none:
        return error
    if current.state.is_prepared:
        return ErrorCode.concurrent_transactions
    # Who took a prepared transaction over may only decide about it.
    return ErrorCode.invalid_txn_state if current.is_kept else ErrorCode.none


def _all(request: AddRequest, error: ErrorCode) -> AddReply:
    return AddReply(error, tuple((place, error) for place in request.partitions))
