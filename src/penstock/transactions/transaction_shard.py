"""All transactional ids of one `__transaction_state` partition.

An operation decides: it returns the records to append and the replies to send. Only `replay` changes what is stored,
both live and while loading. Which markers are written, and which request waits for markers, is kept in memory only
and may be lost with the shard: after loading, all markers of prepared transactions are handed out again.

Each prepared transaction gets a serial number. The marker sender asks for the markers after the last number that it
has seen, so no marker is lost if a reply does not arrive, and otherwise none is handed out twice.
"""

from collections.abc import Callable, Iterable
from typing import Final

from penstock.protocol.errors import ErrorCode
from penstock.protocol.stored_records import KeyValue
from penstock.transactions.messages import (
    AddPartitionsRequest,
    DescribedTransaction,
    EndTxnRequest,
    InitProducerIdReply,
    InitProducerIdRequest,
    ListedTransaction,
    ListTransactionsFilters,
    ListTransactionsReply,
    MarkersPosition,
    MarkersReply,
    ReplyToken,
    TopicPartition,
    TransactionConfig,
    TransactionMarkers,
    TransactionResult,
)
from penstock.transactions.producer_requests import (
    TransactionDecision,
    add_partitions,
    check_init_request,
    end_transaction,
    init_producer_id,
    verify_partitions,
)
from penstock.transactions.transaction import (
    STATES_BY_TITLE,
    STORED_STATES,
    TransactionMetadata,
    TransactionState,
)
from penstock.transactions.transaction_log import (
    decode_key,
    decode_transaction,
    encode_tombstone,
    encode_transaction,
)


class _PreparedTransaction:
    __slots__ = ("remaining", "serial", "transaction")

    def __init__(self, transaction: TransactionMetadata, serial: int) -> None:
        self.transaction = transaction
        self.serial = serial
        self.remaining = set(transaction.partitions)


class PendingMarkers:
    __slots__ = ("_life", "_prepared", "_serial", "_waiting")

    def __init__(self) -> None:
        self._prepared: dict[str, _PreparedTransaction] = {}
        self._serial = 0
        self._life = object()
        self._waiting: ReplyToken | None = None

    def __len__(self) -> int:
        return len(self._prepared)

    @property
    def markers_waiting(self) -> int:
        return sum(len(prepared.remaining) for prepared in self._prepared.values())

    def replayed(self, transaction: TransactionMetadata) -> None:
        """Called for every replayed state of a transactional id."""
        self._prepared.pop(transaction.transactional_id, None)
        if transaction.state.is_prepared:
            self._serial += 1
            self._prepared[transaction.transactional_id] = _PreparedTransaction(transaction, self._serial)

    def forget(self, transactional_id: str) -> None:
        self._prepared.pop(transactional_id, None)

    def ask(
        self, after: MarkersPosition | None, token: ReplyToken
    ) -> Iterable[tuple[ReplyToken, MarkersReply]]:
        """Returns the replies that can be sent now."""
        serial = after.serial if after is not None and after.life is self._life else 0
        if self._waiting is not None:
            yield self._waiting, MarkersReply((), self._position(serial))
            self._waiting = None
        newer = self._newer_than(serial)
        if newer:
            yield token, MarkersReply(newer, self._position(self._serial))
        else:
            self._waiting = token

    def announce(self, decided: Iterable[TransactionMetadata]) -> Iterable[tuple[ReplyToken, MarkersReply]]:
        """Returns the reply with the markers of `decided`, which will be replayed next, in this order."""
        prepared = (transaction for transaction in decided if transaction.state.is_prepared)
        markers = tuple(_markers(each, serial) for serial, each in enumerate(prepared, self._serial + 1))
        if markers and self._waiting is not None:
            yield self._waiting, MarkersReply(markers, self._position(self._serial + len(markers)))
            self._waiting = None

    def is_written(self, markers: TransactionMarkers, partitions: Iterable[TopicPartition]) -> bool:
        """Whether all markers of the transaction are written now. Ignores reports about an earlier transaction."""
        prepared = self._prepared.get(markers.transactional_id)
        if prepared is None or prepared.serial != markers.serial:
            return False
        prepared.remaining.difference_update(partitions)
        return not prepared.remaining

    def _position(self, serial: int) -> MarkersPosition:
        return MarkersPosition(self._life, serial)

    def _newer_than(self, serial: int) -> tuple[TransactionMarkers, ...]:
        newer = []
        # Serial numbers increase in the order of the dictionary.
        for prepared in reversed(self._prepared.values()):
            if prepared.serial <= serial:
                break
            newer.append(_markers(prepared.transaction, prepared.serial))
        return tuple(reversed(newer))


def _markers(transaction: TransactionMetadata, serial: int) -> TransactionMarkers:
    return TransactionMarkers(
        serial=serial,
        transactional_id=transaction.transactional_id,
        producer_id=transaction.producer.id,
        epoch=transaction.producer.epoch,
        committed=transaction.state.is_committed,
        partitions=tuple(sorted(transaction.partitions)),
        transaction_version=transaction.transaction_version,
    )


#: The maximum number of records of one tick, so that a batch stays small.
_TICK_RECORDS_MAX: Final = 500
#: How transactions end: by their producer, because another producer took over, or by timeout.
COMMITTED: Final = "committed"
ABORTED: Final = "aborted"
FENCED: Final = "fenced"
TIMED_OUT: Final = "timed_out"
END_REASONS: Final = (COMMITTED, ABORTED, FENCED, TIMED_OUT)


class TransactionCoordinatorShard:
    __slots__ = (
        "_deadlines",
        "_decided_on",
        "_expiry_check_ms",
        "_pending_markers",
        "_timeout_check_ms",
        "_transaction_version",
        "count_by_state",
        "ended",
        "settings",
        "transactions",
        "unknown_records",
    )

    def __init__(
        self,
        settings: TransactionConfig,
        *,
        transaction_version: Callable[[], int],
        ended: dict[str, int] | None = None,
    ) -> None:
        """`transaction_version` returns the cluster's current level of the feature of that name.

        `ended` counts the transactions that end here, by END_REASONS; all shards of a node may share it.
        """
        self.settings = settings
        self.transactions: dict[str, TransactionMetadata] = {}
        self.count_by_state = dict.fromkeys(STORED_STATES, 0)
        self.ended = dict.fromkeys(END_REASONS, 0) if ended is None else ended
        #: Records of types that only a newer version knows; replay skips them.
        self.unknown_records = 0
        self._transaction_version = transaction_version
        self._pending_markers = PendingMarkers()
        #: Values that are about to be replayed, so that they need not be decoded.
        self._decided_on: dict[KeyValue, TransactionMetadata] = {}
        #: When each open transaction times out; those that never do are absent.
        self._deadlines: dict[str, int] = {}
        self._timeout_check_ms = 0
        self._expiry_check_ms = 0

    def __repr__(self) -> str:
        return f"<TransactionShard of {len(self.transactions)} ids, {len(self._pending_markers)} with markers to write>"

    # Replay

    #: Producers never write to the log of this shard in transactions.
    transactional: None = None

    def replay(self, key: bytes, value: bytes | None) -> None:
        decided = self._decided_on.pop((key, value), None)
        if decided is not None:
            self._install(decided)
            return
        transactional_id = decode_key(key)
        if transactional_id is None:
            self.unknown_records += 1
        elif value is None:
            self._forget(transactional_id)
        else:
            self._install(decode_transaction(transactional_id, value))

    def loaded(self, now_ms: int) -> TransactionResult:
        """Must be called once after the log is replayed."""
        self._timeout_check_ms = now_ms + self.settings.timed_out_check_interval_ms
        self._expiry_check_ms = now_ms + self.settings.expired_check_interval_ms
        return TransactionResult()

    # Time

    def next_deadline_ms(self) -> int | None:
        return (
            min(self._timeout_check_ms, self._expiry_check_ms) if self._deadlines else self._expiry_check_ms
        )

    def tick(self, now_ms: int) -> TransactionResult:
        """Do what is due, but at most one batch: call again while something is overdue."""
        if self._deadlines and self._timeout_check_ms <= now_ms:
            return self._abort_timed_out(now_ms)
        if self._expiry_check_ms <= now_ms:
            return self._remove_expired(now_ms)
        return TransactionResult()

    def clock_moved(self, by_ms: int) -> None:
        """The wall clock was set by this much: shift the timeouts so that they are not affected."""
        self._timeout_check_ms += by_ms
        self._expiry_check_ms += by_ms
        self._deadlines = {key: deadline_ms + by_ms for key, deadline_ms in self._deadlines.items()}

    # Producers

    def init_producer_id(
        self,
        request: InitProducerIdRequest,
        token: ReplyToken,
        *,
        now_ms: int,
        fresh_producer_id: int | None = None,
    ) -> TransactionResult:
        """Replies with InitProducerIdReply or NeedsProducerId."""
        error = check_init_request(request, self.settings)
        if error is not ErrorCode.none:
            return TransactionResult(replies=((token, InitProducerIdReply(error=error)),))
        decision = init_producer_id(
            self.transactions.get(request.transactional_id),
            request,
            transaction_version=self._transaction_version(),
            now_ms=now_ms,
            fresh_producer_id=fresh_producer_id,
        )
        return self._work(decision, token, FENCED)

    def add_partitions(
        self, request: AddPartitionsRequest, token: ReplyToken, *, now_ms: int
    ) -> TransactionResult:
        """Replies with AddPartitionsReply. Offsets of a group are added as its partition of `__consumer_offsets`."""
        return self._work(
            add_partitions(self.transactions.get(request.transactional_id), request, now_ms=now_ms), token
        )

    def verify_partitions(self, request: AddPartitionsRequest, token: ReplyToken) -> TransactionResult:
        """Replies with AddPartitionsReply; changes nothing."""
        return TransactionResult(
            replies=((token, verify_partitions(self.transactions.get(request.transactional_id), request)),)
        )

    def end(
        self, request: EndTxnRequest, token: ReplyToken, *, now_ms: int, fresh_producer_id: int | None = None
    ) -> TransactionResult:
        """Replies with EndTxnReply or NeedsProducerId."""
        current = self.transactions.get(request.transactional_id)
        return self._work(
            end_transaction(current, request, now_ms=now_ms, fresh_producer_id=fresh_producer_id), token
        )

    # Markers

    def next_markers(self, after: MarkersPosition | None, token: ReplyToken) -> TransactionResult:
        """Replies with MarkersReply, with the markers after that position, as soon as there are any.

        A new request replaces one that still waits, which then gets a reply without markers.
        """
        return TransactionResult(replies=tuple(self._pending_markers.ask(after, token)))

    def markers_written(
        self,
        markers: TransactionMarkers,
        partitions: tuple[TopicPartition, ...],
        token: ReplyToken,
        *,
        now_ms: int,
    ) -> TransactionResult:
        """These partitions have the marker, or are deleted. Replies with None; may be repeated."""
        completed = None
        if self._pending_markers.is_written(markers, partitions):
            completed = self.transactions[markers.transactional_id].completed(now_ms)
        return self._work(TransactionDecision(None, completed), token)

    @property
    def markers_waiting(self) -> int:
        """The number of markers that are not known to be written."""
        return self._pending_markers.markers_waiting

    # Administration

    def describe(self, transactional_id: str) -> DescribedTransaction:
        if not transactional_id:
            return DescribedTransaction(transactional_id, ErrorCode.invalid_request)
        found = self.transactions.get(transactional_id)
        if found is None:
            return DescribedTransaction(transactional_id, ErrorCode.transactional_id_not_found)
        return DescribedTransaction(
            transactional_id,
            state=found.state.title,
            producer_id=found.producer.id,
            epoch=found.producer.epoch,
            timeout_ms=found.timeout_ms,
            start_timestamp_ms=found.start_timestamp_ms,
            partitions=tuple(sorted(found.partitions)),
        )

    def list_transactions(self, filters: ListTransactionsFilters, *, now_ms: int) -> ListTransactionsReply:
        return ListTransactionsReply(
            transactions=tuple(
                ListedTransaction(found.transactional_id, found.producer.id, found.state.title)
                for found in self.transactions.values()
                if _matches_filters(found, filters, now_ms)
            ),
            unknown_states=tuple(sorted(title for title in filters.states if title not in STATES_BY_TITLE)),
        )

    # Internals

    def _work(
        self, decision: TransactionDecision, token: ReplyToken, abort: str = ABORTED
    ) -> TransactionResult:
        if decision.stored is None:
            return TransactionResult(replies=((token, decision.reply),))
        return self._decided((decision.stored,), abort, ((token, decision.reply),))

    def _decided(
        self,
        stored: tuple[TransactionMetadata, ...],
        abort: str,
        replies: tuple[tuple[ReplyToken, object], ...] = (),
    ) -> TransactionResult:
        """`abort` is the reason to count for transactions that are aborted here."""
        for transaction in stored:
            if transaction.state.is_prepared:
                self.ended[COMMITTED if transaction.state.is_committed else abort] += 1
        records = tuple(encode_transaction(transaction) for transaction in stored)
        self._decided_on = dict(zip(records, stored, strict=True))
        return TransactionResult(
            records=records,
            replies=(*replies, *self._pending_markers.announce(stored)),
        )

    def _install(self, transaction: TransactionMetadata) -> None:
        transactional_id = transaction.transactional_id
        before = self.transactions.get(transactional_id)
        self.transactions[transactional_id] = transaction
        self.count_by_state[transaction.state] += 1
        if before is not None:
            self.count_by_state[before.state] -= 1
        self._pending_markers.replayed(transaction)
        if transaction.state is not TransactionState.ONGOING or transaction.is_two_phase:
            self._deadlines.pop(transactional_id, None)
        elif before is None or _timeout_begins(before, transaction):
            self._deadlines[transactional_id] = transaction.start_timestamp_ms + transaction.timeout_ms

    def _forget(self, transactional_id: str) -> None:
        before = self.transactions.pop(transactional_id, None)
        if before is not None:
            self.count_by_state[before.state] -= 1
        self._deadlines.pop(transactional_id, None)
        self._pending_markers.forget(transactional_id)

    def _abort_timed_out(self, now_ms: int) -> TransactionResult:
        late = [key for key, deadline_ms in self._deadlines.items() if deadline_ms < now_ms]
        if len(late) <= _TICK_RECORDS_MAX:
            self._timeout_check_ms = now_ms + self.settings.timed_out_check_interval_ms
        version = self._transaction_version()
        return self._decided(
            tuple(
                self.transactions[key].fenced(transaction_version=version, now_ms=now_ms)
                for key in late[:_TICK_RECORDS_MAX]
            ),
            TIMED_OUT,
        )

    def _remove_expired(self, now_ms: int) -> TransactionResult:
        idle_since_ms = now_ms - self.settings.id_expiration_ms
        expired = [found for found in self.transactions.values() if _is_expired(found, idle_since_ms)]
        if len(expired) <= _TICK_RECORDS_MAX:
            self._expiry_check_ms = now_ms + self.settings.expired_check_interval_ms
        return TransactionResult(
            records=tuple(encode_tombstone(found.transactional_id) for found in expired[:_TICK_RECORDS_MAX])
        )


def _timeout_begins(before: TransactionMetadata, transaction: TransactionMetadata) -> bool:
    return before.state is not TransactionState.ONGOING or before.timeout_ms != transaction.timeout_ms


def _is_expired(found: TransactionMetadata, idle_since_ms: int) -> bool:
    is_at_rest = found.state is TransactionState.EMPTY or found.state.is_complete
    return is_at_rest and found.update_timestamp_ms <= idle_since_ms


def _matches_filters(found: TransactionMetadata, filters: ListTransactionsFilters, now_ms: int) -> bool:
    if filters.states and found.state.title not in filters.states:
        return False
    if filters.producer_ids and found.producer.id not in filters.producer_ids:
        return False
    if filters.duration_ms >= 0 and now_ms - found.start_timestamp_ms <= filters.duration_ms:
        return False
    return filters.matches_id is None or filters.matches_id(found.transactional_id)
