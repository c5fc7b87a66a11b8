"""A member of a group: its partitions, where each is read from, what is committed, and staying in while work is slow.

One thread takes messages; a second one only polls while the first is busy for long, so that a slow handler does not
cost the member its partitions. Callbacks of rebalances run in whichever of the two polls.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, Protocol

from penstock.client.app.committing import Note, commit_error, read_note
from penstock.client.app.delivery import Delivery
from penstock.client.app.keeping import Keeper
from penstock.client.app.places import Place, at, place_of
from penstock.client.app.settings import ApplicationError, Settings
from penstock.client.errors import ClientError

__all__ = ["Membership", "Work"]

_LOG: Final = logging.getLogger("penstock.client")
_WATERMARKS_S: Final = 10.0
_COMMITTED_S: Final = 15.0
#: Not 0: the library takes the time that a callback needs within such a call for one in which nobody polls.
_MORE_S: Final = 0.001


class Work(Protocol):
    """What a membership asks of whoever does the work."""

    def assigned(self, places: Sequence[Place]) -> Mapping[Place, int]:
        """Positions to read from that are known elsewhere; those of other places are the group's."""

    def begun(self, positions: Mapping[Place, int]) -> None:
        """Reading begins there."""

    def revoked(self, places: Sequence[Place]) -> None:
        """They go to somebody else after this: finish what is in hand and commit."""

    def lost(self, places: Sequence[Place]) -> None:
        """They belong to somebody else already."""


class Membership:
    def __init__(
        self,
        settings: Settings,
        topics: Sequence[str],
        *,
        start: str,
        work: Work,
        contract: str = Delivery.AT_LEAST_ONCE,
        unfinished: Callable[[Place, int, int], None] | None = None,
    ) -> None:
        """`unfinished` is told what an earlier member has committed and not recorded as finished: from, up to."""
        self._settings = settings
        self._topics = list(topics)
        self._start = start
        self._work = work
        self._contract = str(contract)
        self._unfinished = unfinished
        #: Up to where messages are known to be finished, as it was last committed.
        self._done: dict[Place, int] = {}
        #: Messages that were taken while the others were being handled.
        self._stash: list[Any] = []
        self._lock = threading.RLock()
        self._paused: set[Place] = set()
        #: What the group is known to have, and what it was asked to keep.
        self._committed: dict[Place, int] = {}
        self._sent: dict[Place, int] = {}
        #: Where reading begins (again), of which the library tells nothing until it has read on from there.
        self._sought: dict[Place, int] = {}
        #: To which we could not go back: the library is past what was not handled, and its positions are of no use.
        self._astray: set[Place] = set()
        #: `_is_leaving` from the last poll on, `_is_closing` within the library's close().
        self._is_leaving = self._is_closing = False
        #: Whether it was told its partitions, be they none.
        self.is_assigned = False
        #: Raised where nobody would hear of it.
        self._failure: Exception | None = None
        self.places: set[Place] = set()
        #: What was taken last, until whoever took it says that it is kept elsewhere.
        self.taken: list[Any] = []
        #: How often partitions went away.
        self._losses = 0
        self._error_of = _error_of()
        self._consumer = self._join()
        self._keeper = Keeper(settings, self._poll_aside)

    # -- messages ------------------------------------------------------------------------------------

    def take(self, count_max: int, timeout_s: float) -> list[Any]:
        """As soon as there is something. Raises ClientError for what cannot get better by itself."""
        self._keeper.idle()
        with self._lock:
            if self._failure is not None:
                failure, self._failure = self._failure, None
                raise failure
            taken, self._stash = self._stash, []
            if not taken:
                losses = self._losses
                taken = self._fetched(count_max, timeout_s)
                if losses != self._losses:
                    # What was handed out before a rebalance in the same call may be of partitions that are gone.
                    taken = [m for m in taken if m.error() or place_of(m) in self.places]
            self.taken = taken
            self._keeper.busy()
            # Without a line of Python for each of them: nearly always there is none.
            if any(map(self._error_of, taken)):
                self.taken = [message for message in taken if message.error() is None]
                self._heed_errors(taken)
            return self.taken

    def _fetched(self, count_max: int, timeout_s: float) -> list[Any]:
        """What is there; else the library, which waits for all that it may hand out, is asked for one first.

        Rebalances within these calls may put messages back, which come before all others.
        """
        more = self._consumer.consume(count_max, _MORE_S)
        if not more and not self._stash and (first := self._consumer.poll(timeout_s)) is not None:
            # A rebalance within the second call must find it among those that are not handled.
            self._stash.append(first)
            more = self._consumer.consume(count_max - 1, _MORE_S)
        back, self._stash = self._stash, []
        return [*back, *more] if back else more

    def _heed_errors(self, taken: list[Any]) -> None:
        """Raises ClientError for an error that does not go away by itself; logs the others."""
        from confluent_kafka import KafkaError

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
        """Nobody else takes or asks for positions meanwhile, and no partition goes away or comes."""
        with self._lock:
            yield

    def put_back(self, messages: Iterable[Any]) -> None:
        """To be taken first, next time."""
        with self._lock:
            self._stash = [*messages, *self._stash]

    def rewind(self, positions: Mapping[Place, int]) -> None:
        """Read again from there, and forget what was taken behind it. Raises ClientError.

        What was put back of before is still the next to be taken: another thread may have put it there just now.
        """
        with self._lock:
            before = [m for m in self._stash if _is_before(m, positions)]
            try:
                for place, offset in positions.items():
                    self.seek(place, offset)
            except ClientError:
                self._astray |= positions.keys()
                raise
            self._stash = [*before, *self._stash]

    def seek(self, place: Place, offset: int) -> None:
        """Nothing happens where it is somebody else's. Raises ClientError."""
        from confluent_kafka import KafkaException

        with self._lock:
            self._stash = [m for m in self._stash if place_of(m) != place]
            if place not in self.places:
                return
            try:
                self._consumer.seek(at(place, offset))
            except KafkaException as error:
                raise ClientError(f"{place[0]}[{place[1]}]: {error.args[0].str()}") from None
            self._sought[place] = offset

    def bounds(self, place: Place) -> tuple[int, int]:
        """The first offset of the log, and the next one that will be written. Raises ClientError."""
        from confluent_kafka import KafkaException

        try:
            low, high = self._consumer.get_watermark_offsets(at(place), timeout=_WATERMARKS_S)
        except KafkaException as error:
            raise ClientError(f"{place[0]}[{place[1]}]: {error.args[0].str()}") from None
        return int(low), int(high)

    def offset_at(self, place: Place, timestamp_ms: int) -> int:
        """Of the first message that is not older; the end where there is none. Raises ClientError."""
        from confluent_kafka import KafkaException

        try:
            (told,) = self._consumer.offsets_for_times([at(place, timestamp_ms)], timeout=_WATERMARKS_S)
        except KafkaException as error:
            raise ClientError(f"{place[0]}[{place[1]}]: {error.args[0].str()}") from None
        if told.error is not None:
            raise ClientError(f"{place[0]}[{place[1]}]: {told.error.str()}")
        return int(told.offset) if told.offset >= 0 else self.bounds(place)[1]

    def pause(self, places: Iterable[Place]) -> None:
        with self._lock:
            new = {place for place in places if place in self.places} - self._paused
            if new:
                self._consumer.pause([at(place) for place in sorted(new)])
                self._paused |= new

    def resume(self, places: Iterable[Place]) -> None:
        with self._lock:
            back = self._paused.intersection(places)
            if back:
                self._consumer.resume([at(place) for place in sorted(back)])
                self._paused -= back

    # -- positions -----------------------------------------------------------------------------------

    def positions(self, pending: Iterable[Any] = ()) -> dict[Place, int]:
        """The next offset of every partition from which something was taken, up to the first that is pending."""
        with self._lock:
            asked = [at(place) for place in sorted(self.places)]
            told = self._consumer.position(asked) if asked else []
            found = self._sought | {
                (each.topic, each.partition): each.offset for each in told if each.offset >= 0
            }
            for message in [*self._stash, *pending]:
                place = place_of(message)
                if place in found:
                    found[place] = min(found[place], message.offset())
            return {place: offset for place, offset in found.items() if place not in self._astray}

    def commit(
        self, positions: Mapping[Place, int], *, wait: bool, done: Mapping[Place, int] | None = None
    ) -> None:
        """Only what has moved. Raises CommitRefused, CommitLost where it waits, and else it is known to be kept.

        `done` is noted with the positions, where these are ahead of what is finished.
        """
        from confluent_kafka import KafkaException

        before, finished = self._committed if wait else self._sent, done or {}
        moved = {
            place: offset
            for place, offset in positions.items()
            if before.get(place) != offset or self._done.get(place) != finished.get(place)
        }
        if not moved:
            return
        offsets = [
            at(place, offset, str(Note(self._contract, finished.get(place))))
            for place, offset in sorted(moved.items())
        ]
        self._done.update({place: finished[place] for place in moved if place in finished})
        try:
            answers = self._consumer.commit(offsets=offsets, asynchronous=not wait)
        except KafkaException as error:
            raise commit_error(error.args[0]) from None
        for answer in answers or () if wait else ():
            if answer.error is not None:
                raise commit_error(answer.error)
        if wait:
            self._kept(moved)
        else:
            self._sent.update(moved)

    @property
    def member_id(self) -> str:
        """As the coordinator has named it; empty before that."""
        return str(self._consumer.memberid() or "")

    def metadata(self) -> Any:
        """Of the group, for transactions."""
        return self._consumer.consumer_group_metadata()

    # -- joining and leaving -------------------------------------------------------------------------

    def _join(self) -> Any:
        from confluent_kafka import Consumer, KafkaException

        try:
            consumer = Consumer({**self._settings, "on_commit": self._on_commit})
            consumer.subscribe(
                self._topics, on_assign=self._on_assign, on_revoke=self._on_revoke, on_lost=self._on_lost
            )
        except KafkaException as error:
            raise ApplicationError(error.args[0].str()) from None
        return consumer

    def rejoin(self) -> None:
        """As another member: what the old one has still under way is refused when it arrives."""
        with self._lock:
            self._forget(self.places)
            self._close_client()
            self._stash = []
            self._consumer = self._join()

    def close(self) -> None:
        """Leaves the group; partitions are revoked on the way."""
        self._keeper.end()
        with self._lock:
            self._close_client()
        self._keeper.join()

    def _close_client(self) -> None:
        self._is_leaving = True
        try:
            # Serve an assignment that is already queued: librdkafka may hang in close() when it is served there.
            message = self._consumer.poll(_MORE_S)
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
        from confluent_kafka import KafkaException

        if self._is_leaving:
            # Accept the partitions so that they can be revoked, but do not read them. Within close() librdkafka hangs
            # when it is asked anything or given partitions (its issue 4527).
            self._assign(consumer, [] if self._is_closing else partitions)
            return
        self.is_assigned = True
        places = [(each.topic, each.partition) for each in partitions]
        try:
            positions = {**self._starts(consumer, partitions), **self._work.assigned(places)}
        except KafkaException as error:
            raise ClientError(f"the group's positions cannot be had: {error.args[0].str()}") from None
        chosen = [at(place, positions[place]) for place in places]
        self._assign(consumer, chosen)
        # librdkafka keeps a partition paused across rebalances: one that was paused when it was revoked or lost would
        # never be read again.
        consumer.resume(chosen)
        self.places.update(places)
        self._sought.update({place: positions[place] for place in places})
        self._work.begun({place: positions[place] for place in places})

    def _assign(self, consumer: Any, chosen: list[Any]) -> None:
        if self._settings.get("partition.assignment.strategy") == "cooperative-sticky" or (
            self._settings.get("group.protocol") == "consumer"
        ):
            consumer.incremental_assign(chosen)
        else:
            consumer.assign(chosen)

    def _starts(self, consumer: Any, partitions: list[Any]) -> dict[Place, int]:
        """Committed positions; for partitions that the group has never read, the chosen end, which is kept at once.

        From then on a position that is gone is an error: to guess another one would lose or repeat messages.
        """
        if not partitions:
            return {}
        told = consumer.committed(partitions, timeout=_COMMITTED_S)
        known = {(each.topic, each.partition): each.offset for each in told if each.offset >= 0}
        self._kept(known)
        self._heed_notes(consumer, told)
        new = {}
        for each in told:
            if each.error is not None:
                raise ClientError(f"{each.topic}[{each.partition}]: {each.error.str()}")
            if each.offset < 0:
                low, high = consumer.get_watermark_offsets(each, timeout=_WATERMARKS_S)
                new[each.topic, each.partition] = low if self._starts_first(each.topic) else high
        if new:
            note = str(Note(self._contract))
            consumer.commit(
                offsets=[at(place, offset, note) for place, offset in new.items()], asynchronous=False
            )
            self._kept(new)
        return {**known, **new}

    def _heed_notes(self, consumer: Any, told: Sequence[Any]) -> None:
        notes = [(each, note) for each in told if (note := read_note(each.metadata)) is not None]
        others = {note.contract for _, note in notes} - {self._contract}
        if others:
            _LOG.warning(
                "group %s was %s so far, and is %s here: a group keeps one contract",
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
            for place, (done, offset) in sorted(gaps.items()):
                self._unfinished(place, done, offset)
            # Each is counted by one member.
            counted = [at(place, end, str(Note(self._contract, end))) for place, (_, end) in gaps.items()]
            consumer.commit(offsets=counted, asynchronous=False)

    def _kept(self, positions: Mapping[Place, int]) -> None:
        self._committed.update(positions)
        self._sent.update(positions)

    def _starts_first(self, topic: str) -> bool:
        """Retries are never older than the group, whatever it wants of the topic itself."""
        from penstock.client.letters import is_letter_topic

        return self._start == "earliest" or is_letter_topic(topic)

    def _on_revoke(self, consumer: Any, partitions: list[Any]) -> None:
        places = [(each.topic, each.partition) for each in partitions]
        try:
            self._work.revoked(places)
        finally:
            self._forget(places)

    def _on_lost(self, consumer: Any, partitions: list[Any]) -> None:
        places = [(each.topic, each.partition) for each in partitions]
        _LOG.warning("lost %s", ", ".join(f"{topic}[{number}]" for topic, number in sorted(places)))
        try:
            self._work.lost(places)
        finally:
            self._forget(places)

    def _forget(self, places: Iterable[Place]) -> None:
        gone = set(places)
        self._losses += 1
        self._stash = [m for m in self._stash if place_of(m) not in gone]
        self.taken = [m for m in self.taken if place_of(m) not in gone]
        for place in gone:
            for known in (self._committed, self._sent, self._sought, self._done):
                known.pop(place, None)
        self._astray -= gone
        self._paused -= gone
        self.places -= gone

    def _on_commit(self, error: Any, partitions: list[Any]) -> None:
        """Of commits that nobody waits for: what was not kept is committed again with the next."""
        if error is None and all(each.error is None for each in partitions):
            return
        for each in partitions:
            self._sent.pop((each.topic, each.partition), None)
        _LOG.warning("positions were not committed: %s", error.str() if error else partitions[0].error.str())

    def _poll_aside(self) -> None:
        """Tell the group that we live. Nothing more is fetched meanwhile; what comes nevertheless is kept."""
        if not self._lock.acquire(timeout=0.1):
            return
        try:
            held = self.places - self._paused
            self.pause(held)
            message = self._consumer.poll(_MORE_S)
            if message is not None:
                self._stash.append(message)
            self.resume(held)
        except Exception as error:
            # For whoever takes messages next.
            self._failure = error
        finally:
            self._lock.release()


def _is_before(message: Any, positions: Mapping[Place, int]) -> bool:
    place = place_of(message)
    return place in positions and message.error() is None and message.offset() < positions[place]


def _error_of() -> Callable[[Any], Any]:
    from confluent_kafka import Message

    found: Callable[[Any], Any] = Message.error
    return found
