"""Decisions about the requests of transactional producers, each for one transactional id.

InitProducerId: a producer takes over a transactional id, and its previous producer is fenced. AddPartitionsToTxn and
AddOffsetsToTxn: which partitions a transaction writes to, and whether it may write to one. EndTxn: the producer
commits or aborts its transaction. With an epoch per transaction (KIP-890) the epoch identifies the transaction: the
current one, or the last one if the producer retries because the reply was lost. Without it the same epoch may mean
either, and only the state tells them apart.
"""

from typing import NamedTuple

from penstock.protocol.errors import ErrorCode
from penstock.transactions.messages import (
    EPOCH_PER_TRANSACTION,
    AddPartitionsReply,
    AddPartitionsRequest,
    EndTxnReply,
    EndTxnRequest,
    InitProducerIdReply,
    InitProducerIdRequest,
    NeedsProducerId,
    TransactionConfig,
)
from penstock.transactions.transaction import (
    CLIENT_EPOCH_MAX,
    NO_PRODUCER,
    TWO_PHASE_TIMEOUT_MS,
    ProducerIdAndEpoch,
    TransactionMetadata,
    TransactionState,
)
from penstock.transactions.transaction_log import is_valid_transactional_id


class TransactionDecision(NamedTuple):
    reply: object
    #: The new state of the transactional id, if it changes.
    stored: TransactionMetadata | None = None


def add_partitions(
    current: TransactionMetadata | None, request: AddPartitionsRequest, *, now_ms: int
) -> TransactionDecision:
    error = _check_add(current, request)
    if error is not ErrorCode.none:
        return TransactionDecision(_add_reply(request, error))
    assert current is not None
    partitions = frozenset(request.partitions)
    if partitions <= current.partitions:
        return TransactionDecision(_add_reply(request, ErrorCode.none))
    extended = current.extended(partitions, transaction_version=request.transaction_version, now_ms=now_ms)
    return TransactionDecision(_add_reply(request, ErrorCode.none), extended)


def verify_partitions(
    current: TransactionMetadata | None, request: AddPartitionsRequest
) -> AddPartitionsReply:
    """Check that the producer may write to these partitions. A leader asks before the first append of a transaction."""
    error = _check_add(current, request)
    if error is not ErrorCode.none:
        return _add_reply(request, error)
    assert current is not None
    return AddPartitionsReply(
        partitions=tuple(
            (
                partition,
                ErrorCode.none if partition in current.partitions else ErrorCode.transaction_abortable,
            )
            for partition in request.partitions
        )
    )


def check_producer(current: TransactionMetadata, producer_id: int, epoch: int) -> ErrorCode:
    # No producer gets the last epoch, which is reserved for fencing.
    if (producer_id, epoch) == current.client and epoch <= CLIENT_EPOCH_MAX:
        return ErrorCode.none
    known = (current.client.id, current.producer.id)
    return ErrorCode.producer_fenced if producer_id in known else ErrorCode.invalid_producer_id_mapping


def _check_add(current: TransactionMetadata | None, request: AddPartitionsRequest) -> ErrorCode:
    if not request.transactional_id:
        return ErrorCode.invalid_request
    if current is None:
        return ErrorCode.invalid_producer_id_mapping
    error = check_producer(current, request.producer_id, request.epoch)
    if error is not ErrorCode.none:
        return error
    if current.state.is_prepared:
        return ErrorCode.concurrent_transactions
    # A producer that took over a prepared transaction may only commit or abort it.
    return ErrorCode.invalid_txn_state if current.is_kept else ErrorCode.none


def _add_reply(request: AddPartitionsRequest, error: ErrorCode) -> AddPartitionsReply:
    return AddPartitionsReply(error, tuple((partition, error) for partition in request.partitions))


def check_init_request(request: InitProducerIdRequest, settings: TransactionConfig) -> ErrorCode:
    """Check what does not depend on the state of the transactional id."""
    if not is_valid_transactional_id(request.transactional_id):
        return ErrorCode.invalid_request
    if (request.producer_id < 0) != (request.epoch < 0):
        return ErrorCode.invalid_request
    if request.enable_two_phase:
        allowed = settings.two_phase_enabled
        return ErrorCode.none if allowed else ErrorCode.transactional_id_authorization_failed
    if not 0 < request.timeout_ms <= settings.timeout_max_ms:
        return ErrorCode.invalid_transaction_timeout
    return ErrorCode.none


def init_producer_id(
    current: TransactionMetadata | None,
    request: InitProducerIdRequest,
    *,
    transaction_version: int,
    now_ms: int,
    fresh_producer_id: int | None,
) -> TransactionDecision:
    if current is None:
        return _create(request, now_ms=now_ms, fresh_producer_id=fresh_producer_id)
    claim = _claimed_producer(request)
    if claim is not None and not _may_continue(current, claim, keeps=request.keep_prepared):
        return TransactionDecision(InitProducerIdReply(error=ErrorCode.producer_fenced))
    if current.state.is_prepared:
        return TransactionDecision(InitProducerIdReply(error=ErrorCode.concurrent_transactions))
    is_open = current.state is TransactionState.ONGOING
    if is_open and not request.keep_prepared:
        # The new epoch is not returned: the producer retries, and by then the transaction is aborted.
        fenced = current.fenced(transaction_version=transaction_version, now_ms=now_ms)
        return TransactionDecision(InitProducerIdReply(error=ErrorCode.concurrent_transactions), fenced)
    producer = _next_producer(current, claim, fresh_producer_id)
    if producer is None:
        return TransactionDecision(NeedsProducerId())
    take_over = current.kept if is_open else current.taken_over
    taken_over = take_over(
        producer,
        predecessor=_next_predecessor(current, claim),
        timeout_ms=_timeout_ms(request),
        now_ms=now_ms,
    )
    reply = _init_reply(producer, ongoing=current.producer if is_open else NO_PRODUCER)
    return TransactionDecision(reply, taken_over)


def _claimed_producer(request: InitProducerIdRequest) -> ProducerIdAndEpoch | None:
    """The previous id and epoch that the producer sends (KIP-360)."""
    return None if request.producer_id < 0 else ProducerIdAndEpoch(request.producer_id, request.epoch)


def _may_continue(current: TransactionMetadata, claim: ProducerIdAndEpoch, *, keeps: bool) -> bool:
    """True for the current producer, and for its predecessor, which retries because it did not receive the reply."""
    if claim == current.client:
        return True
    # While a transaction is open, a late retry must not abort it.
    was_asked = current.state is not TransactionState.ONGOING or (current.is_kept and keeps)
    return was_asked and claim == current.predecessor


def _timeout_ms(request: InitProducerIdRequest) -> int:
    return TWO_PHASE_TIMEOUT_MS if request.enable_two_phase else request.timeout_ms


def _create(
    request: InitProducerIdRequest, *, now_ms: int, fresh_producer_id: int | None
) -> TransactionDecision:
    if fresh_producer_id is None:
        return TransactionDecision(NeedsProducerId())
    created = TransactionMetadata(
        transactional_id=request.transactional_id,
        state=TransactionState.EMPTY,
        producer=ProducerIdAndEpoch(fresh_producer_id, 0),
        timeout_ms=_timeout_ms(request),
        update_timestamp_ms=now_ms,
    )
    return TransactionDecision(_init_reply(created.producer), created)


def _next_producer(
    current: TransactionMetadata, claim: ProducerIdAndEpoch | None, fresh_producer_id: int | None
) -> ProducerIdAndEpoch | None:
    """Returns None if a fresh producer id is needed and there is none."""
    client = current.client
    is_repeated = claim is not None and claim != client
    if is_repeated and client.epoch <= CLIENT_EPOCH_MAX:
        return client
    if client.is_exhausted:
        return None if fresh_producer_id is None else ProducerIdAndEpoch(fresh_producer_id, 0)
    return client.bumped()


def _next_predecessor(current: TransactionMetadata, claim: ProducerIdAndEpoch | None) -> ProducerIdAndEpoch:
    """A producer that sends no previous id is a new incarnation: it permanently fences earlier producers."""
    return ProducerIdAndEpoch(current.client.id) if claim is None else claim


def _init_reply(
    producer: ProducerIdAndEpoch, *, ongoing: ProducerIdAndEpoch = NO_PRODUCER
) -> InitProducerIdReply:
    return InitProducerIdReply(
        producer_id=producer.id,
        epoch=producer.epoch,
        ongoing_producer_id=ongoing.id,
        ongoing_epoch=ongoing.epoch,
    )


def end_transaction(
    current: TransactionMetadata | None, request: EndTxnRequest, *, now_ms: int, fresh_producer_id: int | None
) -> TransactionDecision:
    if not request.transactional_id:
        return _refuse_end(ErrorCode.invalid_request)
    if current is None:
        return _refuse_end(ErrorCode.invalid_producer_id_mapping)
    has_epoch_per_transaction = request.transaction_version >= EPOCH_PER_TRANSACTION
    if has_epoch_per_transaction and _is_repeated(current, request):
        return _answer_again(current, request, now_ms=now_ms, fresh_producer_id=fresh_producer_id)
    error = check_producer(current, request.producer_id, request.epoch)
    if error is not ErrorCode.none:
        return _refuse_end(error)
    if current.state is TransactionState.ONGOING:
        return _decide_end(current, request, now_ms=now_ms, fresh_producer_id=fresh_producer_id)
    if has_epoch_per_transaction:
        return _end_empty(current, request, now_ms=now_ms, fresh_producer_id=fresh_producer_id)
    return _answer_again(current, request, now_ms=now_ms, fresh_producer_id=fresh_producer_id)


def _is_repeated(current: TransactionMetadata, request: EndTxnRequest) -> bool:
    was_ended = current.state.is_prepared or current.state.is_complete
    return was_ended and current.predecessor == (request.producer_id, request.epoch)


def _answer_again(
    current: TransactionMetadata, request: EndTxnRequest, *, now_ms: int, fresh_producer_id: int | None
) -> TransactionDecision:
    """Repeat the reply: the transaction was already ended, or none was started since."""
    if current.state is TransactionState.EMPTY or current.state.is_committed != request.commit:
        return _refuse_end(ErrorCode.invalid_txn_state)
    if current.state.is_prepared:
        return _refuse_end(ErrorCode.concurrent_transactions)
    if current.client.epoch <= CLIENT_EPOCH_MAX:
        return TransactionDecision(_end_reply(current))
    # The transaction was fenced with the last epoch, so its producer continues with a fresh id.
    if fresh_producer_id is None:
        return TransactionDecision(NeedsProducerId())
    rotated = current.rotated(fresh_producer_id, now_ms=now_ms)
    return TransactionDecision(_end_reply(rotated), rotated)


def _decide_end(
    current: TransactionMetadata, request: EndTxnRequest, *, now_ms: int, fresh_producer_id: int | None
) -> TransactionDecision:
    if fresh_producer_id is None and _uses_producer_id(current, request):
        return TransactionDecision(NeedsProducerId())
    decided = current.decided(
        commit=request.commit,
        transaction_version=request.transaction_version,
        now_ms=now_ms,
        fresh_producer_id=fresh_producer_id,
    )
    return TransactionDecision(_end_reply(decided), decided)


def _end_empty(
    current: TransactionMetadata, request: EndTxnRequest, *, now_ms: int, fresh_producer_id: int | None
) -> TransactionDecision:
    """Abort a transaction without partitions: a producer that failed early cannot know that it added none."""
    if current.state.is_prepared:
        return _refuse_end(ErrorCode.concurrent_transactions)
    if request.commit:
        return _refuse_end(ErrorCode.invalid_txn_state)
    if fresh_producer_id is None and _uses_producer_id(current, request):
        return TransactionDecision(NeedsProducerId())
    aborted = current.aborted_empty(
        transaction_version=request.transaction_version,
        now_ms=now_ms,
        fresh_producer_id=fresh_producer_id,
    )
    return TransactionDecision(_end_reply(aborted), aborted)


def _uses_producer_id(current: TransactionMetadata, request: EndTxnRequest) -> bool:
    return request.transaction_version >= EPOCH_PER_TRANSACTION and current.client.is_exhausted


def _refuse_end(error: ErrorCode) -> TransactionDecision:
    return TransactionDecision(EndTxnReply(error=error))


def _end_reply(transaction: TransactionMetadata) -> EndTxnReply:
    return EndTxnReply(producer_id=transaction.client.id, epoch=transaction.client.epoch)
