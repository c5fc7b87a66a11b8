"""InitProducerId: a producer takes a transactional id over, and whoever had it before is fenced."""

from penstock.protocol.errors import ErrorCode
from penstock.transactions.decision import Decision
from penstock.transactions.messages import InitReply, InitRequest, NeedsProducerId
from penstock.transactions.records import can_store
from penstock.transactions.settings import TransactionSettings
from penstock.transactions.states import State
from penstock.transactions.transaction import (
    CLIENT_EPOCH_MAX,
    NO_PRODUCER,
    TWO_PHASE_TIMEOUT_MS,
    Producer,
    Transaction,
)


def check(request: InitRequest, settings: TransactionSettings) -> ErrorCode:
    """What can be said without knowing the id."""
    if not can_store(request.transactional_id):
        return ErrorCode.invalid_request
    if (request.producer_id < 0) != (request.epoch < 0):
        return ErrorCode.invalid_request
    if request.enable_two_phase:
        allowed = settings.two_phase_enabled
        return ErrorCode.none if allowed else ErrorCode.transactional_id_authorization_failed
    if not 0 < request.timeout_ms <= settings.timeout_max_ms:
        return ErrorCode.invalid_transaction_timeout
    return ErrorCode.none


def init(
    current: Transaction | None,
    request: InitRequest,
    *,
    transaction_version: int,
    now_ms: int,
    fresh_producer_id: int | None,
) -> Decision:
    if current is None:
        return _create(request, now_ms=now_ms, fresh_producer_id=fresh_producer_id)
    claim = _claim(request)
    if claim is not None and not _may_go_on(current, claim, keeps=request.keep_prepared):
        return Decision(InitReply(error=ErrorCode.producer_fenced))
    if current.state.is_prepared:
        return Decision(InitReply(error=ErrorCode.concurrent_transactions))
    if current.state is not State.ONGOING:
        return _take_over(current, request, now_ms=now_ms, fresh_producer_id=fresh_producer_id)
    if request.keep_prepared:
        return _keep(current, request, now_ms=now_ms, fresh_producer_id=fresh_producer_id)
    # The new epoch is shown to nobody: the producer asks again, and then the transaction is out of the way.
    fenced = current.fenced(transaction_version=transaction_version, now_ms=now_ms)
    return Decision(InitReply(error=ErrorCode.concurrent_transactions), fenced)


def _claim(request: InitRequest) -> Producer | None:
    """What the producer says that it was before (KIP-360)."""
    return None if request.producer_id < 0 else Producer(request.producer_id, request.epoch)


def _may_go_on(current: Transaction, claim: Producer, *, keeps: bool) -> bool:
    """The present producer may, and one that never saw the answer to the same question."""
    if claim == current.client:
        return True
    # Beside an open transaction a late question must not be what aborts it.
    was_asked = current.state is not State.ONGOING or (current.is_kept and keeps)
    return was_asked and claim == current.predecessor


def _timeout_ms(request: InitRequest) -> int:
    return TWO_PHASE_TIMEOUT_MS if request.enable_two_phase else request.timeout_ms


def _create(request: InitRequest, *, now_ms: int, fresh_producer_id: int | None) -> Decision:
    if fresh_producer_id is None:
        return Decision(NeedsProducerId())
    created = Transaction(
        transactional_id=request.transactional_id,
        state=State.EMPTY,
        producer=Producer(fresh_producer_id, 0),
        timeout_ms=_timeout_ms(request),
        update_timestamp_ms=now_ms,
    )
    return Decision(_given(created.producer), created)


def _take_over(
    current: Transaction, request: InitRequest, *, now_ms: int, fresh_producer_id: int | None
) -> Decision:
    producer = _next_producer(current, _claim(request), fresh_producer_id)
    if producer is None:
        return Decision(NeedsProducerId())
    taken = current.taken_over(
        producer,
        predecessor=_next_predecessor(current, _claim(request)),
        timeout_ms=_timeout_ms(request),
        now_ms=now_ms,
    )
    return Decision(_given(producer), taken)


def _keep(
    current: Transaction, request: InitRequest, *, now_ms: int, fresh_producer_id: int | None
) -> Decision:
    successor = _next_producer(current, _claim(request), fresh_producer_id)
    if successor is None:
        return Decision(NeedsProducerId())
    kept = current.kept(
        successor,
        predecessor=_next_predecessor(current, _claim(request)),
        timeout_ms=_timeout_ms(request),
        now_ms=now_ms,
    )
    return Decision(_given(successor, ongoing=current.producer), kept)


def _next_producer(
    current: Transaction, claim: Producer | None, fresh_producer_id: int | None
) -> Producer | None:
    """None when that takes a fresh id, and there is none."""
    client = current.client
    is_repeated = claim is not None and claim != client
    if is_repeated and client.epoch <= CLIENT_EPOCH_MAX:
        return client
    if client.is_exhausted:
        return None if fresh_producer_id is None else Producer(fresh_producer_id, 0)
    return client.bumped()


def _next_predecessor(current: Transaction, claim: Producer | None) -> Producer:
    """Whoever says nothing of the past is a new incarnation: it fences what came before for good."""
    return Producer(current.client.id) if claim is None else claim


def _given(producer: Producer, *, ongoing: Producer = NO_PRODUCER) -> InitReply:
    return InitReply(
        producer_id=producer.id,
        epoch=producer.epoch,
        ongoing_producer_id=ongoing.id,
        ongoing_epoch=ongoing.epoch,
    )
