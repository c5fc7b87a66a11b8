"""Batches of rows in Kafka transactions: all of a batch and its marker, or nothing.

What the broker refuses for good is told apart from what may pass. A refusal concerns all messages that the library put
into one request for a partition; which of them it is meant for shows only when they are sent one by one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from penstock.client.outbox.errors import Disturbed, RowsRefused
from penstock.client.outbox.kafka import CALL_S, Settings, passing, producer_of, words
from penstock.client.outbox.rows import Row, row_headers, topic_flaw

__all__ = ["Sender"]

_FULL_REST_S: Final = 0.05
_FLUSH_S: Final = 0.1
#: A topic that was just made is known to every broker within this time.
_UNKNOWN_TOPIC_S: Final = 5.0
_UNKNOWN_REST_S: Final = 0.1
_INIT_S: Final = 30.0


class Sender:
    """One transactional producer at a time, under one transactional id. Making it fences whoever had the id before."""

    def __init__(
        self, settings: Settings, transactional_id: str, topic: str, stopping: threading.Event
    ) -> None:
        """`topic` is that of the markers."""
        self._settings = settings
        self.transactional_id = transactional_id
        self._topic = topic
        self._stopping = stopping
        self._producer: Any = None
        self._partitions: dict[str, int] = {}
        self._failures: list[Any] = []

    def open(self) -> None:
        """When it returns, what was under way under this id is over. Raises Disturbed, OutboxError."""
        self.close()
        self._producer = producer_of(self._settings, self.transactional_id)
        deadline = time.monotonic() + _INIT_S

        def init(timeout_s: float) -> None:
            if time.monotonic() > deadline:
                raise Disturbed(f"no broker has let {self.transactional_id} begin within {_INIT_S:g} s")
            self._producer.init_transactions(timeout_s)

        passing(init, "beginning", self._stopping)

    def close(self) -> None:
        """What is open is left to whoever opens this id next."""
        self._producer = None
        self._partitions.clear()

    def send(self, rows: Sequence[Row], markers: Mapping[bytes, bytes | None]) -> None:
        """The rows and their markers by key are on their way, in a transaction that is ready to be committed.

        Raises RowsRefused once the transaction is aborted, Disturbed where beginning anew has to settle it.
        """
        self._check_places(rows)
        self._failures = []
        passing(lambda _: self._producer.begin_transaction(), "beginning a transaction", self._stopping)
        try:
            for row in rows:
                self._produce_row(row)
            for key, marker in markers.items():
                self._produce(self._topic, marker, key)
            self._await_reports()
        except RowsRefused:
            self._abort()
            raise

    def commit(self) -> None:
        """Raises RowsRefused as `send` does, and Disturbed where nobody knows: the marker will tell."""
        try:
            passing(self._producer.commit_transaction, "committing", self._stopping)
        except Disturbed as error:
            if error.cause is None or not error.cause.txn_requires_abort():
                raise
            refusals = [each for each, _ in self._failures if is_refusal(each)]
            if not refusals and not is_refusal(error.cause):
                raise
            self._abort()
            raise RowsRefused(words(refusals[0] if refusals else error.cause)) from None

    def _abort(self) -> None:
        passing(self._producer.abort_transaction, "aborting", self._stopping)
        # After a refusal the library goes on with a sequence that the broker has never seen.
        self.open()

    def _produce_row(self, row: Row) -> None:
        from confluent_kafka import KafkaException

        try:
            place = {} if row.partition is None else {"partition": row.partition}
            self._produce(row.topic, row.value, row.key, headers=row_headers(row), **place)
        except (KafkaException, ValueError, TypeError) as error:
            reason = words(error)
            if isinstance(error, KafkaException) and not is_refusal(error.args[0]):
                raise Disturbed(f"{row.topic}: {reason}") from None
            raise RowsRefused(reason, {row.id: reason}) from None

    def _produce(self, topic: str, value: bytes | None, key: bytes | None, **more: Any) -> None:
        while True:
            try:
                self._producer.produce(topic, value, key, on_delivery=self._report, **more)
                return
            except BufferError:
                self._heard(self._producer.poll, _FULL_REST_S)

    def _heard(self, call: Callable[[float], Any], timeout_s: float) -> Any:
        """Raises Disturbed for what the library cannot get over: another relay has taken our place, most likely."""
        from confluent_kafka import KafkaException

        try:
            return call(timeout_s)
        except KafkaException as error:
            raise Disturbed(words(error), cause=error.args[0]) from None

    def _report(self, error: Any, message: Any) -> None:
        if error is not None:
            self._failures.append((error, message.topic()))

    def _await_reports(self) -> None:
        """For a while: `commit` waits for the rest. After a failure the others stay where they are."""
        deadline = time.monotonic() + CALL_S
        while (
            self._heard(self._producer.flush, _FLUSH_S) and not self._failures and time.monotonic() < deadline
        ):
            pass
        for error, topic in self._failures:
            if is_refusal(error):
                raise RowsRefused(f"{topic}: {error.str()}")
        for error, topic in self._failures:
            raise Disturbed(f"{topic}: {error.str()}", cause=error)

    # Topics and partitions are looked at first: the library takes long to say that there is no such topic.

    def _check_places(self, rows: Sequence[Row]) -> None:
        missing = {row.topic for row in rows if row.topic not in self._partitions}
        flaws = {topic: flaw for topic in sorted(missing) if (flaw := self._look_up(topic))}
        for row in rows:
            if row.partition is not None and row.partition >= self._partitions.get(row.topic, 1 << 31):
                self._look_up(row.topic)  # it may have grown
        if culprits := {row.id: flaw for row in rows if (flaw := self._flaw(row, flaws))}:
            raise RowsRefused("; ".join(sorted(set(culprits.values()))), culprits)

    def _flaw(self, row: Row, flaws: dict[str, str]) -> str | None:
        if row.topic in flaws:
            return flaws[row.topic]
        if row.partition is not None and not 0 <= row.partition < self._partitions[row.topic]:
            return f"{row.topic} has no partition {row.partition}"
        return None

    def _look_up(self, topic: str) -> str | None:
        """How many partitions it has, or why it cannot be written to."""
        if (flaw := topic_flaw(topic)) is not None:
            return flaw
        deadline = time.monotonic() + _UNKNOWN_TOPIC_S
        while True:
            found = self._metadata(topic)
            if found.error is None and found.partitions:
                self._partitions[topic] = len(found.partitions)
                return None
            if found.error is not None and not _may_appear(found.error):
                return f"{topic}: {found.error.str()}"
            if time.monotonic() > deadline or self._stopping.wait(_UNKNOWN_REST_S):
                break
        if self._stopping.is_set():
            raise Disturbed(f"{topic} is not known yet, and it is time to stop")
        return f"there is no topic {topic}"

    def _metadata(self, topic: str) -> Any:
        """Where the broker makes topics that it is asked for, this makes it."""
        from confluent_kafka import KafkaException

        try:
            return self._producer.list_topics(topic, timeout=CALL_S).topics[topic]
        except KafkaException as error:
            raise Disturbed(f"{topic}: {words(error)}") from None


def is_refusal(error: Any) -> bool:
    """Sending it again does not help: the message, its topic or our rights have to change."""
    from confluent_kafka import KafkaError

    return error.code() in (
        KafkaError.MSG_SIZE_TOO_LARGE,
        KafkaError.RECORD_LIST_TOO_LARGE,
        KafkaError.INVALID_RECORD,
        KafkaError.INVALID_TIMESTAMP,
        KafkaError.TOPIC_EXCEPTION,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.POLICY_VIOLATION,
        KafkaError.UNSUPPORTED_FOR_MESSAGE_FORMAT,
        KafkaError._INVALID_ARG,
    )


def _may_appear(error: Any) -> bool:
    from confluent_kafka import KafkaError

    return error.code() in (
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError._UNKNOWN_TOPIC,
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError._WAIT_CACHE,
    )
