"""A transactional id as it is stored, and each step that it can take.

Three producers meet in it. `producer` is the one whose id and epoch the records of the transaction have, and its
markers. `successor` is there while the next transaction will be someone else's: of a new producer id because epochs
have run out, or of a new incarnation that took over a prepared transaction (KIP-939). `predecessor` is whoever the
present producer came from: what it repeats, because it never saw the answer, is answered again and not done again.
"""

from typing import Any, Final, NamedTuple

from penstock.transactions.messages import (
    EPOCH_PER_TRANSACTION,
    NO_PRODUCER_EPOCH,
    NO_PRODUCER_ID,
    TopicPartition,
)
from penstock.transactions.states import TRANSITIONS, State

#: The last epoch that a producer is given; the one above it is kept to fence it with.
CLIENT_EPOCH_MAX: Final = 32_766
#: A transaction with this timeout is one participant of several in a two-phase commit and never times out.
TWO_PHASE_TIMEOUT_MS: Final = 2**31 - 1


class Producer(NamedTuple):
    id: int = NO_PRODUCER_ID
    epoch: int = NO_PRODUCER_EPOCH

    @property
    def is_exhausted(self) -> bool:
        return self.epoch >= CLIENT_EPOCH_MAX

    def bumped(self) -> "Producer":
        assert self.epoch <= CLIENT_EPOCH_MAX, f"no epoch is left for {self}"
        return Producer(self.id, self.epoch + 1)


NO_PRODUCER: Final = Producer()


class Transaction(NamedTuple):
    transactional_id: str
    state: State
    producer: Producer
    timeout_ms: int
    update_timestamp_ms: int
    start_timestamp_ms: int = -1
    successor: Producer | None = None
    predecessor: Producer = NO_PRODUCER
    partitions: frozenset[TopicPartition] = frozenset()
    #: Of the protocol that the last step was taken with.
    transaction_version: int = 0

    @property
    def client(self) -> Producer:
        """Who may go on with this id."""
        return self.successor or self.producer

    @property
    def is_two_phase(self) -> bool:
        return self.timeout_ms == TWO_PHASE_TIMEOUT_MS

    @property
    def is_kept(self) -> bool:
        """Open, and taken over by an incarnation that may decide about it but add nothing to it."""
        return self.state is State.ONGOING and self.successor is not None

    # Steps

    def taken_over(
        self, producer: Producer, *, predecessor: Producer, timeout_ms: int, now_ms: int
    ) -> "Transaction":
        """A producer begins anew with this id, at rest."""
        return self._moved(
            State.EMPTY,
            producer=producer,
            predecessor=predecessor,
            timeout_ms=timeout_ms,
            start_timestamp_ms=-1,
            update_timestamp_ms=now_ms,
        )

    def kept(
        self, successor: Producer, *, predecessor: Producer, timeout_ms: int, now_ms: int
    ) -> "Transaction":
        """A new incarnation takes the open transaction over, to decide about it."""
        return self._moved(
            State.ONGOING,
            successor=successor,
            predecessor=predecessor,
            # It was promised that time would not decide; a successor that knows of no second phase cannot undo that.
            timeout_ms=self.timeout_ms if self.is_two_phase else timeout_ms,
            update_timestamp_ms=now_ms,
        )

    def extended(
        self, partitions: frozenset[TopicPartition], *, transaction_version: int, now_ms: int
    ) -> "Transaction":
        assert self.successor is None, f"{self} is not open to {partitions}"
        return self._moved(
            State.ONGOING,
            partitions=self.partitions | partitions,
            # Who uses what it was given has seen the answer: whatever its predecessor sends now is late.
            predecessor=Producer(self.predecessor.id),
            start_timestamp_ms=self.start_timestamp_ms if self.state is State.ONGOING else now_ms,
            update_timestamp_ms=now_ms,
            transaction_version=transaction_version,
        )

    def decided(
        self, *, commit: bool, transaction_version: int, now_ms: int, fresh_producer_id: int | None
    ) -> "Transaction":
        """Its producer ends it; with an epoch per transaction the next one has another, perhaps of a fresh id."""
        step = self._moved(
            State.PREPARE_COMMIT if commit else State.PREPARE_ABORT,
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

    def fenced(self, *, transaction_version: int, now_ms: int) -> "Transaction":
        """Abort it above the head of its producer, whose epoch is then too old; the cluster's version counts here.

        The last epoch is for this. Should it be used up the id is too, and the next to ask is given a fresh one.
        """
        may_recover = transaction_version >= EPOCH_PER_TRANSACTION
        return self._moved(
            State.PREPARE_ABORT,
            producer=self.producer.bumped(),
            successor=None if self.successor is None else self.successor.bumped(),
            predecessor=self.client if may_recover else NO_PRODUCER,
            update_timestamp_ms=now_ms,
            transaction_version=transaction_version,
        )

    def aborted_empty(
        self, *, transaction_version: int, now_ms: int, fresh_producer_id: int | None
    ) -> "Transaction":
        """The end of a transaction that nothing was added to: there are no markers, only the next epoch."""
        assert transaction_version >= EPOCH_PER_TRANSACTION
        assert self.successor is None
        return self._moved(
            State.COMPLETE_ABORT,
            producer=self._successor(fresh_producer_id) or self.producer.bumped(),
            predecessor=self.producer,
            start_timestamp_ms=now_ms,
            update_timestamp_ms=now_ms,
            transaction_version=transaction_version,
        )

    def rotated(self, fresh_producer_id: int, *, now_ms: int) -> "Transaction":
        """Its producer was fenced with the last epoch of all, and may go on with a fresh id."""
        return self._moved(
            State.COMPLETE_ABORT, producer=Producer(fresh_producer_id, 0), update_timestamp_ms=now_ms
        )

    def completed(self, now_ms: int) -> "Transaction":
        """All markers are written."""
        return self._moved(
            State.COMPLETE_COMMIT if self.state.is_committed else State.COMPLETE_ABORT,
            producer=self.client,
            successor=None,
            partitions=frozenset(),
            update_timestamp_ms=now_ms,
        )

    def _successor(self, fresh_producer_id: int | None) -> Producer | None:
        """Who has the next transaction, if that is not simply the next epoch of this one's producer."""
        if self.client.is_exhausted:
            assert fresh_producer_id is not None, f"{self} needs a producer id"
            return Producer(fresh_producer_id, 0)
        return None if self.successor is None else self.successor.bumped()

    def _moved(self, state: State, **changes: Any) -> "Transaction":
        assert state in TRANSITIONS[self.state], f"{self} cannot become {state}"
        return self._replace(state=state, **changes)
