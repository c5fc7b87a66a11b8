"""What a partition knows about its idempotent and transactional producers: sequences, epochs and open transactions.

Sequence checks keep retried batches from being appended twice. A transaction holds the last stable offset back from
its first record until its marker is committed: while it is open, and after it has ended for as long as the marker
is at or above the high watermark. Completed transactions are not remembered through a clean restart. If such a
marker is lost with its leader, the coordinator writes the same one again, because its decision was durable before
the first marker was written.
"""

from collections.abc import Iterable
from itertools import islice
from typing import Final, NamedTuple
from weakref import WeakValueDictionary

from penstock.log.config import INT32_MAX
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.record_batch import EndMarker


class CompletedTransaction(NamedTuple):
    """A transaction with data in this partition, and the marker that ended it."""

    producer_id: int
    first_offset: int
    marker_offset: int
    last_stable_offset: int  # of this log once the marker is committed
    committed: bool


class VerificationGuard:
    """Held while the coordinator verifies that a producer's transaction is open; invalid once that may have changed."""

    __slots__ = ("__weakref__", "producer_id")

    def __init__(self, producer_id: int) -> None:
        self.producer_id = producer_id

    def __repr__(self) -> str:
        return f"<VerificationGuard of producer {self.producer_id}>"


class PartitionTransactions:
    __slots__ = ("_ended", "_guards", "_open")

    def __init__(self) -> None:
        #: First offset by producer id. Transactions are added in log order, so the oldest comes first.
        self._open: dict[int, int] = {}
        #: First offset by marker offset, for transactions whose marker may not be committed.
        self._ended: dict[int, int] = {}
        self._guards: WeakValueDictionary[int, VerificationGuard] | None = None

    def __repr__(self) -> str:
        return f"<Transactions open={self._open} ended={self._ended}>"

    @property
    def is_unstable(self) -> bool:
        """Whether a transaction may hold the last stable offset below the high watermark."""
        return bool(self._open or self._ended)

    @property
    def first_open_offset(self) -> int | None:
        return next(iter(self._open.values()), None)

    def first_unstable_offset(self, high_watermark: int) -> int | None:
        """Returns the lowest first offset of the transactions that are open or whose marker is not committed."""
        if not self._ended:
            return self.first_open_offset
        self.settle(high_watermark)
        return min((*self._ended.values(), *islice(self._open.values(), 1)), default=None)

    def begin(self, producer_id: int, first_offset: int) -> None:
        self._open[producer_id] = first_offset
        self._drop_guard(producer_id)

    def end(self, producer_id: int, marker_offset: int, *, committed: bool) -> CompletedTransaction | None:
        """Records a marker in the log. Returns None if its producer has no open transaction here."""
        self._drop_guard(producer_id)
        first_offset = self._open.pop(producer_id, None)
        if first_offset is None:
            return None
        self._ended[marker_offset] = first_offset
        stable = self.first_open_offset
        last_stable_offset = marker_offset + 1 if stable is None else stable
        return CompletedTransaction(producer_id, first_offset, marker_offset, last_stable_offset, committed)

    def settle(self, high_watermark: int) -> None:
        """Removes markers below the high watermark, which no longer hold anything back."""
        ended = self._ended
        while ended and (marker_offset := next(iter(ended))) < high_watermark:
            del ended[marker_offset]

    def restore(self, open_offsets: Iterable[tuple[int, int]]) -> None:
        """Starts over with these pairs of first offset and producer id."""
        self._open = {producer_id: first_offset for first_offset, producer_id in sorted(open_offsets)}
        self._guards = None

    def truncate(self, end_offset: int) -> None:
        """Call it after the log up to here has been read again: markers beyond it are gone."""
        self._ended = {marker: first for marker, first in sorted(self._ended.items()) if marker < end_offset}

    # -- verification ------------------------------------------------------------------------------

    def begin_verification(self, producer_id: int) -> VerificationGuard:
        """Returns the guard that all current verifications of this producer share; it is freed with the last one."""
        if self._guards is None:
            self._guards = WeakValueDictionary()
        guard = self._guards.get(producer_id)
        if guard is None:
            guard = self._guards[producer_id] = VerificationGuard(producer_id)
        return guard

    def is_valid(self, guard: VerificationGuard) -> bool:
        return self._guards is not None and self._guards.get(guard.producer_id) is guard

    def _drop_guard(self, producer_id: int) -> None:
        if self._guards is not None:
            self._guards.pop(producer_id, None)


#: Producers may have this many requests in flight, so they may repeat this many batches.
BATCHES_TO_RETAIN: Final = 5
#: How many producers' rejected batches are remembered; the oldest entry is dropped first.
REJECTED_PRODUCERS_MAX: Final = 1000

#: Ids from here on belong to producers that append by a stored plan, and may repeat their last append much later.
PLANNED_PRODUCER_IDS_FROM: Final = 1 << 62
_PLANNED_EXPIRY_MS: Final = 30 * 86_400_000

#: From this transaction version on, each transaction has its own epoch, and its marker the next one (KIP-890).
EPOCH_PER_TRANSACTION: Final = 2


#: The offsets of a batch that was acknowledged and not written.
NOT_STORED: Final = -1


class BatchMetadata(NamedTuple):
    first_sequence: int
    last_sequence: int
    base_offset: int
    last_offset: int
    timestamp: int

    @property
    def last_delta(self) -> int:
        return (self.last_sequence - self.first_sequence) & INT32_MAX


class RejectedBatches(NamedTuple):
    """Rejected batches of a producer, from the first to the last sequence.

    The first of them may be in the log nevertheless, appended by the previous leader.
    """

    epoch: int
    first: int
    last: int
    code: ErrorCode

    def covers(self, sequence: int) -> bool:
        return not _precedes(sequence, self.first) and not _precedes(self.last, sequence)


class ProducerStateEntry:
    """One producer id in one partition. The newest of `batches` comes last."""

    __slots__ = (
        "batches",
        "coordinator_epoch",
        "epoch",
        "last_timestamp",
        "next_sequence",
        "txn_first_offset",
    )

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.next_sequence = 0
        self.batches: list[BatchMetadata] = []
        self.last_timestamp = -1
        self.coordinator_epoch = -1
        self.txn_first_offset = -1

    def __repr__(self) -> str:
        return f"<ProducerState epoch={self.epoch} next={self.next_sequence} txn={self.txn_first_offset}>"

    @property
    def last_sequence(self) -> int:
        return self.batches[-1].last_sequence if self.batches else -1

    def enter_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self.epoch = epoch
            self.batches.clear()
            self.next_sequence = 0

    def add(self, trace: BatchMetadata) -> None:
        self.batches.append(trace)
        if len(self.batches) > BATCHES_TO_RETAIN:
            del self.batches[0]
        self.next_sequence = sequence_after(trace.last_sequence)

    def find_duplicate(self, first_sequence: int, last_sequence: int) -> BatchMetadata | None:
        for trace in self.batches:
            if trace.first_sequence == first_sequence and trace.last_sequence == last_sequence:
                return trace
        return None


def sequence_after(sequence: int) -> int:
    return 0 if sequence == INT32_MAX else sequence + 1


def increment_sequence(sequence: int, steps: int) -> int:
    """Sequences wrap from 2^31-1 to 0; -1 means no sequence, and stays."""
    return sequence if sequence < 0 else (sequence + steps) & INT32_MAX


def _precedes(sequence: int, other: int) -> bool:
    """Sequences wrap, so the shorter distance decides which of two comes first."""
    return 0 < ((other - sequence) & INT32_MAX) <= INT32_MAX // 2


def batch_metadata(sequence: int, base_offset: int, last_delta: int, timestamp: int) -> BatchMetadata:
    last_sequence = increment_sequence(sequence, last_delta)
    return BatchMetadata(sequence, last_sequence, base_offset, base_offset + last_delta, timestamp)


def skipped_batch_metadata(sequence: int, last_delta: int, timestamp: int) -> BatchMetadata:
    last_sequence = increment_sequence(sequence, last_delta)
    return BatchMetadata(sequence, last_sequence, NOT_STORED, NOT_STORED, timestamp)


class ProducerStateManager:
    """All producers of one partition. `check` validates a batch; the `learn` methods replay the log."""

    __slots__ = ("_refusals", "accepts_gaps", "expiry_ms", "is_complete", "states", "transactions")

    def __init__(self, expiry_ms: int) -> None:
        self.states: dict[int, ProducerStateEntry] = {}
        #: Whether every producer that ever wrote to the partition is known: the log still has all its records, and no
        #: state has expired. The log clears this when it loses its beginning.
        self.is_complete = True
        self.transactions = PartitionTransactions()
        #: Whether a producer may continue at a later sequence than the next one: batches may have been refused for
        #: good, or acknowledged without being written by a leader that was the only one to know of them.
        self.accepts_gaps = False
        self.expiry_ms = expiry_ms
        self._refusals: dict[int, RejectedBatches] = {}

    def __len__(self) -> int:
        return len(self.states)

    def check(
        self,
        producer_id: int,
        epoch: int,
        sequence: int,
        last_delta: int,
        transactional: bool,
        leader_epoch: int = 0,
    ) -> BatchMetadata | None:
        """Returns the batch that this one repeats, or None if it may be appended. Raises ApiError otherwise.

        A producer id that is unknown, or no longer known, may start at any sequence. The exception: if every producer
        is known and the partition has had another leader, then that leader accepted the earlier batches and lost them.

        A batch that was sent right after one rejected for a transient reason is rejected for the same reason. A
        sequence error would make the client start a new epoch and repeat batches that other partitions may already
        have.
        """
        state = self.states.get(producer_id)
        if state is None:
            if self._refusals:
                self._check_refusal(producer_id, epoch, sequence, None)
            if sequence > 0 and self._must_begin(producer_id, leader_epoch):
                raise ApiError(
                    ErrorCode.out_of_order_sequence_number,
                    f"producer {producer_id} sent sequence {sequence}, and nothing before it has arrived",
                )
            return None
        if epoch != state.epoch:
            if epoch > state.epoch:
                self._check_refusal(producer_id, epoch, sequence, 0)
            _check_new_epoch(producer_id, epoch, sequence, state, self.accepts_gaps)
        elif sequence != state.next_sequence:
            repeated = state.find_duplicate(sequence, increment_sequence(sequence, last_delta))
            if repeated is not None:
                return repeated
            self._check_refusal(producer_id, epoch, sequence, state.next_sequence)
            if not (self.accepts_gaps and _precedes(state.next_sequence, sequence)):
                raise ApiError(
                    ErrorCode.out_of_order_sequence_number,
                    f"producer {producer_id} sent sequence {sequence}, expected {state.next_sequence}",
                )
        if state.txn_first_offset >= 0 and not transactional:
            raise ApiError(ErrorCode.invalid_txn_state, f"producer {producer_id} has a transaction open")
        return None

    def _must_begin(self, producer_id: int, leader_epoch: int) -> bool:
        """Whether an unknown producer cannot have written before.

        In the first leader epoch a producer may continue the sequences of a deleted topic of the same name, and
        librdkafka does not recover from an error there. Planned producers outlive their topic too.
        """
        is_followed = leader_epoch > 0 and not self.accepts_gaps
        return self.is_complete and is_followed and producer_id < PLANNED_PRODUCER_IDS_FROM

    def refused(self, producer_id: int, epoch: int, sequence: int, code: ErrorCode) -> None:
        """Records a batch that was rejected before it was checked, and that its producer will send again."""
        known = self._refusals.get(producer_id)
        if known is not None and known.epoch == epoch:
            if _precedes(known.last, sequence):
                self._refusals[producer_id] = known._replace(last=sequence)
            return
        if len(self._refusals) >= REJECTED_PRODUCERS_MAX:
            del self._refusals[next(iter(self._refusals))]
        self._refusals[producer_id] = RejectedBatches(epoch, sequence, sequence, code)

    def _settle_refusal(self, producer_id: int, epoch: int, trace: BatchMetadata) -> None:
        """Forgets the rejected batches once all were sent again. Earlier batches that a follower learns do not
        count."""
        refusal = self._refusals.get(producer_id)
        if refusal is not None and (
            epoch > refusal.epoch or not _precedes(trace.last_sequence, refusal.last)
        ):
            del self._refusals[producer_id]

    def _check_refusal(self, producer_id: int, epoch: int, sequence: int, expected: int | None) -> None:
        """`expected` is None for an unknown producer."""
        refusal = self._refusals.get(producer_id)
        if refusal is None or refusal.epoch != epoch:
            return
        if expected is None:
            expected = refusal.first
        if refusal.covers(expected) and _precedes(expected, sequence):
            raise ApiError(
                refusal.code, f"producer {producer_id} has to repeat sequence {expected} before {sequence}"
            )

    def check_epoch(self, producer_id: int, epoch: int) -> None:
        """Checks the batches that coordinators write themselves, which have no sequence."""
        state = self.states.get(producer_id)
        if state is not None and epoch < state.epoch:
            raise _invalid_producer_epoch(producer_id, epoch, state)

    def check_marker(self, marker: EndMarker, transaction_version: int) -> bool:
        """Returns whether this marker must be written; False if it is in the log already. Raises ApiError.

        If each transaction has its own epoch, a late marker never ends the next transaction.
        """
        state = self.states.get(marker.producer_id)
        if state is None:
            return True
        if marker.producer_epoch < state.epoch:
            raise _invalid_producer_epoch(marker.producer_id, marker.producer_epoch, state)
        if marker.coordinator_epoch < state.coordinator_epoch:
            raise ApiError(
                ErrorCode.transaction_coordinator_fenced,
                f"coordinator epoch {marker.coordinator_epoch} is older than {state.coordinator_epoch}",
            )
        if transaction_version >= EPOCH_PER_TRANSACTION and marker.producer_epoch == state.epoch:
            if state.txn_first_offset >= 0:
                raise _invalid_producer_epoch(marker.producer_id, marker.producer_epoch - 1, state)
            return False
        return True

    # -- verification (KIP-890) ----------------------------------------------------------------------

    def needs_verification(self, producer_id: int, epoch: int) -> bool:
        """Whether the coordinator must verify the transaction before this producer's batch is appended."""
        state = self.states.get(producer_id)
        return state is None or state.txn_first_offset < 0 or state.epoch != epoch

    def begin_verification(self, producer_id: int, epoch: int) -> VerificationGuard:
        """Keep the guard until the append: a marker that arrives in between makes it invalid. Raises ApiError."""
        self.check_epoch(producer_id, epoch)
        return self.transactions.begin_verification(producer_id)

    def is_guard_valid(self, guard: VerificationGuard) -> bool:
        """Whether no marker has arrived since the guard was issued."""
        return self.transactions.is_valid(guard)

    def check_guard(self, producer_id: int, epoch: int, guard: VerificationGuard) -> None:
        """Raises ApiError if the verified transaction may have ended meanwhile."""
        if self.needs_verification(producer_id, epoch) and not self.transactions.is_valid(guard):
            raise ApiError(
                ErrorCode.invalid_txn_state, f"the transaction of producer {producer_id} ended meanwhile"
            )

    # -- learning from the log -----------------------------------------------------------------------

    def learn(
        self, producer_id: int, epoch: int, trace: BatchMetadata, transactional: bool, seen_ms: int
    ) -> None:
        """Records a data batch in the log. `seen_ms` decides about idleness, because record timestamps may be wrong."""
        if self._refusals:
            self._settle_refusal(producer_id, epoch, trace)
        state = self.states.get(producer_id)
        if state is None:
            state = self.states[producer_id] = ProducerStateEntry(epoch)
        state.enter_epoch(epoch)
        state.add(trace)
        state.last_timestamp = seen_ms
        if transactional and state.txn_first_offset < 0:
            state.txn_first_offset = trace.base_offset
            self.transactions.begin(producer_id, trace.base_offset)

    def learn_marker(self, marker: EndMarker, offset: int, seen_ms: int) -> CompletedTransaction | None:
        """Records a commit or abort marker in the log. Returns the transaction that it ended, if there was one."""
        state = self.states.get(marker.producer_id)
        if state is None:
            state = self.states[marker.producer_id] = ProducerStateEntry(marker.producer_epoch)
        state.enter_epoch(marker.producer_epoch)
        state.coordinator_epoch = marker.coordinator_epoch
        state.txn_first_offset = -1
        state.last_timestamp = seen_ms
        return self.transactions.end(marker.producer_id, offset, committed=marker.committed)

    def expire(self, now_ms: int) -> int:
        """Removes producers that have been idle for too long, but not those in a transaction. Returns how many."""
        idle = [id for id, state in self.states.items() if self._is_idle(id, state, now_ms)]
        for producer_id in idle:
            del self.states[producer_id]
        if idle:
            self.is_complete = False
        return len(idle)

    def clear(self) -> None:
        self.states.clear()
        self.transactions = PartitionTransactions()

    def restore(self, states: Iterable[tuple[int, ProducerStateEntry]], now_ms: int) -> None:
        self.states = dict(states)
        self.expire(now_ms)
        self.transactions.restore(
            (state.txn_first_offset, producer_id)
            for producer_id, state in self.states.items()
            if state.txn_first_offset >= 0
        )

    def _is_idle(self, producer_id: int, state: ProducerStateEntry, now_ms: int) -> bool:
        expiry_ms = self.expiry_ms
        if producer_id >= PLANNED_PRODUCER_IDS_FROM:
            expiry_ms = max(expiry_ms, _PLANNED_EXPIRY_MS)
        return state.txn_first_offset < 0 and now_ms - state.last_timestamp >= expiry_ms


def _check_new_epoch(
    producer_id: int, epoch: int, sequence: int, state: ProducerStateEntry, accepts_gaps: bool
) -> None:
    if epoch < state.epoch:
        raise _invalid_producer_epoch(producer_id, epoch, state)
    if sequence != 0 and not accepts_gaps:
        raise ApiError(
            ErrorCode.out_of_order_sequence_number,
            f"producer {producer_id} started epoch {epoch} at sequence {sequence} instead of 0",
        )


def _invalid_producer_epoch(producer_id: int, epoch: int, state: ProducerStateEntry) -> ApiError:
    return ApiError(
        ErrorCode.invalid_producer_epoch,
        f"producer {producer_id} has epoch {state.epoch}, not {epoch} any more",
    )
