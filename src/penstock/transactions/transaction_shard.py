"""All transactional ids of one `__transaction_state` partition.

An operation decides: it returns the records to append and the replies to give. What is stored changes only in
`replay`, live and on loading alike. Who waits for markers, and which of them are written, lives beside it and may be
lost with the shard: whoever loads it next hands them out again.
"""

from collections.abc import Callable
from typing import Final

from penstock.protocol.errors import ErrorCode
from penstock.transactions.add import add, verify
from penstock.transactions.decision import Decision
from penstock.transactions.end import end
from penstock.transactions.handout import Handout
from penstock.transactions.init import check, init
from penstock.transactions.messages import (
    AddRequest,
    DescribedTransaction,
    EndRequest,
    InitReply,
    InitRequest,
    ListedTransaction,
    ListFilters,
    ListReply,
    Markers,
    MarkersPosition,
    TopicPartition,
)
from penstock.transactions.records import decode_key, decode_value, encode, tombstone
from penstock.transactions.settings import TransactionSettings
from penstock.transactions.states import BY_TITLE, STORED_STATES, State
from penstock.transactions.transaction import Transaction
from penstock.transactions.work import KeyValue, Token, Work

#: What one tick decides at most, so that a batch stays small.
_TICK_RECORDS_MAX: Final = 500
#: The ways in which transactions end: by their producer, because another one took over, or because time was up.
COMMITTED: Final = "committed"
ABORTED: Final = "aborted"
FENCED: Final = "fenced"
TIMED_OUT: Final = "timed_out"
ENDS: Final = (COMMITTED, ABORTED, FENCED, TIMED_OUT)


class TransactionShard:
    __slots__ = (
        "_deadlines",
        "_decided_on",
        "_expiry_check_ms",
        "_handout",
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
        settings: TransactionSettings,
        *,
        transaction_version: Callable[[], int],
        ended: dict[str, int] | None = None,
    ) -> None:
        """`transaction_version` tells the cluster's level of the feature of that name, now.

        `ended` counts what is decided here, by its name in ENDS; all shards of a node may count together.
        """
        self.settings = settings
        self.transactions: dict[str, Transaction] = {}
        self.count_by_state = dict.fromkeys(STORED_STATES, 0)
        self.ended = dict.fromkeys(ENDS, 0) if ended is None else ended
        #: Records of kinds that a newer version knows, passed over on replay.
        self.unknown_records = 0
        self._transaction_version = transaction_version
        self._handout = Handout()
        #: What is about to be replayed, so that it need not be read again.
        self._decided_on: dict[KeyValue, Transaction] = {}
        #: When each open transaction times out; those that never do are absent.
        self._deadlines: dict[str, int] = {}
        self._timeout_check_ms = 0
        self._expiry_check_ms = 0

    def __repr__(self) -> str:
        return (
            f"<TransactionShard of {len(self.transactions)} ids, {len(self._handout)} with markers to write>"
        )

    # Replay

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
            self._install(decode_value(transactional_id, value))

    def loaded(self, now_ms: int) -> Work:
        """To be called once after the log was replayed."""
        self._timeout_check_ms = now_ms + self.settings.timed_out_check_interval_ms
        self._expiry_check_ms = now_ms + self.settings.expired_check_interval_ms
        return Work()

    # Time

    def next_deadline_ms(self) -> int | None:
        return (
            min(self._timeout_check_ms, self._expiry_check_ms) if self._deadlines else self._expiry_check_ms
        )

    def tick(self, now_ms: int) -> Work:
        """What is due, as much of it as makes one batch: call again while something is overdue."""
        if self._deadlines and self._timeout_check_ms <= now_ms:
            return self._abort_timed_out(now_ms)
        if self._expiry_check_ms <= now_ms:
            return self._remove_expired(now_ms)
        return Work()

    def clock_moved(self, by_ms: int) -> None:
        """The wall clock was set by so much: timeouts run on as if it had not been."""
        self._timeout_check_ms += by_ms
        self._expiry_check_ms += by_ms
        self._deadlines = {key: deadline_ms + by_ms for key, deadline_ms in self._deadlines.items()}

    # Producers

    def init_producer_id(
        self, request: InitRequest, token: Token, *, now_ms: int, fresh_producer_id: int | None = None
    ) -> Work:
        """Answers InitReply or NeedsProducerId."""
        error = check(request, self.settings)
        if error is not ErrorCode.none:
            return Work(replies=((token, InitReply(error=error)),))
        decision = init(
            self.transactions.get(request.transactional_id),
            request,
            transaction_version=self._transaction_version(),
            now_ms=now_ms,
            fresh_producer_id=fresh_producer_id,
        )
        return self._work(decision, token, FENCED)

    def add_partitions(self, request: AddRequest, token: Token, *, now_ms: int) -> Work:
        """Answers AddReply. Offsets of a group are added as its partition of `__consumer_offsets`."""
        return self._work(add(self.transactions.get(request.transactional_id), request, now_ms=now_ms), token)

    def verify_partitions(self, request: AddRequest, token: Token) -> Work:
        """Answers AddReply; changes nothing."""
        return Work(replies=((token, verify(self.transactions.get(request.transactional_id), request)),))

    def end(
        self, request: EndRequest, token: Token, *, now_ms: int, fresh_producer_id: int | None = None
    ) -> Work:
        """Answers EndReply or NeedsProducerId."""
        current = self.transactions.get(request.transactional_id)
        return self._work(end(current, request, now_ms=now_ms, fresh_producer_id=fresh_producer_id), token)

    # Markers

    def next_markers(self, after: MarkersPosition | None, token: Token) -> Work:
        """Answers MarkersReply with what was prepared after that position, as soon as there is something.

        A later question takes the place of one that still waits, which is then answered without markers.
        """
        return Work(replies=tuple(self._handout.ask(after, token)))

    def markers_written(
        self, markers: Markers, partitions: tuple[TopicPartition, ...], token: Token, *, now_ms: int
    ) -> Work:
        """These partitions have the marker, or are gone for good. Answers None; repeats are harmless."""
        completed = None
        if self._handout.is_written(markers, partitions):
            completed = self.transactions[markers.transactional_id].completed(now_ms)
        return self._work(Decision(None, completed), token)

    @property
    def markers_waiting(self) -> int:
        """Those of which nobody knows yet whether they are written."""
        return self._handout.markers_waiting

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

    def list_transactions(self, filters: ListFilters, *, now_ms: int) -> ListReply:
        return ListReply(
            transactions=tuple(
                ListedTransaction(found.transactional_id, found.producer.id, found.state.title)
                for found in self.transactions.values()
                if _passes(found, filters, now_ms)
            ),
            unknown_states=tuple(sorted(title for title in filters.states if title not in BY_TITLE)),
        )

    # Inside

    def _work(self, decision: Decision, token: Token, abort: str = ABORTED) -> Work:
        if decision.stored is None:
            return Work(replies=((token, decision.reply),))
        return self._decided((decision.stored,), abort, ((token, decision.reply),))

    def _decided(
        self, stored: tuple[Transaction, ...], abort: str, replies: tuple[tuple[Token, object], ...] = ()
    ) -> Work:
        """`abort` is what those that are aborted here count as."""
        for transaction in stored:
            if transaction.state.is_prepared:
                self.ended[COMMITTED if transaction.state.is_committed else abort] += 1
        records = tuple(encode(transaction) for transaction in stored)
        self._decided_on = dict(zip(records, stored, strict=True))
        return Work(
            records=records,
            replies=(*replies, *self._handout.announce(stored)),
        )

    def _install(self, transaction: Transaction) -> None:
        transactional_id = transaction.transactional_id
        before = self.transactions.get(transactional_id)
        self.transactions[transactional_id] = transaction
        self.count_by_state[transaction.state] += 1
        if before is not None:
            self.count_by_state[before.state] -= 1
        self._handout.replayed(transaction)
        if transaction.state is not State.ONGOING or transaction.is_two_phase:
            self._deadlines.pop(transactional_id, None)
        elif before is None or _time_begins(before, transaction):
            self._deadlines[transactional_id] = transaction.start_timestamp_ms + transaction.timeout_ms

    def _forget(self, transactional_id: str) -> None:
        before = self.transactions.pop(transactional_id, None)
        if before is not None:
            self.count_by_state[before.state] -= 1
        self._deadlines.pop(transactional_id, None)
        self._handout.forget(transactional_id)

    def _abort_timed_out(self, now_ms: int) -> Work:
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

    def _remove_expired(self, now_ms: int) -> Work:
        idle_since_ms = now_ms - self.settings.id_expiration_ms
        expired = [found for found in self.transactions.values() if _is_expired(found, idle_since_ms)]
        if len(expired) <= _TICK_RECORDS_MAX:
            self._expiry_check_ms = now_ms + self.settings.expired_check_interval_ms
        return Work(records=tuple(tombstone(found.transactional_id) for found in expired[:_TICK_RECORDS_MAX]))


def _time_begins(before: Transaction, transaction: Transaction) -> bool:
    return before.state is not State.ONGOING or before.timeout_ms != transaction.timeout_ms


def _is_expired(found: Transaction, idle_since_ms: int) -> bool:
    is_at_rest = found.state is State.EMPTY or found.state.is_complete
    return is_at_rest and found.update_timestamp_ms <= idle_since_ms


def _passes(found: Transaction, filters: ListFilters, now_ms: int) -> bool:
    if filters.states and found.state.title not in filters.states:
        return False
    if filters.producer_ids and found.producer.id not in filters.producer_ids:
        return False
    if filters.duration_ms >= 0 and now_ms - found.start_timestamp_ms <= filters.duration_ms:
        return False
    return filters.matches_id is None or filters.matches_id(found.transactional_id)
