"""The delivery contracts: in which order a member handles a batch and commits its offsets.

at-least-once     handle, publish failure records, commit
at-most-once      commit, wait for the confirmation, handle
effectively-once  skip ids that are marked, handle, mark, commit; or result and mark in one database transaction

Effectively-once recognises a redelivered message by its id. If the handler takes a database connection, its result and
the mark are one transaction, and nothing is processed twice. If it does not, the mark follows the result: after a
crash, messages that were handled and not yet marked are handled again. `penstock.client.app.exactly_once` has the
fourth contract.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, Protocol

from penstock.client.app.failures import FailurePublisher
from penstock.client.app.figures import Figures
from penstock.client.app.handler import NOT_HANDLED, HandlerCall, database_handle
from penstock.client.app.librdkafka import ApplicationError
from penstock.client.app.membership import CommitLost, CommitRefused, Membership
from penstock.client.app.message import TopicPartition, message_id_of, topic_partition_of
from penstock.client.app.runners import Runner
from penstock.client.deadletters.headers import read_origin
from penstock.client.errors import ClientError
from penstock.client.stores import DedupeStore, StoreError, StoreUnavailable, TransactionSpoiled

__all__ = (
    "AtLeastOnce",
    "AtMostOnce",
    "Contract",
    "ContractSession",
    "EffectivelyOnce",
    "HandledIds",
    "claim_in_transaction",
    "commit_before_handling",
    "mark_after_handling",
    "raise_if_outage",
    "report_unfinished",
)


_LOG: Final = logging.getLogger("penstock.client")
#: How long a rebalance waits for messages in progress.
REBALANCE_WAIT_S: Final = 30.0
_CHUNK_MAX: Final = 1 << 20


class ContractSession:
    """The parts that a contract works with while its subscription is a member of the group."""

    __slots__ = ("failure_publisher", "figures", "membership", "runner")

    def __init__(self, runner: Runner, failure_publisher: FailurePublisher, figures: Figures) -> None:
        self.membership: Membership = None  # type: ignore[assignment]  # set when the contract exists
        self.runner = runner
        self.failure_publisher = failure_publisher
        self.figures = figures


class Contract(Protocol):
    """Decides when to handle and when to commit. The thread that polls messages calls it.

    The rebalance callbacks (`assigned`, `revoked`, `lost`) also run in the background poller.
    """

    def process(self, batch: Sequence[Any]) -> None: ...

    def tick(self) -> None:
        """Called between batches, and when no messages arrive."""

    def stop(self) -> None:
        """Called by another thread: starts no further messages, unless the contract requires it."""

    def finish(self) -> None:
        """Called before the member leaves: finishes and commits the messages in progress."""

    def assigned(self, topic_partitions: Sequence[TopicPartition]) -> Mapping[TopicPartition, int]: ...

    def revoked(self, topic_partitions: Sequence[TopicPartition]) -> None: ...

    def lost(self, topic_partitions: Sequence[TopicPartition]) -> None: ...


class AtLeastOnce:
    """Commits after handling: messages handled since the last commit are redelivered after a crash."""

    def __init__(self, session: ContractSession, commit_every_s: float) -> None:
        self._session = session
        self._commit_every_s = commit_every_s
        self._committed_s = time.monotonic()

    def process(self, batch: Sequence[Any]) -> None:
        self._session.runner.run(batch, self._arrived)
        self.tick()

    def _arrived(self) -> None:
        """From now on the runner's pending messages say which messages of the batch are not handled."""
        self._session.membership.taken = []

    def tick(self) -> None:
        now_s = time.monotonic()
        if now_s - self._committed_s >= self._commit_every_s:
            self._committed_s = now_s
            self._commit(wait=False)

    def _commit(self, *, wait: bool) -> None:
        session = self._session
        session.runner.check()
        # Read the pending messages first: one that is pending now may be done by the time positions are read.
        positions = session.membership.positions(session.runner.pending())
        self._settle()
        session.membership.commit(positions, wait=wait)

    def _settle(self) -> None:
        """Makes durable what must be durable before offsets are committed."""
        self._session.failure_publisher.settle()

    def stop(self) -> None:
        # Hold the lock, so that a concurrent commit finds these messages either in the runner or put back.
        with self._session.membership.held():
            self._session.membership.put_back(self._session.runner.trim())

    def finish(self) -> None:
        remaining, _ = self._session.runner.interrupt(REBALANCE_WAIT_S)
        self._session.membership.put_back(remaining)
        self._session.runner.drain()
        self._commit_if_possible()

    def assigned(self, topic_partitions: Sequence[TopicPartition]) -> Mapping[TopicPartition, int]:
        return {}

    def revoked(self, topic_partitions: Sequence[TopicPartition]) -> None:
        remaining, in_progress = self._session.runner.interrupt(REBALANCE_WAIT_S, topic_partitions)
        self._session.membership.put_back(remaining)
        gone = [raw for raw in in_progress if topic_partition_of(raw) in topic_partitions]
        if gone:
            self._session.figures.lost_in_hand += len(gone)
            _LOG.warning(
                "%d messages were still being handled when their partition went to another member", len(gone)
            )
        self._commit_if_possible(in_progress)

    def _commit_if_possible(self, in_progress: Sequence[Any] = ()) -> None:
        session = self._session
        try:
            # Messages that were polled and did not reach the runner are neither handled nor in progress.
            not_handled = [*session.runner.pending(), *in_progress, *session.membership.taken]
            positions = session.membership.positions(not_handled)
            self._settle()
            session.membership.commit(positions, wait=True)
        except ClientError as error:
            _LOG.warning("%s; messages handled since the last commit are redelivered", error)

    def lost(self, topic_partitions: Sequence[TopicPartition]) -> None:
        """Commits nothing: the new owner started at the last commit already."""
        remaining, in_progress = self._session.runner.interrupt(0.0)
        self._session.membership.put_back(remaining)
        self._session.figures.lost_in_hand += sum(
            topic_partition_of(raw) in topic_partitions for raw in in_progress
        )


def report_unfinished(figures: Figures, topic_partition: TopicPartition, first: int, end: int) -> None:
    """Counts messages that an earlier at-most-once member has committed and not recorded as handled."""
    figures.lost_max += end - first
    _LOG.warning(
        "%s[%d]: up to %d messages, from offset %d on, may be lost: an earlier member has committed them and not "
        "recorded that they were handled",
        *topic_partition,
        end - first,
        first,
    )


def commit_before_handling(
    membership: Membership, figures: Figures, count: int, unfinished: Sequence[Any] = ()
) -> bool:
    """Commits the messages that were polled last; returns whether they may be handled. If not, they are abandoned.

    They may be handled only if the commit is known to have succeeded. `unfinished` are all messages that are not
    handled yet: the commit metadata says that messages are handled up to the first of these.
    """
    try:
        membership.commit(membership.positions(), wait=True, done=membership.positions(unfinished))
    except CommitRefused as error:
        # Certainly not committed: the new owner of the partitions gets these messages for the first time.
        _LOG.warning("%s; %d messages are left to their new owner", error, count)
    except CommitLost as error:
        # The commit may still arrive. A new member starts before or after it, but the late commit cannot move it.
        figures.dropped += count
        _LOG.warning("%s; %d messages are dropped", error, count)
    else:
        return True
    figures.restarts += 1
    membership.rejoin()
    return False


class AtMostOnce:
    """Handles a message only after its commit is known to have succeeded."""

    def __init__(self, session: ContractSession, commit_every_s: float = 0.1, unit: int = 1) -> None:
        """`unit` is how many messages the handler takes at a time."""
        self._session = session
        self._commit_every_s = commit_every_s
        self._noted_s = time.monotonic()
        self._unit = unit
        #: How many messages to handle before checking whether to commit the progress.
        self._chunk = unit
        self._open: Sequence[Any] = ()

    def process(self, batch: Sequence[Any]) -> None:
        session = self._session
        self._check()
        mine = self._committed(batch)
        while mine:
            chunk, mine = mine[: self._chunk], mine[self._chunk :]
            self._open = [*chunk, *mine]
            self._run(chunk, mine)
            self._open = mine
            self._note()
        session.failure_publisher.settle()

    def _run(self, chunk: Sequence[Any], remaining: Sequence[Any]) -> None:
        session, began_s = self._session, time.monotonic()
        try:
            session.runner.run(chunk)
        except BaseException:
            # The failed message, and all messages after it.
            session.figures.dropped += 1 + len(session.runner.trim()) + len(remaining)
            raise
        is_quick = time.monotonic() - began_s < self._commit_every_s / 4
        longer, shorter = min(self._chunk * 2, _CHUNK_MAX), self._chunk // 2 // self._unit * self._unit
        self._chunk = longer if is_quick else max(shorter, self._unit)

    def _note(self, *, now: bool = False) -> None:
        """Commits how far messages are handled, so that the next member knows what may be lost if this one dies.

        Waits for the reply, as for every commit here: a commit that arrives late could move the group back.
        """
        if not now and time.monotonic() - self._noted_s < self._commit_every_s:
            return
        membership = self._session.membership
        try:
            with membership.held():
                self._commit_done()
        except ClientError as error:
            _LOG.warning("%s; joining again", error)
            self._session.figures.restarts += 1
            membership.rejoin()
        finally:
            self._noted_s = time.monotonic()

    def _commit_done(self) -> None:
        """Commits up to the last batch, without the batch that was polled since. Raises ClientError.

        If a partition is revoked before the newer batch is committed, the next owner must still get that batch.
        """
        membership = self._session.membership
        taken = membership.taken
        done = membership.positions([*self._session.runner.pending(), *self._open, *taken])
        # Settle after reading `done`: a failed message counts as handled only when its failure record is durable.
        self._session.failure_publisher.settle()
        membership.commit(membership.positions(taken), wait=True, done=done)

    def _committed(self, batch: Sequence[Any]) -> list[Any]:
        """Commits the batch and returns the messages to handle.

        Leaves out messages whose partition was revoked since the poll, even if the partition is assigned again: another
        member may have got them.
        """
        membership = self._session.membership
        with membership.held():
            kept = set(map(id, membership.taken))
            mine = [raw for raw in batch if id(raw) in kept]
            unfinished = [*self._session.runner.pending(), *mine]
            self._session.failure_publisher.settle()
            is_ours = commit_before_handling(membership, self._session.figures, len(mine), unfinished)
            # From here on the batch is committed, dropped, or left to the next owner of its partition.
            membership.taken = []
            self._noted_s = time.monotonic()
            return mine if is_ours else []

    def tick(self) -> None:
        """Raises the error that stopped a worker of the runner."""
        self._check()
        self._note()

    def _check(self) -> None:
        runner = self._session.runner
        try:
            runner.check()
        except Exception:
            raise
        except BaseException:
            # The application ends. The workers' messages are committed, so no other member will handle them.
            remaining, _ = runner.interrupt(REBALANCE_WAIT_S)
            self._session.figures.dropped += len(remaining) + len(runner.pending())
            raise

    def stop(self) -> None:
        """Gives nothing back: messages in progress are committed, and no other member would handle them."""

    def finish(self) -> None:
        self._session.runner.drain()
        self._session.failure_publisher.settle()
        self._note_last()

    def assigned(self, topic_partitions: Sequence[TopicPartition]) -> Mapping[TopicPartition, int]:
        return {}

    def revoked(self, topic_partitions: Sequence[TopicPartition]) -> None:
        """Lets messages in progress finish here: they are committed, so the next owner does not get them."""
        self._note_last()

    def _note_last(self) -> None:
        with suppress(ClientError):  # the next member then reports too many messages as possibly lost
            self._commit_done()

    def lost(self, topic_partitions: Sequence[TopicPartition]) -> None:
        pass


def raise_if_outage(error: Exception) -> None:
    """Raises errors that the message did not cause: a temporary outage, or a configuration that cannot work.

    A transaction that the handler has spoiled is a failure of the handler, like any other exception.
    """
    if isinstance(error, StoreUnavailable):
        raise error
    if isinstance(error, StoreError) and not isinstance(error, TransactionSpoiled):
        raise ApplicationError(str(error)) from error


_EXPIRE_EVERY_S: Final = 60.0


class HandledIds:
    """Ids of handled messages, which `flush` writes to the store. Handler threads share it."""

    def __init__(self, store: DedupeStore, scope: str, ttl_s: float) -> None:
        self.store = store
        self._scope = scope
        self._ttl_s = ttl_s
        self._lock = threading.Lock()
        #: An ordered set: the values mean nothing.
        self._handled: dict[str, None] = {}
        self._expired_s = time.monotonic()

    def add(self, message_id: str) -> None:
        with self._lock:
            self._handled[message_id] = None

    def flush(self) -> None:
        """Writes the ids to the store. Raises StoreUnavailable, and then keeps the ids for the next call."""
        with self._lock:
            handled, self._handled = self._handled, {}
        try:
            if handled:
                self.store.mark(self._scope, list(handled), self._ttl_s)
        except BaseException:
            with self._lock:
                self._handled = handled | self._handled
            raise

    def seen(self, ids: Sequence[str]) -> set[str]:
        with self._lock:
            mine = [each for each in ids if each in self._handled]
        found: set[str] = self.store.seen(self._scope, ids)
        return found.union(mine)

    def claim(self, transaction: Any, message_id: str) -> bool:
        return bool(transaction.claim(self._scope, message_id, self._ttl_s))

    def expire_periodically(self) -> None:
        now_s = time.monotonic()
        if now_s - self._expired_s > _EXPIRE_EVERY_S:
            self._expired_s = now_s
            self.store.expire()


def mark_after_handling(call: HandlerCall, marks: HandledIds) -> HandlerCall:
    """Wraps `call` so that it marks the message after the handler returns."""

    def handle(raw: Any) -> Any:
        result = call(raw)
        marks.add(message_id_of(raw))
        return result

    return handle


def mark_after_handling_async(call: HandlerCall, marks: HandledIds) -> HandlerCall:
    async def handle(raw: Any) -> Any:
        result = await call(raw)
        marks.add(message_id_of(raw))
        return result

    return handle


def claim_in_transaction(
    call: HandlerCall, marks: HandledIds, handle_name: str, figures: Figures
) -> HandlerCall:
    """Wraps `call` so that result and mark are one transaction: the handler writes through the connection it gets."""

    def handle(raw: Any) -> Any:
        with marks.store.transaction() as transaction:
            if not marks.claim(transaction, message_id_of(raw)):
                figures.add("duplicates")
                return NOT_HANDLED
            with database_handle(handle_name, transaction.connection) as given:
                return call(raw, **{handle_name: given})

    return handle


class EffectivelyOnce(AtLeastOnce):
    def __init__(
        self, session: ContractSession, commit_every_s: float, marks: HandledIds, *, claims: bool
    ) -> None:
        super().__init__(session, commit_every_s)
        self._marks = marks
        self._claims = claims

    def process(self, batch: Sequence[Any]) -> None:
        batch = self._without_failed(batch)
        super().process(batch if self._claims else self._new(batch))

    def failed(self, raw: Any) -> None:
        """Marks a message when its failure record is durable, so that a redelivery publishes no second one."""
        self._marks.add(_failure_id(raw))

    def _without_failed(self, batch: Sequence[Any]) -> Sequence[Any]:
        """Leaves out messages that failed before and are read again because their offset was not committed in time."""
        ids = [_failure_id(raw) for raw in batch]
        known = self._seen(ids)
        if not known:
            return batch
        left = [raw for raw, failure_id in zip(batch, ids, strict=True) if failure_id not in known]
        self._session.figures.add("duplicates", len(batch) - len(left))
        return left

    def _seen(self, ids: Sequence[str]) -> set[str]:
        """Raises StoreUnavailable, and ApplicationError for a store that cannot work."""
        try:
            return self._marks.seen(ids)
        except StoreError as error:
            raise_if_outage(error)
            raise

    def _new(self, batch: Sequence[Any]) -> list[Any]:
        """Leaves out messages that are marked, in progress in a worker, or earlier in this batch."""
        self._session.runner.check()
        ids = [message_id_of(raw) for raw in batch]
        known = self._seen(ids)
        in_progress = {message_id_of(raw): raw for raw in self._session.runner.pending()}
        new = []
        for raw, message_id in zip(batch, ids, strict=True):
            if message_id in known or (
                message_id in in_progress and not _is_later_attempt(raw, in_progress[message_id])
            ):
                self._session.figures.add("duplicates")
            else:
                known.add(message_id)
                new.append(raw)
        return new

    def tick(self) -> None:
        super().tick()
        self._marks.expire_periodically()

    def _settle(self) -> None:
        super()._settle()
        self._marks.flush()


def _is_later_attempt(raw: Any, other: Any) -> bool:
    """Whether `raw` is a later attempt at `other`: then `other` has failed, even if its worker has not noticed yet."""
    return _attempts(raw) > _attempts(other)


def _failure_id(raw: Any) -> str:
    """Names the record at its offset: its retry, or its dead letter when replayed, is a record of its own."""
    return f"failed {raw.topic()}:{raw.partition()}:{raw.offset()}"


def _attempts(raw: Any) -> int:
    return read_origin(raw.headers(), topic="", partition=0, offset=0, timestamp_ms=0).attempts
