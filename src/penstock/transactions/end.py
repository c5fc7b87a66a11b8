"""EndTxn: the producer commits or aborts its transaction.

With an epoch per transaction (KIP-890) the epoch tells which one is meant: the present one, or the last one again
because the answer was lost. Without, the same epoch may mean either, and the state must do to tell them apart.
"""

from penstock.protocol.errors import ErrorCode
from penstock.transactions.add import check_producer
from penstock.transactions.decision import Decision
from penstock.transactions.messages import EPOCH_PER_TRANSACTION, EndReply, EndRequest, NeedsProducerId
from penstock.transactions.states import State
from penstock.transactions.transaction import CLIENT_EPOCH_MAX, Transaction


def end(
    current: Transaction | None, request: EndRequest, *, now_ms: int, fresh_producer_id: int | None
) -> Decision:
    if not request.transactional_id:
        return _refused(ErrorCode.invalid_request)
    if current is None:
        return _refused(ErrorCode.invalid_producer_id_mapping)
    has_epoch_per_transaction = request.transaction_version >= EPOCH_PER_TRANSACTION
    if has_epoch_per_transaction and _is_repeated(current, request):
        return _answer_again(current, request, now_ms=now_ms, fresh_producer_id=fresh_producer_id)
    error = check_producer(current, request.producer_id, request.epoch)
    if error is not ErrorCode.none:
        return _refused(error)
    if current.state is State.ONGOING:
        return _decide(current, request, now_ms=now_ms, fresh_producer_id=fresh_producer_id)
    if has_epoch_per_transaction:
        return _end_empty(current, request, now_ms=now_ms, fresh_producer_id=fresh_producer_id)
    return _answer_again(current, request, now_ms=now_ms, fresh_producer_id=fresh_producer_id)


def _is_repeated(current: Transaction, request: EndRequest) -> bool:
    was_ended = current.state.is_prepared or current.state.is_complete
    return was_ended and current.predecessor == (request.producer_id, request.epoch)


def _answer_again(
    current: Transaction, request: EndRequest, *, now_ms: int, fresh_producer_id: int | None
) -> Decision:
    """It was decided before, or nothing was begun since."""
    if current.state is State.EMPTY or current.state.is_committed != request.commit:
        return _refused(ErrorCode.invalid_txn_state)
    if current.state.is_prepared:
        return _refused(ErrorCode.concurrent_transactions)
    if current.client.epoch <= CLIENT_EPOCH_MAX:
        return Decision(_given(current))
    # It was aborted for its producer with the last epoch of all.
    if fresh_producer_id is None:
        return Decision(NeedsProducerId())
    rotated = current.rotated(fresh_producer_id, now_ms=now_ms)
    return Decision(_given(rotated), rotated)


def _decide(
    current: Transaction, request: EndRequest, *, now_ms: int, fresh_producer_id: int | None
) -> Decision:
    if fresh_producer_id is None and _uses_producer_id(current, request):
        return Decision(NeedsProducerId())
    decided = current.decided(
        commit=request.commit,
        transaction_version=request.transaction_version,
        now_ms=now_ms,
        fresh_producer_id=fresh_producer_id,
    )
    return Decision(_given(decided), decided)


def _end_empty(
    current: Transaction, request: EndRequest, *, now_ms: int, fresh_producer_id: int | None
) -> Decision:
    """A producer that failed before it added anything cannot know that, and aborts to be sure."""
    if current.state.is_prepared:
        return _refused(ErrorCode.concurrent_transactions)
    if request.commit:
        return _refused(ErrorCode.invalid_txn_state)
    if fresh_producer_id is None and _uses_producer_id(current, request):
        return Decision(NeedsProducerId())
    aborted = current.aborted_empty(
        transaction_version=request.transaction_version,
        now_ms=now_ms,
        fresh_producer_id=fresh_producer_id,
    )
    return Decision(_given(aborted), aborted)


def _uses_producer_id(current: Transaction, request: EndRequest) -> bool:
    return request.transaction_version >= EPOCH_PER_TRANSACTION and current.client.is_exhausted


def _refused(error: ErrorCode) -> Decision:
    return Decision(EndReply(error=error))


def _given(transaction: Transaction) -> EndReply:
    return EndReply(producer_id=transaction.client.id, epoch=transaction.client.epoch)
