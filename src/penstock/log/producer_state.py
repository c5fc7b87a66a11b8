"""What a partition remembers of its idempotent and transactional producers, so that retries never double."""

from collections.abc import Iterable
from typing import Final, NamedTuple

from penstock.log.config import INT32_MAX
from penstock.log.transactions import Ended, Transactions, VerificationGuard
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.records import EndMarker

#: Producers may have this many requests in flight, so this many of their batches can be repeated.
WINDOW_BATCHES: Final = 5
#: Producers whose refused batches are remembered; the oldest makes room.
REFUSALS_MAX: Final = 1000

#: Ids from here on are of producers that append by plan, and may have to repeat the last one after a long time.
PLANNED_IDS_FROM: Final = 1 << 62
_PLANNED_EXPIRY_MS: Final = 30 * 86_400_000

#: From this version of transactions on, each one has an epoch of its own and its marker the next (KIP-890).
EPOCH_PER_TRANSACTION: Final = 2


class BatchTrace(NamedTuple):
    first_sequence: int
    last_sequence: int
    base_offset: int
    last_offset: int
    timestamp: int


class Refusal(NamedTuple):
    """Batches of a producer that were turned away, from the first to the last by their sequences.

    The first of them may be in the log all the same, from the leader before.
    """

    epoch: int
    first: int
    last: int
    code: ErrorCode

    def covers(self, sequence: int) -> bool:
        return not _is_before(sequence, self.first) and not _is_before(self.last, sequence)


class ProducerState:
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
        self.batches: list[BatchTrace] = []
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

    def add(self, trace: BatchTrace) -> None:
        self.batches.append(trace)
        if len(self.batches) > WINDOW_BATCHES:
            del self.batches[0]
        self.next_sequence = following_sequence(trace.last_sequence)

    def repeat_of(self, first_sequence: int, last_sequence: int) -> BatchTrace | None:
        for trace in self.batches:
            if trace.first_sequence == first_sequence and trace.last_sequence == last_sequence:
                return trace
        return None


def following_sequence(sequence: int) -> int:
    return 0 if sequence == INT32_MAX else sequence + 1


def advance_sequence(sequence: int, steps: int) -> int:
    """Sequences wrap from 2^31-1 to 0; -1 means none and stays."""
    return sequence if sequence < 0 else (sequence + steps) & INT32_MAX


def _is_before(sequence: int, other: int) -> bool:
    """Sequences go round, so which of two comes first is decided by the shorter way."""
    return 0 < ((other - sequence) & INT32_MAX) <= INT32_MAX // 2


def trace_of(sequence: int, base_offset: int, last_delta: int, timestamp: int) -> BatchTrace:
    last_sequence = advance_sequence(sequence, last_delta)
    return BatchTrace(sequence, last_sequence, base_offset, base_offset + last_delta, timestamp)


class Producers:
    """All producers of one partition. `check` decides, the others learn from what the log holds."""

    __slots__ = ("_refusals", "expiry_ms", "is_complete", "states", "transactions")

    def __init__(self, expiry_ms: int) -> None:
        self.states: dict[int, ProducerState] = {}
        #: Every producer that ever wrote to the partition is known: the log holds all that was ever in it, and no
        #: state has expired. The log clears this when it loses its beginning.
        self.is_complete = True
        self.transactions = Transactions()
        self.expiry_ms = expiry_ms
        self._refusals: dict[int, Refusal] = {}

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
    ) -> BatchTrace | None:
        """The batch that this one repeats, or None when it may be appended. Raises ApiError otherwise.

        A producer id that is not known, or no longer, is welcome at any sequence, unless every producer is known and
        the partition has had another leader: then that one has taken the earlier batches, and lost them.

        What was sent right behind a batch that was turned away for a passing reason is turned away for the same
        reason: an error of sequence makes clients start a new epoch, and repeat under it what may be in other
        partitions already.
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
            _refuse_wrong_epoch(producer_id, epoch, sequence, state)
        elif sequence != state.next_sequence:
            repeated = state.repeat_of(sequence, advance_sequence(sequence, last_delta))
            if repeated is None:
                self._check_refusal(producer_id, epoch, sequence, state.next_sequence)
                raise ApiError(
                    ErrorCode.out_of_order_sequence_number,
                    f"producer {producer_id} sent sequence {sequence}, expected {state.next_sequence}",
                )
            return repeated
        if state.txn_first_offset >= 0 and not transactional:
            raise ApiError(ErrorCode.invalid_txn_state, f"producer {producer_id} has a transaction open")
        return None

    def _must_begin(self, producer_id: int, leader_epoch: int) -> bool:
        """Whether a producer that is not known cannot have written before.

        In the first leader epoch one may come whose sequences go on from a deleted topic of the same name; librdkafka
        does not recover from a refusal there. Plans outlive their topic too.
        """
        return self.is_complete and leader_epoch > 0 and producer_id < PLANNED_IDS_FROM

    def refused(self, producer_id: int, epoch: int, sequence: int, code: ErrorCode) -> None:
        """A batch was turned away before it was checked, and its producer will send it again."""
        known = self._refusals.get(producer_id)
        if known is not None and known.epoch == epoch:
            if _is_before(known.last, sequence):
                self._refusals[producer_id] = known._replace(last=sequence)
            return
        if len(self._refusals) >= REFUSALS_MAX:
            del self._refusals[next(iter(self._refusals))]
        self._refusals[producer_id] = Refusal(epoch, sequence, sequence, code)

    def _settle_refusal(self, producer_id: int, epoch: int, trace: BatchTrace) -> None:
        """All have come again. What a follower still learns of earlier batches settles nothing."""
        refusal = self._refusals.get(producer_id)
        if refusal is not None and (
            epoch > refusal.epoch or not _is_before(trace.last_sequence, refusal.last)
        ):
            del self._refusals[producer_id]

    def _check_refusal(self, producer_id: int, epoch: int, sequence: int, expected: int | None) -> None:
        """`expected` is None for a producer that nothing is known of."""
        refusal = self._refusals.get(producer_id)
        if refusal is None or refusal.epoch != epoch:
            return
        if expected is None:
            expected = refusal.first
        if refusal.covers(expected) and _is_before(expected, sequence):
            raise ApiError(
                refusal.code, f"producer {producer_id} has to repeat sequence {expected} before {sequence}"
            )

    def check_epoch(self, producer_id: int, epoch: int) -> None:
        """What coordinators' own batches are held to: they have no sequence."""
        state = self.states.get(producer_id)
        if state is not None and epoch < state.epoch:
            raise _stale_epoch(producer_id, epoch, state)

    def check_marker(self, marker: EndMarker, transaction_version: int) -> bool:
        """Whether this marker has to be written; False for one that is in the log already. Raises ApiError.

        Where each transaction has its own epoch, a marker that is late never ends the next transaction.
        """
        state = self.states.get(marker.producer_id)
        if state is None:
            return True
        if marker.producer_epoch < state.epoch:
            raise _stale_epoch(marker.producer_id, marker.producer_epoch, state)
        if marker.coordinator_epoch < state.coordinator_epoch:
            raise ApiError(
                ErrorCode.transaction_coordinator_fenced,
                f"coordinator epoch {marker.coordinator_epoch} is older than {state.coordinator_epoch}",
            )
        if transaction_version >= EPOCH_PER_TRANSACTION and marker.producer_epoch == state.epoch:
            if state.txn_first_offset >= 0:
                raise _stale_epoch(marker.producer_id, marker.producer_epoch - 1, state)
            return False
        return True

    # -- verification (KIP-890) ----------------------------------------------------------------------

    def needs_verification(self, producer_id: int, epoch: int) -> bool:
        """Whether the coordinator must be asked before this producer's transactional batch is appended."""
        state = self.states.get(producer_id)
        return state is None or state.txn_first_offset < 0 or state.epoch != epoch

    def begin_verification(self, producer_id: int, epoch: int) -> VerificationGuard:
        """Hold on to the guard until the append: it is void when a marker has come in between. Raises ApiError."""
        self.check_epoch(producer_id, epoch)
        return self.transactions.begin_verification(producer_id)

    def is_guarded(self, guard: VerificationGuard) -> bool:
        """Whether no marker has come in since."""
        return self.transactions.is_valid(guard)

    def check_guard(self, producer_id: int, epoch: int, guard: VerificationGuard) -> None:
        """Raises ApiError when the transaction that was verified may have ended meanwhile."""
        if self.needs_verification(producer_id, epoch) and not self.transactions.is_valid(guard):
            raise ApiError(
                ErrorCode.invalid_txn_state, f"the transaction of producer {producer_id} ended meanwhile"
            )

    # -- learning from the log -----------------------------------------------------------------------

    def learn(
        self, producer_id: int, epoch: int, trace: BatchTrace, transactional: bool, seen_ms: int
    ) -> None:
        """A batch of data is in the log. `seen_ms` counts for idleness, as timestamps of records may lie."""
        if self._refusals:
            self._settle_refusal(producer_id, epoch, trace)
        state = self.states.get(producer_id)
        if state is None:
            state = self.states[producer_id] = ProducerState(epoch)
        state.enter_epoch(epoch)
        state.add(trace)
        state.last_timestamp = seen_ms
        if transactional and state.txn_first_offset < 0:
            state.txn_first_offset = trace.base_offset
            self.transactions.begin(producer_id, trace.base_offset)

    def learn_marker(self, marker: EndMarker, offset: int, seen_ms: int) -> Ended | None:
        """A commit or abort marker is in the log. Returns the transaction that it ended, if there was one."""
        state = self.states.get(marker.producer_id)
        if state is None:
            state = self.states[marker.producer_id] = ProducerState(marker.producer_epoch)
        state.enter_epoch(marker.producer_epoch)
        state.coordinator_epoch = marker.coordinator_epoch
        state.txn_first_offset = -1
        state.last_timestamp = seen_ms
        return self.transactions.end(marker.producer_id, offset, committed=marker.committed)

    def expire(self, now_ms: int) -> int:
        """Forget producers that have been idle for too long; not those in a transaction. Returns how many."""
        idle = [id for id, state in self.states.items() if self._is_idle(id, state, now_ms)]
        for producer_id in idle:
            del self.states[producer_id]
        if idle:
            self.is_complete = False
        return len(idle)

    def clear(self) -> None:
        self.states.clear()
        self.transactions = Transactions()

    def restore(self, states: Iterable[tuple[int, ProducerState]], now_ms: int) -> None:
        self.states = dict(states)
        self.expire(now_ms)
        self.transactions.restore(
            (state.txn_first_offset, producer_id)
            for producer_id, state in self.states.items()
            if state.txn_first_offset >= 0
        )

    def _is_idle(self, producer_id: int, state: ProducerState, now_ms: int) -> bool:
        expiry_ms = self.expiry_ms
        if producer_id >= PLANNED_IDS_FROM:
            expiry_ms = max(expiry_ms, _PLANNED_EXPIRY_MS)
        return state.txn_first_offset < 0 and now_ms - state.last_timestamp >= expiry_ms


def _refuse_wrong_epoch(producer_id: int, epoch: int, sequence: int, state: ProducerState) -> None:
    if epoch < state.epoch:
        raise _stale_epoch(producer_id, epoch, state)
    if sequence != 0:
        raise ApiError(
            ErrorCode.out_of_order_sequence_number,
            f"producer {producer_id} started epoch {epoch} at sequence {sequence} instead of 0",
        )


def _stale_epoch(producer_id: int, epoch: int, state: ProducerState) -> ApiError:
    return ApiError(
        ErrorCode.invalid_producer_epoch,
        f"producer {producer_id} has epoch {state.epoch}, not {epoch} any more",
    )
