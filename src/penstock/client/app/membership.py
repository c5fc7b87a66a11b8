"""A member of a consumer group: its partitions, positions and commits, and its liveness while handlers are slow.

One thread polls messages. While it is busy for long, a second thread polls in the background, so that a slow handler
does not cost the member its partitions. Rebalance callbacks run in the thread that polls.

A commit ends in one of three ways: it succeeds, it is refused, or its outcome is unknown. The commit metadata names the
contract under which an offset was committed, so that an application notices when a group is used under another
contract. For at-most-once it also says up to which offset messages were handled, because the committed offset is ahead
of that.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, Protocol

import confluent_kafka
from confluent_kafka import Consumer, KafkaError, KafkaException

from penstock.client.app.librdkafka import ApplicationError, Settings
from penstock.client.app.message import TopicPartition, confluent_partition, topic_partition_of
from penstock.client.app.subscription import Delivery
from penstock.client.deadletters.headers import is_failure_topic
from penstock.client.errors import ClientError

__all__ = (
    "BackgroundPoller",
    "CommitLost",
    "CommitMetadata",
    "CommitRefused",
    "Membership",
    "RebalanceListener",
    "commit_error",
    "parse_commit_metadata",
)


_COMMIT_METADATA: Final = re.compile(r"penstock (?P<contract>[a-z-]+)(?: done=(?P<done>\d{1,19}))?")


class CommitMetadata(NamedTuple):
    contract: str
    #: The first offset that is not known to be handled; None for contracts other than at-most-once.
    done: int | None = None

    def __str__(self) -> str:
        return f"penstock {self.contract}" + ("" if self.done is None else f" done={self.done}")


def parse_commit_metadata(text: str | None) -> CommitMetadata | None:
    """Returns None for metadata that no Penstock application has committed."""
    match = _COMMIT_METADATA.fullmatch(text or "")
    if match is None:
        return None
    return CommitMetadata(match["contract"], None if match["done"] is None else int(match["done"]))


class CommitRefused(ClientError):
    """The coordinator refused a commit, for example because the member lost its partitions: nothing was committed."""


class CommitLost(ClientError):
    """The outcome of a commit is unknown: the offset may have been committed or not."""


def commit_error(error: Any, *, was_retried: bool = False) -> ClientError:
    """Returns CommitRefused if the error means that nothing was committed, CommitLost if the outcome is unknown.

    `was_retried`: an earlier attempt may have succeeded whose reply was lost, and the error is that of a later one.
    """
    definite = {
        KafkaError.ILLEGAL_GENERATION,
        KafkaError.UNKNOWN_MEMBER_ID,
        KafkaError.FENCED_INSTANCE_ID,
        KafkaError.REBALANCE_IN_PROGRESS,
        KafkaError.STALE_MEMBER_EPOCH,
        KafkaError.FENCED_MEMBER_EPOCH,
        KafkaError.GROUP_AUTHORIZATION_FAILED,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError._NO_OFFSET,
    }
    kind = CommitRefused if error.code() in definite and not was_retried else CommitLost
    return kind(f"the offset was not committed: {error.str()}")


#: How often a busy member polls at least in each max.poll.interval.ms.
_POLLS_PER_INTERVAL: Final = 4
#: Bounds the interval: in a rebalance other members wait for a busy member, and it learns late about lost partitions.
_POLL_EVERY_S_MAX: Final = 3.0
_POLL_INTERVAL_MS: Final = 300_000


class BackgroundPoller:
    def __init__(self, settings: Settings, poll: Callable[[], None]) -> None:
        interval_ms = int(settings.get("max.poll.interval.ms", _POLL_INTERVAL_MS))
        self._every_s = min(interval_ms / 1000 / _POLLS_PER_INTERVAL, _POLL_EVERY_S_MAX)
        self._poll = poll
        self._busy_since: float | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="penstock-poller", daemon=True)
        self._thread.start()

    def busy(self) -> None:
        """Starts background polling, until `idle` is called."""
        self._busy_since = time.monotonic()

    def idle(self) -> None:
        self._busy_since = None

    def end(self) -> None:
        """Tells the thread to end, without waiting: the caller may hold a lock that the thread waits for."""
        self._closing.set()

    def join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        while not self._closing.wait(self._every_s / 2):
            since = self._busy_since
            if since is not None and time.monotonic() - since > self._every_s:
                self._poll()


_LOG: Final = logging.getLogger("penstock.client")
_WATERMARKS_TIMEOUT_S: Final = 10.0
_COMMITTED_TIMEOUT_S: Final = 15.0
#: Not 0: in a call with timeout 0, librdkafka counts the time of a callback as time without a poll.
_SHORT_POLL_S: Final = 0.001
#: librdkafka's default of retry.backoff.ms, and the part of it that it waits at least before it retries a request.
_RETRY_BACKOFF_MS: Final = 100
_RETRY_BACKOFF_PART: Final = 0.75


class RebalanceListener(Protocol):
    """The callbacks of a membership for rebalances."""

    def assigned(self, topic_partitions: Sequence[TopicPartition]) -> Mapping[TopicPartition, int]:
        """Returns positions to read from that are kept outside the group; other partitions start at its offsets."""

    def reading_from(self, positions: Mapping[TopicPartition, int]) -> None:
        """The member starts to read at these positions."""

    def revoked(self, topic_partitions: Sequence[TopicPartition]) -> None:
        """The partitions go to another member after this call: finishes messages in progress and commits."""

    def lost(self, topic_partitions: Sequence[TopicPartition]) -> None:
        """The partitions belong to another member already."""


class Membership:
    def __init__(
        self,
        settings: Settings,
        topics: Sequence[str],
        *,
        start: str,
        work: RebalanceListener,
        contract: str = Delivery.AT_LEAST_ONCE,
        unfinished: Callable[[TopicPartition, int, int], None] | None = None,
    ) -> None:
        """`unfinished` gets messages that an earlier member has committed and not recorded as handled.

        Its arguments are the partition, the first offset, and the offset after the last one.
        """
        self._settings = settings
        self._topics = list(topics)
        self._start = start
        self._work = work
        self._contract = str(contract)
        self._unfinished = unfinished
        backoff_ms = float(settings.get("retry.backoff.ms", _RETRY_BACKOFF_MS))
        #: librdkafka does not say whether it has retried a commit; one that failed earlier than this was not retried.
        self._retry_after_s = backoff_ms * _RETRY_BACKOFF_PART / 1000
        #: The last committed `done` of each partition: the first offset that is not known to be handled.
        self._done: dict[TopicPartition, int] = {}
        #: Messages that were polled or put back, and that the next `take` returns.
        self._stash: list[Any] = []
        self._lock = threading.RLock()
        self._paused: set[TopicPartition] = set()
        #: Offsets whose commit has succeeded, and offsets whose commit was sent.
        self._committed: dict[TopicPartition, int] = {}
        self._sent: dict[TopicPartition, int] = {}
        #: Where reading starts after an assignment or seek. librdkafka has no position until it reads on from there.
        self._seek_offsets: dict[TopicPartition, int] = {}
        #: Partitions whose seek failed: librdkafka's position is past unhandled messages and must not be committed.
        self._unseekable: set[TopicPartition] = set()
        #: `_is_leaving` is set from the last poll on, `_is_closing` within librdkafka's close().
        self._is_leaving = self._is_closing = False
        #: Whether the member has received an assignment, even an empty one.
        self.is_assigned = False
        #: An error of the background poller, which the next `take` raises.
        self._failure: Exception | None = None
        self.topic_partitions: set[TopicPartition] = set()
        #: The messages of the last `take`, until the caller empties the list because a runner has them.
        self.taken: list[Any] = []
        #: How often partitions were revoked or lost.
        self._revocations = 0
        self._error_of: Callable[[Any], Any] = confluent_kafka.Message.error
        self._consumer = self._join()
        self._poller = BackgroundPoller(settings, self._poll_in_background)

    # -- messages ------------------------------------------------------------------------------------

    def take(self, count_max: int, timeout_s: float) -> list[Any]:
        """Returns messages as soon as there are any. Raises ClientError for errors that do not pass by themselves."""
        self._poller.idle()
        with self._lock:
            if self._failure is not None:
                failure, self._failure = self._failure, None
                raise failure
            taken, self._stash = self._stash, []
            if not taken:
                revocations = self._revocations
                taken = self._fetched(count_max, timeout_s)
                if revocations != self._revocations:
                    # Messages that librdkafka returned before a rebalance in the same call may be of lost partitions.
                    taken = [m for m in taken if m.error() or topic_partition_of(m) in self.topic_partitions]
            self.taken = taken
            self._poller.busy()
            # `map` runs no Python code for each message; nearly always there is no error.
            if any(map(self._error_of, taken)):
                self.taken = [message for message in taken if message.error() is None]
                self._check_errors(taken)
            return self.taken

    def _fetched(self, count_max: int, timeout_s: float) -> list[Any]:
        """Returns the messages that are queued; if there are none, waits for one with `poll`.

        `consume` with the whole timeout would wait until it has `count_max` messages. Rebalances within these calls may
        put messages back, which come before all others.
        """
        more = self._consumer.consume(count_max, _SHORT_POLL_S)
        if not more and not self._stash and (first := self._consumer.poll(timeout_s)) is not None:
            # A rebalance within the second call must find this message among the unhandled ones.
            self._stash.append(first)
            more = self._consumer.consume(count_max - 1, _SHORT_POLL_S)
        back, self._stash = self._stash, []
        return [*back, *more] if back else more

    def _check_errors(self, taken: list[Any]) -> None:
        """Raises ClientError for an error that does not go away by itself; logs the others."""
        for message in taken:
            error = message.error()
            if error is None:
                continue
            if error.code() in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE):
                raise ApplicationError(
                    f"{message.topic()}[{message.partition()}]: the position of the group is not in the log "
                    "any more; `penstock group reset` moves it"
                )
            if error.fatal():
                raise ClientError(error.str())
            _LOG.warning("%s", error.str())

    @contextmanager
    def held(self) -> Iterator[None]:
        """Locks out other threads: no messages are polled, no positions are read, and no partitions change."""
        with self._lock:
            yield

    def put_back(self, messages: Iterable[Any]) -> None:
        """Makes the next `take` return these messages first."""
        with self._lock:
            self._stash = [*messages, *self._stash]

    def rewind(self, positions: Mapping[TopicPartition, int]) -> None:
        """Reads again from these positions, and drops messages in the stash at or after them. Raises ClientError.

        Messages before these positions stay in the stash: another thread may just have put them back.
        """
        with self._lock:
            before = [m for m in self._stash if _is_before(m, positions)]
            try:
                for topic_partition, offset in positions.items():
                    self.seek(topic_partition, offset)
            except ClientError:
                self._unseekable |= positions.keys()
                raise
            self._stash = [*before, *self._stash]

    def seek(self, topic_partition: TopicPartition, offset: int) -> None:
        """Does nothing if the partition is not assigned to this member. Raises ClientError."""
        with self._lock:
            self._stash = [m for m in self._stash if topic_partition_of(m) != topic_partition]
            if topic_partition not in self.topic_partitions:
                return
            try:
                self._consumer.seek(confluent_partition(topic_partition, offset))
            except KafkaException as error:
                raise ClientError(
                    f"{topic_partition[0]}[{topic_partition[1]}]: {error.args[0].str()}"
                ) from None
            self._seek_offsets[topic_partition] = offset

    def bounds(self, topic_partition: TopicPartition) -> tuple[int, int]:
        """Returns the log start offset and the high watermark. Raises ClientError."""
        try:
            low, high = self._consumer.get_watermark_offsets(
                confluent_partition(topic_partition), timeout=_WATERMARKS_TIMEOUT_S
            )
        except KafkaException as error:
            raise ClientError(f"{topic_partition[0]}[{topic_partition[1]}]: {error.args[0].str()}") from None
        return int(low), int(high)

    def offset_at(self, topic_partition: TopicPartition, timestamp_ms: int) -> int:
        """Returns the offset of the first message that is not older, or the log's end. Raises ClientError."""
        try:
            (reported,) = self._consumer.offsets_for_times(
                [confluent_partition(topic_partition, timestamp_ms)], timeout=_WATERMARKS_TIMEOUT_S
            )
        except KafkaException as error:
            raise ClientError(f"{topic_partition[0]}[{topic_partition[1]}]: {error.args[0].str()}") from None
        if reported.error is not None:
            raise ClientError(f"{topic_partition[0]}[{topic_partition[1]}]: {reported.error.str()}")
        return int(reported.offset) if reported.offset >= 0 else self.bounds(topic_partition)[1]

    def pause(self, topic_partitions: Iterable[TopicPartition]) -> None:
        with self._lock:
            new = {
                topic_partition
                for topic_partition in topic_partitions
                if topic_partition in self.topic_partitions
            } - self._paused
            if new:
                self._consumer.pause(
                    [confluent_partition(topic_partition) for topic_partition in sorted(new)]
                )
                self._paused |= new

    def resume(self, topic_partitions: Iterable[TopicPartition]) -> None:
        with self._lock:
            back = self._paused.intersection(topic_partitions)
            if back:
                self._consumer.resume(
                    [confluent_partition(topic_partition) for topic_partition in sorted(back)]
                )
                self._paused -= back

    # -- positions -----------------------------------------------------------------------------------

    def positions(self, pending: Iterable[Any] = ()) -> dict[TopicPartition, int]:
        """Returns the next offset to commit for each partition, but at most the offset of its first pending message."""
        with self._lock:
            requested = [
                confluent_partition(topic_partition) for topic_partition in sorted(self.topic_partitions)
            ]
            reported = self._consumer.position(requested) if requested else []
            found = self._seek_offsets | {
                (each.topic, each.partition): each.offset for each in reported if each.offset >= 0
            }
            for message in [*self._stash, *pending]:
                topic_partition = topic_partition_of(message)
                if topic_partition in found:
                    found[topic_partition] = min(found[topic_partition], message.offset())
            return {
                topic_partition: offset
                for topic_partition, offset in found.items()
                if topic_partition not in self._unseekable
            }

    def commit(
        self,
        positions: Mapping[TopicPartition, int],
        *,
        wait: bool,
        done: Mapping[TopicPartition, int] | None = None,
    ) -> None:
        """Commits the positions that have changed.

        With `wait`, returns when the commit has succeeded, or raises CommitRefused or CommitLost. `done` goes into the
        commit metadata, for contracts whose positions are ahead of the handled messages.
        """
        before, finished = self._committed if wait else self._sent, done or {}
        moved = {
            topic_partition: offset
            for topic_partition, offset in positions.items()
            if before.get(topic_partition) != offset
            or self._done.get(topic_partition) != finished.get(topic_partition)
        }
        if not moved:
            return
        offsets = [
            confluent_partition(
                topic_partition, offset, str(CommitMetadata(self._contract, finished.get(topic_partition)))
            )
            for topic_partition, offset in sorted(moved.items())
        ]
        self._done.update(
            {
                topic_partition: finished[topic_partition]
                for topic_partition in moved
                if topic_partition in finished
            }
        )
        began_s = time.monotonic()
        try:
            results = self._consumer.commit(offsets=offsets, asynchronous=not wait)
        except KafkaException as error:
            raise commit_error(error.args[0], was_retried=self._may_be_retry(began_s)) from None
        for result in results or () if wait else ():
            if result.error is not None:
                raise commit_error(result.error, was_retried=self._may_be_retry(began_s))
        if wait:
            self._note_committed(moved)
        else:
            self._sent.update(moved)

    def _may_be_retry(self, began_s: float) -> bool:
        return time.monotonic() - began_s >= self._retry_after_s

    @property
    def member_id(self) -> str:
        """The member id from the coordinator; empty before the member has joined."""
        return str(self._consumer.memberid() or "")

    def metadata(self) -> Any:
        """The group metadata (generation and member id) that transactions commit offsets with."""
        return self._consumer.consumer_group_metadata()

    # -- joining and leaving -------------------------------------------------------------------------

    def _join(self) -> Any:
        try:
            consumer = Consumer({**self._settings, "on_commit": self._on_commit})
            consumer.subscribe(
                self._topics, on_assign=self._on_assign, on_revoke=self._on_revoke, on_lost=self._on_lost
            )
        except KafkaException as error:
            raise ApplicationError(error.args[0].str()) from None
        return consumer

    def rejoin(self) -> None:
        """Leaves and joins as a new member: commits of the old one that are still in flight are refused on arrival."""
        with self._lock:
            self._forget(self.topic_partitions)
            self._close_client()
            self._stash = []
            self._consumer = self._join()

    def close(self) -> None:
        """Leaves the group; this revokes the partitions."""
        self._poller.end()
        with self._lock:
            self._close_client()
        self._poller.join()

    def _close_client(self) -> None:
        self._is_leaving = True
        try:
            # Serve an assignment that is already queued: librdkafka may hang in close() when it is served there.
            message = self._consumer.poll(_SHORT_POLL_S)
            if message is not None:
                self._stash.append(message)
        finally:
            self._is_closing = True
            try:
                self._consumer.close()
            finally:
                self._is_leaving = self._is_closing = False

    # -- rebalances ----------------------------------------------------------------------------------

    def _on_assign(self, consumer: Any, partitions: list[Any]) -> None:
        if self._is_leaving:
            # Accept the partitions so that they can be revoked, but do not read them. Within close() librdkafka hangs
            # on requests and on assignments of partitions (its issue 4527).
            self._assign(consumer, [] if self._is_closing else partitions)
            return
        self.is_assigned = True
        topic_partitions = [(each.topic, each.partition) for each in partitions]
        try:
            positions = {**self._starts(consumer, partitions), **self._work.assigned(topic_partitions)}
        except KafkaException as error:
            raise ClientError(f"cannot fetch the group's offsets: {error.args[0].str()}") from None
        chosen = [
            confluent_partition(topic_partition, positions[topic_partition])
            for topic_partition in topic_partitions
        ]
        self._assign(consumer, chosen)
        # librdkafka keeps a partition paused across rebalances: one that was paused when it was revoked or lost would
        # never be read again.
        consumer.resume(chosen)
        self.topic_partitions.update(topic_partitions)
        self._seek_offsets.update(
            {topic_partition: positions[topic_partition] for topic_partition in topic_partitions}
        )
        self._work.reading_from(
            {topic_partition: positions[topic_partition] for topic_partition in topic_partitions}
        )

    def _assign(self, consumer: Any, chosen: list[Any]) -> None:
        if self._settings.get("partition.assignment.strategy") == "cooperative-sticky" or (
            self._settings.get("group.protocol") == "consumer"
        ):
            consumer.incremental_assign(chosen)
        else:
            consumer.assign(chosen)

    def _starts(self, consumer: Any, partitions: list[Any]) -> dict[TopicPartition, int]:
        """Returns the committed offsets, and `start` for partitions that the group has never read.

        It commits the latter at once. From then on a missing offset is an error: to guess another one would lose or
        repeat messages.
        """
        if not partitions:
            return {}
        reported = consumer.committed(partitions, timeout=_COMMITTED_TIMEOUT_S)
        known = {(each.topic, each.partition): each.offset for each in reported if each.offset >= 0}
        self._note_committed(known)
        self._check_commit_metadata(consumer, reported)
        new = {}
        for each in reported:
            if each.error is not None:
                raise ClientError(f"{each.topic}[{each.partition}]: {each.error.str()}")
            if each.offset < 0:
                low, high = consumer.get_watermark_offsets(each, timeout=_WATERMARKS_TIMEOUT_S)
                new[each.topic, each.partition] = low if self._starts_first(each.topic) else high
        if new:
            note = str(CommitMetadata(self._contract))
            consumer.commit(
                offsets=[
                    confluent_partition(topic_partition, offset, note)
                    for topic_partition, offset in new.items()
                ],
                asynchronous=False,
            )
            self._note_committed(new)
        return {**known, **new}

    def _check_commit_metadata(self, consumer: Any, reported: Sequence[Any]) -> None:
        notes = [
            (each, note) for each in reported if (note := parse_commit_metadata(each.metadata)) is not None
        ]
        others = {note.contract for _, note in notes} - {self._contract}
        if others:
            _LOG.warning(
                "group %s was used with %s before, and is used with %s now: use one contract for a group",
                self._settings["group.id"],
                ", ".join(sorted(others)),
                self._contract,
            )
        gaps = {
            (each.topic, each.partition): (note.done, each.offset)
            for each, note in notes
            if note.done is not None and note.done < each.offset
        }
        if gaps and self._unfinished is not None:
            for topic_partition, (done, offset) in sorted(gaps.items()):
                self._unfinished(topic_partition, done, offset)
            # Commit them as counted, so that the next member does not count them again.
            counted = [
                confluent_partition(topic_partition, end, str(CommitMetadata(self._contract, end)))
                for topic_partition, (_, end) in gaps.items()
            ]
            consumer.commit(offsets=counted, asynchronous=False)

    def _note_committed(self, positions: Mapping[TopicPartition, int]) -> None:
        self._committed.update(positions)
        self._sent.update(positions)

    def _starts_first(self, topic: str) -> bool:
        """Whether a new group reads the topic from its start.

        It does so for retry topics even with start="latest", because a group's retries are never older than the group.
        """
        return self._start == "earliest" or is_failure_topic(topic)

    def _on_revoke(self, consumer: Any, partitions: list[Any]) -> None:
        topic_partitions = [(each.topic, each.partition) for each in partitions]
        try:
            self._work.revoked(topic_partitions)
        finally:
            self._forget(topic_partitions)

    def _on_lost(self, consumer: Any, partitions: list[Any]) -> None:
        topic_partitions = [(each.topic, each.partition) for each in partitions]
        _LOG.warning("lost %s", ", ".join(f"{topic}[{number}]" for topic, number in sorted(topic_partitions)))
        try:
            self._work.lost(topic_partitions)
        finally:
            self._forget(topic_partitions)

    def _forget(self, topic_partitions: Iterable[TopicPartition]) -> None:
        gone = set(topic_partitions)
        self._revocations += 1
        self._stash = [m for m in self._stash if topic_partition_of(m) not in gone]
        self.taken = [m for m in self.taken if topic_partition_of(m) not in gone]
        for topic_partition in gone:
            for known in (self._committed, self._sent, self._seek_offsets, self._done):
                known.pop(topic_partition, None)
        self._unseekable -= gone
        self._paused -= gone
        self.topic_partitions -= gone

    def _on_commit(self, error: Any, partitions: list[Any]) -> None:
        """Handles the result of an asynchronous commit: the next commit includes what failed."""
        if error is None and all(each.error is None for each in partitions):
            return
        for each in partitions:
            self._sent.pop((each.topic, each.partition), None)
        _LOG.warning("offsets were not committed: %s", error.str() if error else partitions[0].error.str())

    def _poll_in_background(self) -> None:
        """Polls so that the group sees a live member. Pauses fetching meanwhile; keeps a message that still arrives."""
        if not self._lock.acquire(timeout=0.1):
            return
        try:
            held = self.topic_partitions - self._paused
            self.pause(held)
            message = self._consumer.poll(_SHORT_POLL_S)
            if message is not None:
                self._stash.append(message)
            self.resume(held)
        except Exception as error:
            # The next `take` raises it.
            self._failure = error
        finally:
            self._lock.release()


def _is_before(message: Any, positions: Mapping[TopicPartition, int]) -> bool:
    topic_partition = topic_partition_of(message)
    return (
        topic_partition in positions
        and message.error() is None
        and message.offset() < positions[topic_partition]
    )
