"""Exactly once inside a cluster: what a batch publishes, its letters and its positions are one transaction.

What a handler publishes is held back until it has returned, so that a handler which fails halfway leaves nothing.
The group's generation is noted before the batch is handled: whoever lost its partitions meanwhile cannot commit.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from contextvars import ContextVar
from typing import Any, Final, NamedTuple

from penstock.client.app.committing import Note
from penstock.client.app.contracts import HAND_OVER_S, Session
from penstock.client.app.delivery import Delivery
from penstock.client.app.failing import Letter
from penstock.client.app.handling import Call, Chunk
from penstock.client.app.places import Place, Spot, at, place_of, spot_of
from penstock.client.app.publishing import (
    MessageIds,
    NotPublished,
    Published,
    not_published,
    producer,
    with_id,
)
from penstock.client.app.settings import Settings
from penstock.client.errors import ClientError
from penstock.client.letters import Header

__all__ = ["Draft", "ExactlyOnce", "TransactionFailed", "TransactionalPublisher", "drafting", "drafts"]

_LOG: Final = logging.getLogger("penstock.client")
_ROOM_S: Final = 0.01
_END_S: Final = 30.0
#: Where all brokers it knows are away, librdkafka forgets them and finds them again, but waits for ever for what it has
#: forgotten when offsets are sent to a transaction (its issues 5511 and 5456). So it keeps them, and asks them often.
_FAITHFUL: Final = {"metadata.recovery.strategy": "none", "reconnect.backoff.max.ms": 1_000}
#: In the transaction; its offset is known when that is committed.
_IN_TRANSACTION: Final = -1


class Draft(NamedTuple):
    """To be published when the handler has returned."""

    topic: str
    value: bytes | None
    key: bytes | None
    headers: list[Header]
    partition: int | None
    timestamp_ms: int | None


#: What the handler that runs here has published so far; None outside of such handlers.
drafts: ContextVar[list[Draft] | None] = ContextVar("penstock_drafts", default=None)


class TransactionFailed(ClientError):
    """It was given up, and what it had read is read again."""


class OutputRefused(Exception):
    """No broker takes what the handler has published, which is a failure of the handler."""


class Refusals:
    """Messages of which it is known that what their handlers publish is refused: they fail without being handled."""

    def __init__(self) -> None:
        self._found: dict[Spot, NotPublished] = {}

    def note(self, raw: Any, error: NotPublished) -> None:
        self._found[spot_of(raw)] = error

    def check(self, raw: Any) -> None:
        """Raises OutputRefused."""
        if self._found:
            error = self._found.get(spot_of(raw))
            if error is not None:
                raise OutputRefused(str(error)) from error

    def forget(self, batch: Sequence[Any]) -> None:
        for raw in batch if self._found else ():
            self._found.pop(spot_of(raw), None)


class TransactionalPublisher:
    """One transaction after the other. `abort` leaves nothing of what was sent since `begin`."""

    def __init__(self, settings: Settings, name: str) -> None:
        from confluent_kafka import KafkaException

        self._ids = MessageIds()
        self._failures: list[Any] = []
        # A random id: zombies are fenced by the group's generation, and nobody else waits for this one.
        self._producer = producer({**settings, **_FAITHFUL, "transactional.id": f"{name}-{uuid.uuid4()}"})
        try:
            self._producer.init_transactions(_END_S)
        except KafkaException as error:
            raise TransactionFailed(f"no transactions: {error.args[0].str()}") from None

    def begin(self) -> None:
        """Raises TransactionFailed."""
        from confluent_kafka import KafkaException

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
                    headers=with_id(draft.headers, self._ids),
                    on_delivery=self._report,
                    **more,
                )
                return
            except BufferError:
                self._make_room()
            except Exception as error:
                raise not_published(draft.topic, error) from None

    def _make_room(self) -> None:
        """Raises TransactionFailed."""
        from confluent_kafka import KafkaException

        try:
            self._producer.poll(_ROOM_S)
        except KafkaException as error:
            raise TransactionFailed(f"the transaction failed: {error.args[0].str()}") from None

    def _report(self, error: Any, message: Any) -> None:
        if error is not None:
            self._failures.append(not_published(message.topic(), error))

    def commit(self, positions: Mapping[Place, int], group: Any) -> None:
        """Raises TransactionFailed, and then nothing of it is there, or it is there whole (`is_unknown`)."""
        from confluent_kafka import KafkaException

        note = str(Note(Delivery.EXACTLY_ONCE))
        offsets = [at(place, offset, note) for place, offset in sorted(positions.items())]
        try:
            self._producer.send_offsets_to_transaction(offsets, group, _END_S)
            self._producer.flush(_END_S)
            if self._failures:
                raise self._failures[0]
            self._retried(lambda: self._producer.commit_transaction(_END_S))
        except KafkaException as error:
            raise TransactionFailed(f"the transaction failed: {error.args[0].str()}") from None

    def abort(self) -> None:
        """Raises TransactionFailed where this publisher is of no use any more."""
        from confluent_kafka import KafkaException

        try:
            self._retried(lambda: self._producer.abort_transaction(_END_S))
        except KafkaException as error:
            raise TransactionFailed(f"the transaction cannot be ended: {error.args[0].str()}") from None

    def _retried(self, end: Callable[[], None]) -> None:
        """The library says where asking again is safe: the outcome of the first request is then the outcome."""
        from confluent_kafka import KafkaException

        for left in reversed(range(4)):
            try:
                end()
                return
            except KafkaException as error:
                if not error.args[0].retriable() or not left:
                    raise


class drafting:
    """What is published within goes out when it has ended well. No generator: it is entered for every message."""

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


def in_transaction(call: Call, contract: ExactlyOnce) -> Call:
    def handle(raw: Any) -> Any:
        contract.refusals.check(raw)
        with drafting(contract.publish):
            return call(raw)

    return handle


def batches_in_transaction(call: Callable[[Chunk], Any], contract: ExactlyOnce) -> Callable[[Chunk], Any]:
    def handle(pairs: Chunk) -> Any:
        for raw, _ in pairs:
            contract.refusals.check(raw)
        with drafting(contract.publish):
            return call(pairs)

    return handle


def in_transaction_async(call: Call, contract: ExactlyOnce) -> Call:
    async def handle(raw: Any) -> Any:
        contract.refusals.check(raw)
        with drafting(contract.publish):
            return await call(raw)

    return handle


def post_in_transaction(publish: Callable[[Draft], None], letter: Letter) -> Future[Published]:
    publish(
        Draft(letter.topic, letter.value, letter.key, letter.headers, letter.partition, letter.timestamp_ms)
    )
    done: Future[Published] = Future()
    done.set_result(Published(letter.topic, letter.partition, _IN_TRANSACTION))
    return done


class ExactlyOnce:
    """Publishers are made anew when one is of no use any more."""

    def __init__(self, session: Session, make: Callable[[], TransactionalPublisher]) -> None:
        self._session = session
        self._make = make
        self._publisher: TransactionalPublisher | None = None
        self._is_interrupted = False
        #: Of the batch at work: not begun, and put back.
        self._put_back: list[Any] = []
        self.refusals = Refusals()
        self._is_spent = False
        #: So many messages go one by one, until it is known which of them is refused.
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
        """Whether it was committed; if not, it is read again."""
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
            session.letterbox.settle()
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
            # Else it would stay open, and hold readers back until it times out.
            with suppress(ClientError):
                publisher.abort()
            raise

    def _refused(self, batch: Sequence[Any], error: NotPublished) -> None:
        """One of them is to blame. The library cannot go on with a partition of which a batch was refused."""
        self._is_spent = True
        if len(batch) == 1:
            self.refusals.note(batch[0], error)
        else:
            self._singly = len(batch)

    def _positions(self, batch: Sequence[Any]) -> dict[Place, int]:
        """Of every partition of which something was handled; if one has gone, nothing of it is to be seen."""
        membership, left = self._session.membership, self._session.runner.pending()
        with membership.held():
            reached = membership.positions(left)
            untouched = {id(raw) for raw in (*self._put_back, *left)}
            is_interrupted = self._is_interrupted
        ends = {place_of(raw): raw.offset() for raw in batch if id(raw) not in untouched}
        if is_interrupted or any(reached.get(place, -1) <= last for place, last in ends.items()):
            raise TransactionFailed("partitions went to another member in the middle of a batch")
        return {place: reached[place] for place in ends}

    def _give_up(self, publisher: TransactionalPublisher, batch: Sequence[Any], error: ClientError) -> None:
        session = self._session
        _LOG.warning("%s; its messages are read again", error)
        session.figures.restarts += 1
        session.runner.forget()
        try:
            publisher.abort()
        except ClientError:
            self._publisher = None
            # Whether it was committed is for the group to tell: as a new member we begin where it says.
            session.membership.rejoin()
            return
        if self._is_spent:
            self._publisher, self._is_spent = None, False
        self._rewind(batch)

    def _rewind(self, batch: Sequence[Any]) -> None:
        first: dict[Place, int] = {}
        for raw in batch:
            first.setdefault(place_of(raw), raw.offset())
        self._session.membership.rewind(first)

    def tick(self) -> None:
        pass

    def stop(self) -> None:
        """What is in hand is finished and committed."""
        with self._session.membership.held():
            self._return(self._session.runner.trim())

    def _return(self, rest: list[Any]) -> None:
        self._put_back += rest
        self._session.membership.put_back(rest)

    def finish(self) -> None:
        pass

    def assigned(self, places: Sequence[Place]) -> Mapping[Place, int]:
        return {}

    def revoked(self, places: Sequence[Place]) -> None:
        rest, in_hand = self._session.runner.interrupt(HAND_OVER_S, places)
        self._return(rest)
        if in_hand:
            self._is_interrupted = True

    def lost(self, places: Sequence[Place]) -> None:
        rest, _ = self._session.runner.interrupt(0.0)
        self._return(rest)
        self._is_interrupted = True
