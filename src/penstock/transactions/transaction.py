"""A transactional id as it is stored, and each transition that it can make.

The states form one table; a transition that is absent from it cannot happen.

A transactional id has up to three producers. `producer` is the one whose id and epoch are in the records and markers
of the transaction. `successor` is set if the next transaction will belong to another producer: to a new producer id
because the epochs are used up, or to a new incarnation that took over a prepared transaction (KIP-939).
`predecessor` is the producer before the current one. If it repeats a request because it did not receive the reply,
the coordinator repeats the reply and does not execute the request again.
"""

from enum import Enum
from typing import Any, Final, NamedTuple

from penstock.transactions.messages import (
    EPOCH_PER_TRANSACTION,
    NO_PRODUCER_EPOCH,
    NO_PRODUCER_ID,
    TopicPartition,
)


class TransactionState(Enum):
    """Numbers and titles are those that Kafka stores and prints."""

    EMPTY = 0, "Empty"
    ONGOING = 1, "Ongoing"
    PREPARE_COMMIT = 2, "PrepareCommit"
    PREPARE_ABORT = 3, "PrepareAbort"
    COMPLETE_COMMIT = 4, "CompleteCommit"
    COMPLETE_ABORT = 5, "CompleteAbort"
    #: These two are never stored: expiring an id removes it, and fencing aborts the transaction, in one step.
    DEAD = 6, "Dead"
    PREPARE_EPOCH_FENCE = 7, "PrepareEpochFence"

    def __init__(self, code: int, title: str) -> None:
        self.code = code
        self.title = title
        #: The outcome is decided, but some markers may not be written yet.
        self.is_prepared = code in (2, 3)
        self.is_complete = code in (4, 5)
        self.is_committed = code in (2, 4)

    def __repr__(self) -> str:
        return self.title


STORED_STATES: Final = tuple(state for state in TransactionState if state.code < TransactionState.DEAD.code)
STATES_BY_CODE: Final = {state.code: state for state in TransactionState}
STATES_BY_TITLE: Final = {state.title: state for state in TransactionState}

#: Transitions between transactions; a complete one becomes empty when a producer takes over the id.
_FROM_REST: Final = frozenset(
    {TransactionState.EMPTY, TransactionState.ONGOING, TransactionState.COMPLETE_ABORT, TransactionState.DEAD}
)

TRANSACTION_TRANSITIONS: Final[dict[TransactionState, frozenset[TransactionState]]] = {
    TransactionState.EMPTY: _FROM_REST,
    TransactionState.ONGOING: frozenset(
        {TransactionState.ONGOING, TransactionState.PREPARE_COMMIT, TransactionState.PREPARE_ABORT}
    ),
    TransactionState.PREPARE_COMMIT: frozenset({TransactionState.COMPLETE_COMMIT}),
    TransactionState.PREPARE_ABORT: frozenset({TransactionState.COMPLETE_ABORT}),
    # An abort of a transaction without partitions has no markers to write, so it is complete at once.
    TransactionState.COMPLETE_COMMIT: _FROM_REST,
    TransactionState.COMPLETE_ABORT: _FROM_REST,
}


#: The last epoch that a producer gets; the epoch after it is reserved for fencing.
CLIENT_EPOCH_MAX: Final = 32_766
#: A transaction with this timeout takes part in a two-phase commit and never times out.
TWO_PHASE_TIMEOUT_MS: Final = 2**31 - 1


class ProducerIdAndEpoch(NamedTuple):
    id: int = NO_PRODUCER_ID
    epoch: int = NO_PRODUCER_EPOCH

    @property
    def is_exhausted(self) -> bool:
        return self.epoch >= CLIENT_EPOCH_MAX

    def bumped(self) -> "ProducerIdAndEpoch":
        assert self.epoch <= CLIENT_EPOCH_MAX, f"no epoch is left for {self}"
        return ProducerIdAndEpoch(self.id, self.epoch + 1)


NO_PRODUCER: Final = ProducerIdAndEpoch()


class TransactionMetadata(NamedTuple):
    transactional_id: str
    state: TransactionState
    producer: ProducerIdAndEpoch
    timeout_ms: int
    update_timestamp_ms: int
    start_timestamp_ms: int = -1
    successor: ProducerIdAndEpoch | None = None
    predecessor: ProducerIdAndEpoch = NO_PRODUCER
    partitions: frozenset[TopicPartition] = frozenset()
    #: The protocol version of the last transition.
    transaction_version: int = 0

    @property
    def client(self) -> ProducerIdAndEpoch:
        """The producer that may use this transactional id now."""
        return self.successor or self.producer

    @property
    def is_two_phase(self) -> bool:
        return self.timeout_ms == TWO_PHASE_TIMEOUT_MS

    @property
    def is_kept(self) -> bool:
        """Whether the open transaction was taken over by an incarnation that may end it but not extend it."""
        return self.state is TransactionState.ONGOING and self.successor is not None

    # Transitions

    def taken_over(
        self, producer: ProducerIdAndEpoch, *, predecessor: ProducerIdAndEpoch, timeout_ms: int, now_ms: int
    ) -> "TransactionMetadata":
        """A producer takes over the id between transactions."""
        return self._moved(
            TransactionState.EMPTY,
            producer=producer,
            predecessor=predecessor,
            timeout_ms=timeout_ms,
            start_timestamp_ms=-1,
            update_timestamp_ms=now_ms,
        )

    def kept(
        self, successor: ProducerIdAndEpoch, *, predecessor: ProducerIdAndEpoch, timeout_ms: int, now_ms: int
    ) -> "TransactionMetadata":
        """A new incarnation takes over the open transaction, to commit or abort it."""
        return self._moved(
            TransactionState.ONGOING,
            successor=successor,
            predecessor=predecessor,
            # A two-phase transaction must never time out, even if its successor does not use two-phase commit.
            timeout_ms=self.timeout_ms if self.is_two_phase else timeout_ms,
            update_timestamp_ms=now_ms,
        )

    def extended(
        self, partitions: frozenset[TopicPartition], *, transaction_version: int, now_ms: int
    ) -> "TransactionMetadata":
        assert self.successor is None, f"{self} is not open to {partitions}"
        return self._moved(
            TransactionState.ONGOING,
            partitions=self.partitions | partitions,
            # The producer uses its new id and epoch, so it received the reply: requests of its predecessor are late.
            predecessor=ProducerIdAndEpoch(self.predecessor.id),
            start_timestamp_ms=self.start_timestamp_ms if self.state is TransactionState.ONGOING else now_ms,
            update_timestamp_ms=now_ms,
            transaction_version=transaction_version,
        )

    def decided(
        self, *, commit: bool, transaction_version: int, now_ms: int, fresh_producer_id: int | None
    ) -> "TransactionMetadata":
        """The producer ends it. With an epoch per transaction, the next one has a new epoch or a fresh producer id."""
        step = self._moved(
            TransactionState.PREPARE_COMMIT if commit else TransactionState.PREPARE_ABORT,
            update_timestamp_ms=now_ms,
            transaction_version=transaction_version,
        )
        if transaction_version < EPOCH_PER_TRANSACTION:
            return step
        return step._replace(
            producer=self.producer.bumped(),
            successor=self._successor(fresh_producer_id),
            predecessor=self.client,
        )

    def fenced(self, *, transaction_version: int, now_ms: int) -> "TransactionMetadata":
        """Abort the transaction without its producer, whose epoch is too old then. Uses the cluster's version.

        The last epoch is reserved for this. After that the id is used up, and the next producer gets a fresh one.
        """
        may_recover = transaction_version >= EPOCH_PER_TRANSACTION
        return self._moved(
            TransactionState.PREPARE_ABORT,
            producer=self.producer.bumped(),
            successor=None if self.successor is None else self.successor.bumped(),
            predecessor=self.client if may_recover else NO_PRODUCER,
            update_timestamp_ms=now_ms,
            transaction_version=transaction_version,
        )

    def aborted_empty(
        self, *, transaction_version: int, now_ms: int, fresh_producer_id: int | None
    ) -> "TransactionMetadata":
        """Abort a transaction without partitions: it needs no markers, only the next epoch."""
        assert transaction_version >= EPOCH_PER_TRANSACTION
        assert self.successor is None
        return self._moved(
            TransactionState.COMPLETE_ABORT,
            producer=self._successor(fresh_producer_id) or self.producer.bumped(),
            predecessor=self.producer,
            start_timestamp_ms=now_ms,
            update_timestamp_ms=now_ms,
            transaction_version=transaction_version,
        )

    def rotated(self, fresh_producer_id: int, *, now_ms: int) -> "TransactionMetadata":
        """Give a fresh id to a producer that was fenced with the last epoch."""
        return self._moved(
            TransactionState.COMPLETE_ABORT,
            producer=ProducerIdAndEpoch(fresh_producer_id, 0),
            update_timestamp_ms=now_ms,
        )

    def completed(self, now_ms: int) -> "TransactionMetadata":
        """Complete the transaction after all markers are written."""
        return self._moved(
            TransactionState.COMPLETE_COMMIT if self.state.is_committed else TransactionState.COMPLETE_ABORT,
            producer=self.client,
            successor=None,
            partitions=frozenset(),
            update_timestamp_ms=now_ms,
        )

    def _successor(self, fresh_producer_id: int | None) -> ProducerIdAndEpoch | None:
        """The producer of the next transaction, if it is not just the next epoch of the current one."""
        if self.client.is_exhausted:
            assert fresh_producer_id is not None, f"{self} needs a producer id"
            return ProducerIdAndEpoch(fresh_producer_id, 0)
        return None if self.successor is None else self.successor.bumped()

    def _moved(self, state: TransactionState, **changes: Any) -> "TransactionMetadata":
        assert state in TRANSACTION_TRANSITIONS[self.state], f"{self} cannot become {state}"
        return self._replace(state=state, **changes)
