"""Exactly-once, in a Kafka transaction or in a transaction of the user's database.

Inside a cluster, the messages that a batch publishes, its failure records and its offsets are one Kafka transaction. A
handler's messages are held back until the handler returns, so that a handler which fails halfway publishes nothing. The
contract reads the group's generation before it handles the batch: a member that lost its partitions meanwhile cannot
commit.

With a ledger, a message's result and its position are one transaction of the database. A member reads the positions
from the ledger when partitions are assigned, and moves them by compare-and-set under an epoch that every new owner
raises: a member that does not know yet that it lost a partition changes nothing. The group's committed offsets follow
later, for tools that show lag.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from contextvars import ContextVar
from typing import Any, Final

from confluent_kafka import KafkaException

from penstock.client.app.contracts import REBALANCE_WAIT_S, AtLeastOnce, ContractSession, HandledIds
from penstock.client.app.failures import FailureRecord
from penstock.client.app.figures import Figures
from penstock.client.app.handler import NOT_HANDLED, DecodedMessages, HandlerCall, database_handle
from penstock.client.app.librdkafka import Settings
from penstock.client.app.membership import CommitMetadata
from penstock.client.app.message import (
    RecordId,
    TopicPartition,
    confluent_partition,
    record_id_of,
    topic_partition_of,
)
from penstock.client.app.publisher import (
    Draft,
    MessageIds,
    Published,
    make_producer,
    not_published_error,
    with_message_id,
)
from penstock.client.app.subscription import Delivery
from penstock.client.deadletters.headers import read_origin, retry_level
from penstock.client.errors import ClientError, NotPublished
from penstock.client.ledgers import Ledger, LedgerFenced, Position

__all__ = (
    "Draft",
    "ExactlyOnce",
    "ExactlyOnceWithLedger",
    "HeldDrafts",
    "LedgerPositions",
    "TransactionFailed",
    "TransactionalPublisher",
    "drafts",
    "handle_in_ledger",
)


_LOG: Final = logging.getLogger("penstock.client")
_QUEUE_FULL_WAIT_S: Final = 0.01
_TRANSACTION_CALL_S: Final = 30.0
#: When all known brokers are unreachable, librdkafka by default discards them and bootstraps again. Sending offsets to
#: a transaction then waits forever for a discarded broker (its issues 5511 and 5456). So keep the brokers, and
#: reconnect often.
_KEEP_BROKERS_SETTINGS: Final = {"metadata.recovery.strategy": "none", "reconnect.backoff.max.ms": 1_000}
#: Of a message in an open transaction.
_UNKNOWN_OFFSET: Final = -1


#: The messages that the running handler has published so far; None outside of exactly-once handlers.
drafts: ContextVar[list[Draft] | None] = ContextVar("penstock_drafts", default=None)


class TransactionFailed(ClientError):
    """A transaction was abandoned; its messages are read again."""


class OutputRefused(Exception):
    """The brokers refuse a message that the handler has published; this counts as a failure of the handler."""


class RefusedOutputs:
    """Messages whose handlers publish something that brokers refuse: they fail without calling the handler again."""

    def __init__(self) -> None:
        self._found: dict[RecordId, NotPublished] = {}

    def note(self, raw: Any, error: NotPublished) -> None:
        self._found[record_id_of(raw)] = error

    def check(self, raw: Any) -> None:
        """Raises OutputRefused."""
        if self._found:
            error = self._found.get(record_id_of(raw))
            if error is not None:
                raise OutputRefused(str(error)) from error

    def forget(self, batch: Sequence[Any]) -> None:
        for raw in batch if self._found else ():
            self._found.pop(record_id_of(raw), None)


class TransactionalPublisher:
    """A transactional producer: one transaction after the other. `abort` discards all messages since `begin`."""

    def __init__(self, settings: Settings, name: str) -> None:
        self._ids = MessageIds()
        self._failures: list[Any] = []
        # A random id is enough: the group's generation fences zombies, and no other producer takes over this id.
        self._producer = make_producer(
            {**settings, **_KEEP_BROKERS_SETTINGS, "transactional.id": f"{name}-{uuid.uuid4()}"}
        )
        try:
            self._producer.init_transactions(_TRANSACTION_CALL_S)
        except KafkaException as error:
            raise TransactionFailed(f"no transactions: {error.args[0].str()}") from None

    def begin(self) -> None:
        """Raises TransactionFailed."""
        self._failures.clear()
        try:
            self._producer.begin_transaction()
        except KafkaException as error:
            raise TransactionFailed(f"no transaction can be begun: {error.args[0].str()}") from None

    def send(self, draft: Draft) -> None:
        """Raises TransactionFailed."""
        more: dict[str, Any] = {}
        if draft.partition is not None:
            more["partition"] = draft.partition
        if draft.timestamp_ms is not None:
            more["timestamp"] = draft.timestamp_ms
        while True:
            try:
                self._producer.produce(
                    draft.topic,
                    draft.value,
                    draft.key,
                    headers=with_message_id(draft.headers, self._ids),
                    on_delivery=self._report,
                    **more,
                )
                return
            except BufferError:
                self._make_room()
            except Exception as error:
                raise not_published_error(draft.topic, error) from None

    def _make_room(self) -> None:
        """Raises TransactionFailed."""
        try:
            self._producer.poll(_QUEUE_FULL_WAIT_S)
        except KafkaException as error:
            raise TransactionFailed(f"the transaction failed: {error.args[0].str()}") from None

    def _report(self, error: Any, message: Any) -> None:
        if error is not None:
            self._failures.append(not_published_error(message.topic(), error))

    def commit(self, positions: Mapping[TopicPartition, int], group: Any) -> None:
        """Commits messages and positions together. Raises NotPublished or TransactionFailed.

        After TransactionFailed the transaction may have been committed, but only as a whole.
        """
        note = str(CommitMetadata(Delivery.EXACTLY_ONCE))
        offsets = [
            confluent_partition(topic_partition, offset, note)
            for topic_partition, offset in sorted(positions.items())
        ]
        try:
            self._producer.send_offsets_to_transaction(offsets, group, _TRANSACTION_CALL_S)
            self._producer.flush(_TRANSACTION_CALL_S)
            if self._failures:
                raise self._failures[0]
            self._retried(lambda: self._producer.commit_transaction(_TRANSACTION_CALL_S))
        except KafkaException as error:
            raise TransactionFailed(f"the transaction failed: {error.args[0].str()}") from None

    def abort(self) -> None:
        """Raises TransactionFailed if this publisher cannot be used any more."""
        try:
            self._retried(lambda: self._producer.abort_transaction(_TRANSACTION_CALL_S))
        except KafkaException as error:
            raise TransactionFailed(f"the transaction cannot be ended: {error.args[0].str()}") from None

    def _retried(self, end: Callable[[], None]) -> None:
        """Calls `end` again where librdkafka marks the error as retriable: it then reports the first call's outcome."""
        for left in reversed(range(4)):
            try:
                end()
                return
            except KafkaException as error:
                if not error.args[0].retriable() or not left:
                    raise


class HeldDrafts:
    """Holds back the messages that the block publishes, and sends them if it ends without an exception.

    A class and not a generator, because every message enters it and a class is faster.
    """

    __slots__ = ("_held", "_publish", "_token")

    def __init__(self, publish: Callable[[Draft], None]) -> None:
        self._publish = publish
        self._held: list[Draft] = []

    def __enter__(self) -> None:
        self._token = drafts.set(self._held)

    def __exit__(self, kind: type[BaseException] | None, *more: object) -> None:
        drafts.reset(self._token)
        if kind is None:
            for draft in self._held:
                self._publish(draft)


def handle_in_transaction(call: HandlerCall, contract: ExactlyOnce) -> HandlerCall:
    def handle(raw: Any) -> Any:
        contract.refusals.check(raw)
        with HeldDrafts(contract.publish):
            return call(raw)

    return handle


def handle_batch_in_transaction(
    call: Callable[[DecodedMessages], Any], contract: ExactlyOnce
) -> Callable[[DecodedMessages], Any]:
    def handle(pairs: DecodedMessages) -> Any:
        for raw, _ in pairs:
            contract.refusals.check(raw)
        with HeldDrafts(contract.publish):
            return call(pairs)

    return handle


def handle_in_transaction_async(call: HandlerCall, contract: ExactlyOnce) -> HandlerCall:
    async def handle(raw: Any) -> Any:
        contract.refusals.check(raw)
        with HeldDrafts(contract.publish):
            return await call(raw)

    return handle


def send_in_transaction(publish: Callable[[Draft], None], record: FailureRecord) -> Future[Published]:
    publish(record.draft())
    done: Future[Published] = Future()
    done.set_result(Published(record.topic, record.partition, _UNKNOWN_OFFSET))
    return done


class ExactlyOnce:
    """Handles each batch in one Kafka transaction. Makes a new publisher when the old one cannot be used any more."""

    def __init__(self, session: ContractSession, make: Callable[[], TransactionalPublisher]) -> None:
        self._session = session
        self._make = make
        self._publisher: TransactionalPublisher | None = None
        self._is_interrupted = False
        #: Messages of the current batch that were put back before they were begun.
        self._put_back: list[Any] = []
        self.refusals = RefusedOutputs()
        self._is_spent = False
        #: How many messages still go in a transaction of their own, to find out whose output brokers refuse.
        self._singly = 0

    def publish(self, draft: Draft) -> None:
        assert self._publisher is not None, "published outside of a transaction"
        self._publisher.send(draft)

    def process(self, batch: Sequence[Any]) -> None:
        if not self._singly:
            self._process(batch)
            return
        for number, raw in enumerate(batch):
            self._singly = max(self._singly - 1, 0)
            if not self._process([raw]):
                self._rewind(batch[number:])
                return

    def _process(self, batch: Sequence[Any]) -> bool:
        """Returns whether the batch was committed; if not, its messages are read again."""
        session = self._session
        if not batch:
            return True
        with session.membership.held():
            self._is_interrupted, self._put_back = False, []
        group = session.membership.metadata()
        publisher = self._publisher = self._publisher or self._make()
        try:
            publisher.begin()
            session.runner.run(batch)
            session.runner.drain()
            session.failure_publisher.settle()
            publisher.commit(self._positions(batch), group)
            self.refusals.forget(batch)
            return True
        except NotPublished as error:
            if not error.may_be_there:
                self._refused(batch, error)
            self._give_up(publisher, batch, error)
            return False
        except ClientError as error:
            self._give_up(publisher, batch, error)
            return False
        except BaseException:
            # An open transaction would hold the last stable offset back until it times out.
            with suppress(ClientError):
                publisher.abort()
            raise

    def _refused(self, batch: Sequence[Any], error: NotPublished) -> None:
        """Finds out whose output was refused. Marks the publisher as spent, because librdkafka cannot go on with it.

        After a broker has refused a batch, librdkafka cannot produce to that partition any more.
        """
        self._is_spent = True
        if len(batch) == 1:
            self.refusals.note(batch[0], error)
        else:
            self._singly = len(batch)

    def _positions(self, batch: Sequence[Any]) -> dict[TopicPartition, int]:
        """Returns the positions of all partitions with handled messages.

        Raises TransactionFailed if one of these partitions was revoked: then nothing of the batch may be committed.
        """
        membership, left = self._session.membership, self._session.runner.pending()
        with membership.held():
            reached = membership.positions(left)
            untouched = {id(raw) for raw in (*self._put_back, *left)}
            is_interrupted = self._is_interrupted
        ends = {topic_partition_of(raw): raw.offset() for raw in batch if id(raw) not in untouched}
        if is_interrupted or any(
            reached.get(topic_partition, -1) <= last for topic_partition, last in ends.items()
        ):
            raise TransactionFailed("partitions went to another member in the middle of a batch")
        return {topic_partition: reached[topic_partition] for topic_partition in ends}

    def _give_up(self, publisher: TransactionalPublisher, batch: Sequence[Any], error: ClientError) -> None:
        session = self._session
        _LOG.warning("%s; its messages are read again", error)
        session.figures.restarts += 1
        session.runner.forget()
        try:
            publisher.abort()
        except ClientError:
            self._publisher = None
            # It is not known whether the transaction was committed: a new member starts at the group's offsets.
            session.membership.rejoin()
            return
        if self._is_spent:
            self._publisher, self._is_spent = None, False
        self._rewind(batch)

    def _rewind(self, batch: Sequence[Any]) -> None:
        first: dict[TopicPartition, int] = {}
        for raw in batch:
            first.setdefault(topic_partition_of(raw), raw.offset())
        self._session.membership.rewind(first)

    def tick(self) -> None:
        pass

    def stop(self) -> None:
        """Puts back messages that were not started; messages in progress are finished and committed."""
        with self._session.membership.held():
            self._return(self._session.runner.trim())

    def _return(self, remaining: list[Any]) -> None:
        self._put_back += remaining
        self._session.membership.put_back(remaining)

    def finish(self) -> None:
        pass

    def assigned(self, topic_partitions: Sequence[TopicPartition]) -> Mapping[TopicPartition, int]:
        return {}

    def revoked(self, topic_partitions: Sequence[TopicPartition]) -> None:
        remaining, in_progress = self._session.runner.interrupt(REBALANCE_WAIT_S, topic_partitions)
        self._return(remaining)
        if in_progress:
            self._is_interrupted = True

    def lost(self, topic_partitions: Sequence[TopicPartition]) -> None:
        remaining, _ = self._session.runner.interrupt(0.0)
        self._return(remaining)
        self._is_interrupted = True


class LedgerPositions:
    """The ledger's positions of the partitions that are assigned to this member."""

    def __init__(self, ledger: Ledger, group: str, owner: str) -> None:
        self.ledger = ledger
        self.group = group
        self._owner = owner
        self._positions: dict[TopicPartition, Position] = {}
        #: Partitions whose position has not moved since this member took them over.
        self._fresh: set[TopicPartition] = set()

    def take(self, topic_partitions: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        taken = self.ledger.take(self.group, topic_partitions, self._owner)
        self._positions.update(taken)
        self._fresh.update(topic_partitions)
        return {topic_partition: at.offset for topic_partition, at in taken.items() if at.offset is not None}

    def forget(self, topic_partitions: Sequence[TopicPartition]) -> None:
        for topic_partition in topic_partitions:
            self._positions.pop(topic_partition, None)

    def may_be_duplicate(self, topic_partition: TopicPartition) -> bool:
        """Whether the next message of the partition may exist twice.

        The previous owner may have published a failure record for its next message, and died before it moved the
        position. So the first message after a takeover may be in a retry topic too, and any message of a retry topic
        may be a second copy.
        """
        return topic_partition in self._fresh or retry_level(topic_partition[0]) is not None

    def is_past(self, topic_partition: TopicPartition, offset: int) -> bool:
        """Whether the ledger's position is past this message already."""
        known = self._positions.get(topic_partition)
        return known is not None and known.offset is not None and offset < known.offset

    def advance(self, transaction: Any, topic_partition: TopicPartition, offset: int) -> None:
        """Moves the position past this message, as part of the transaction. Raises LedgerFenced."""
        known = self._positions.get(topic_partition)
        if known is None:
            raise LedgerFenced(f"{topic_partition[0]}[{topic_partition[1]}] belongs to another member")
        transaction.advance(self.group, topic_partition, known.offset, offset + 1, known.epoch)

    def advanced(self, topic_partition: TopicPartition, offset: int) -> None:
        """Records that the transaction was committed; the partition may have been revoked since."""
        known = self._positions.get(topic_partition)
        if known is not None:
            self._positions[topic_partition] = known._replace(offset=offset + 1)
        self._fresh.discard(topic_partition)


def handle_in_ledger(
    call: HandlerCall,
    positions: LedgerPositions,
    handle_name: str,
    marks: HandledIds | None,
    figures: Figures,
) -> HandlerCall:
    """Wraps `call` so that the handler's writes through its connection and the position are one transaction.

    With retries, `marks` in the same transaction recognise messages that may exist twice.
    """

    def is_new(transaction: Any, raw: Any, topic_partition: TopicPartition) -> bool:
        if marks is None or not positions.may_be_duplicate(topic_partition):
            return True
        return marks.claim(marks.store.joined(transaction.connection), _origin_id(raw))

    def handle(raw: Any) -> Any:
        topic_partition, offset = topic_partition_of(raw), raw.offset()
        if positions.is_past(topic_partition, offset):
            return NOT_HANDLED
        result: Any = NOT_HANDLED
        with positions.ledger.transaction() as transaction:
            if is_new(transaction, raw, topic_partition):
                with database_handle(handle_name, transaction.connection) as given:
                    result = call(raw, **{handle_name: given})
            else:
                figures.add("duplicates")
            positions.advance(transaction, topic_partition, offset)
        positions.advanced(topic_partition, offset)
        return result

    return handle


def _origin_id(raw: Any) -> str:
    origin = read_origin(
        raw.headers(), topic=raw.topic(), partition=raw.partition(), offset=raw.offset(), timestamp_ms=0
    )
    return f"{origin.topic}:{origin.partition}:{origin.offset}"


class ExactlyOnceWithLedger(AtLeastOnce):
    def __init__(
        self,
        session: ContractSession,
        commit_every_s: float,
        positions: LedgerPositions,
        marks: HandledIds | None,
    ) -> None:
        super().__init__(session, commit_every_s)
        self._positions = positions
        self._marks = marks
        self._fenced = False

    def failed(self, raw: Any, error: Exception) -> None:
        """Publishes a failure record, then moves the position. A fenced member does neither.

        A member that dies in between leaves a failure record of a message that is handled again. Marks keep one of its
        results, but there may be two dead letters.
        """
        if isinstance(error, LedgerFenced):
            self._fenced = True
            return
        topic_partition = topic_partition_of(raw)
        if self._fenced or topic_partition not in self._session.membership.topic_partitions:
            return
        self._session.failure_publisher.failed(raw, error)
        self._session.failure_publisher.settle()
        try:
            with self._positions.ledger.transaction() as transaction:
                self._positions.advance(transaction, topic_partition, raw.offset())
            self._positions.advanced(topic_partition, raw.offset())
        except LedgerFenced:
            self._fenced = True

    def process(self, batch: Sequence[Any]) -> None:
        self._session.runner.run(batch, self._arrived)
        if not self._fenced:
            self.tick()
        else:
            _LOG.warning("another member has taken partitions over; joining again")
            self._fenced = False
            self._session.figures.restarts += 1
            self._session.membership.rejoin()

    def tick(self) -> None:
        super().tick()
        if self._marks is not None:
            self._marks.expire_periodically()

    def assigned(self, topic_partitions: Sequence[TopicPartition]) -> Mapping[TopicPartition, int]:
        return self._positions.take(topic_partitions)

    def revoked(self, topic_partitions: Sequence[TopicPartition]) -> None:
        super().revoked(topic_partitions)
        self._positions.forget(topic_partitions)

    def lost(self, topic_partitions: Sequence[TopicPartition]) -> None:
        super().lost(topic_partitions)
        self._positions.forget(topic_partitions)
