"""The relay: publishes the rows of one shard in the order of their ids, each of them once.

A batch and a marker with its row ids are one Kafka transaction; then the relay deletes the rows. Whatever ends a relay
in between, the next one starts with the same three steps: it takes over the transactional id, which commits or aborts
what was under way; it reads the last markers; and it deletes the rows that they name. The table alone says where to
continue, never a remembered id, because ids are assigned in one order and committed in another.

Relays may run together if they use the same number of shards and the same name, because the marker of the relay that
published a row is what identifies it until it is deleted. A relay that changes either waits until no relay with the
old values is left, fences those that only seem to be gone, and deletes the rows that their markers name. Only then
does it divide the rows again.

`run_relays` runs several relays in one process, a thread for each: all of them continue, or none.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from random import Random
from types import MappingProxyType
from typing import Any, Final

from penstock.client.outbox.database import OutboxDatabase, RelayAgreement, open_database
from penstock.client.outbox.kafka import (
    SHARDS_MAX,
    Marker,
    TransactionalSender,
    check_name,
    client_settings,
    ensure_marker_topic,
    marker_topic,
    read_markers,
    transactional_id,
)
from penstock.client.outbox.messages import OutboxError, OutboxRow, RelayInterrupted, RowsRefused
from penstock.client.retry import Backoff, Deadline, attempts

__all__ = ("OnReject", "Relay", "RelayCounts", "agree_on_shards", "run_relays")


#: Relays that start together step on each other's toes for a moment.
PATIENCE_MS: Final = 10_000
_AGREEMENT_BACKOFF: Final = Backoff(base_ms=20, cap_ms=500)

SettlePrevious = Callable[[RelayAgreement], None]


def agree_on_shards(
    database: OutboxDatabase, name: str, shards: int, *, settle: SettlePrevious, stopping: threading.Event
) -> RelayAgreement | None:
    """Hold the table together with all relays of the same kind. None if it is time to stop.

    `settle` ends what relays of another kind have left. Raises OutboxError while they are at work.
    """
    found: RelayAgreement | None = None
    for _ in attempts(
        Deadline(PATIENCE_MS),
        _AGREEMENT_BACKOFF,
        Random(),
        sleep=lambda rest_s: _wait_unless_stopping(stopping, rest_s),
    ):
        if stopping.is_set():
            return None
        if database.hold_table(alone=False):
            found = database.agreement()
            if found is not None and (found.name, found.shards) == (name, shards):
                return found
            database.release_table()
        if database.hold_table(alone=True):
            _change_agreement(database, name, shards, settle)
            database.release_table()
    raise OutboxError(_disagreement_text(found, name, shards))


def _change_agreement(database: OutboxDatabase, name: str, shards: int, settle: SettlePrevious) -> None:
    """Alone: nobody else reads or writes the agreement."""
    before = database.agreement()
    if before is not None and (before.name, before.shards) != (name, shards):
        settle(before)
    database.agree(name, shards)


def _wait_unless_stopping(stopping: threading.Event, rest_s: float) -> None:
    stopping.wait(rest_s)


def _disagreement_text(found: RelayAgreement | None, name: str, shards: int) -> str:
    if found is None:
        return "other relays of this database come and go all the time: start them one after the other"
    return (
        f"relays of this database are at work with {found.shards} shards under the name {found.name}: "
        f"stop them all before starting any with {shards} shards under the name {name}"
    )


BATCH_ROWS: Final = 500
BATCH_ROWS_MAX: Final = 10_000
BATCH_BYTES: Final = 8 << 20
_POLL_S: Final = 5.0
_STANDBY_S: Final = 0.5
#: Who only looks whether there is a relay holds its lock for a moment.
_ONCE_WAIT_MS: Final = 500
_RESTART_BACKOFF: Final = Backoff(base_ms=100, cap_ms=10_000)


class OnReject(StrEnum):
    """What becomes of the rows behind one that the broker refuses for good."""

    #: Those of its key wait until somebody decides; the others go on.
    HOLD = "hold"
    #: All go on, so that the rejected one, if it is ever retried, comes out of order.
    SKIP = "skip"
    #: The relay ends.
    STOP = "stop"


@dataclass(slots=True)
class RelayCounts:
    """Since the relay was made. Written by one thread; any may look."""

    relayed: int = 0
    batches: int = 0
    #: Published by an earlier relay that did not come to delete them.
    settled: int = 0
    rejected: int = 0
    disturbances: int = 0


class Relay:
    """Of one shard. `run` may be called again after it has returned, by one thread at a time."""

    def __init__(
        self,
        url: str,
        bootstrap: str,
        *,
        name: str = "outbox",
        shards: int = 1,
        shard: int = 0,
        batch_rows: int = BATCH_ROWS,
        batch_bytes: int = BATCH_BYTES,
        poll_s: float = _POLL_S,
        on_reject: OnReject | str = OnReject.HOLD,
        take_over: bool = False,
        settings: Mapping[str, Any] | None = None,
        say: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        """`settings` are librdkafka's. Raises OutboxError for what cannot be."""
        _check_arguments(shards, shard, batch_rows)
        self.name, self.shards, self.shard = check_name(name), shards, shard
        self.counts = RelayCounts()
        self._url = url
        self._batch_rows, self._batch_bytes, self._poll_s = batch_rows, batch_bytes, poll_s
        #: Smaller while it is being found out which row is refused.
        self._rows_max = batch_rows
        self._on_reject = OnReject(on_reject)
        self._may_take_over = take_over
        self._settings = client_settings(bootstrap, settings)
        self._report = say

    def run(self, stopping: threading.Event | None = None, *, once: bool = False) -> RelayCounts:
        """Until `stopping` is set, or with `once` until nothing is left to relay. Raises OutboxError.

        Trouble that may pass is told and waited out.
        """
        stopping = stopping or threading.Event()
        chance, failures = Random(), 0
        while not stopping.is_set():
            before = self.counts.batches
            try:
                self._work(stopping, once)
                break
            except RelayInterrupted as error:
                self.counts.disturbances += 1
                failures = 0 if self.counts.batches > before else failures + 1
                if not stopping.is_set():
                    self.say(f"{error}; begins anew")
                stopping.wait(_RESTART_BACKOFF.delay_ms(failures, chance) / 1000)
        return self.counts

    def say(self, sentence: str) -> None:
        self._report(f"shard {self.shard} of {self.shards}: {sentence}")

    def _work(self, stopping: threading.Event, once: bool) -> None:
        database = self._open_database()
        try:
            agreement = agree_on_shards(
                database,
                self.name,
                self.shards,
                settle=lambda before: self._settle_others(database, before, stopping),
                stopping=stopping,
            )
            if agreement is None or not self._await_shard(database, stopping, once):
                return
            ensure_marker_topic(self._settings, self.name)
            sender = self._open_sender(self.name, self.shards, self.shard, stopping)
            try:
                markers = self._read_markers(self.name, stopping)
                foreign_keys = self._foreign_marker_keys(markers, agreement)
                self._settle(database, agreement, markers)
                session = _RelaySession(self, database, sender, agreement)
                session.mark(foreign_keys)
                self._relay_all(session, stopping, once)
            finally:
                sender.close()
        finally:
            database.close()

    def _open_database(self) -> OutboxDatabase:
        return open_database(self._url)

    def _open_sender(
        self, name: str, shards: int, shard: int, stopping: threading.Event
    ) -> TransactionalSender:
        identity = transactional_id(name, shards, shard)
        sender = TransactionalSender(self._settings, identity, marker_topic(name), stopping)
        sender.open()
        return sender

    def _await_shard(self, database: OutboxDatabase, stopping: threading.Event, once: bool) -> bool:
        """False if it is time to stop."""
        is_reported = False
        deadline = Deadline(_ONCE_WAIT_MS)
        while not database.hold_shard(self.shard):
            if once and deadline.is_over:
                raise OutboxError(f"another relay is at work on shard {self.shard} of {self.shards}")
            if not is_reported and not once:
                self.say("another relay is at work; waits to take its place")
                is_reported = True
            if stopping.wait(_ONCE_WAIT_MS / 10_000 if once else _STANDBY_S):
                return False
            database.query("SELECT 1")  # a session that is lost waits for nothing
        return True

    # What earlier relays have left

    def _settle_others(
        self, database: OutboxDatabase, before: RelayAgreement, stopping: threading.Event
    ) -> None:
        """Of another kind: even one that is not gone, and only cut off from the database, can commit nothing now."""
        self.say(f"follows {before.shards} shards under the name {before.name}; settles what they have left")
        ensure_marker_topic(self._settings, before.name)
        for shard in range(before.shards):
            self._open_sender(before.name, before.shards, shard, stopping).close()
        self._settle(database, before, self._read_markers(before.name, stopping))

    def _settle(self, database: OutboxDatabase, agreement: RelayAgreement, markers: Sequence[Marker]) -> None:
        """Delete what is published. A marker that is committed says so whosever shard it is."""
        for marker in markers:
            if marker.identity == agreement.identity:
                self.counts.settled += database.delete_published(marker.rows)

    def _read_markers(self, name: str, stopping: threading.Event) -> list[Marker]:
        return read_markers(self._settings, name, stopping)

    def _foreign_marker_keys(self, markers: Sequence[Marker], agreement: RelayAgreement) -> list[bytes]:
        """Keys of markers that another database has left, if we may take them over. Other shards see to their own."""
        ours = b"%d/%d" % (self.shards, self.shard)
        found = [marker for marker in markers if marker.shards != self.shards or marker.key == ours]
        foreign_keys = [marker.key for marker in found if marker.identity != agreement.identity]
        if foreign_keys and not self._may_take_over:
            raise OutboxError(
                f"topic {marker_topic(self.name)} has markers of another database: relay this one under "
                "another --name, or with --take-over if the other one is gone for good"
            )
        return [key for key in foreign_keys if key != ours]

    # What is new

    def _relay_all(self, session: _RelaySession, stopping: threading.Event, once: bool) -> None:
        self.say(f"relays to {self._settings['bootstrap.servers']}, markers in {marker_topic(self.name)}")
        while not stopping.is_set():
            rows = self._select(session.database, self._rows_max)
            if not rows and once:
                return
            if not rows:
                session.database.wait(self._poll_s, stopping)
                continue
            try:
                session.relay(rows)
                self._rows_max = min(2 * self._rows_max, self._batch_rows)
            except RowsRefused as refusal:
                self._rows_max = self._refused(session.database, rows, refusal)

    def _select(self, database: OutboxDatabase, rows_max: int) -> list[OutboxRow]:
        return database.batch(
            self.shard,
            self.shards,
            rows_max=rows_max,
            bytes_max=self._batch_bytes,
            holds_keys=self._on_reject is not OnReject.SKIP,
        )

    def _refused(self, database: OutboxDatabase, rows: Sequence[OutboxRow], refusal: RowsRefused) -> int:
        """How many to send together next. A row is rejected once it was refused alone, or is known to be the one."""
        culprits = refusal.culprits or ({rows[0].id: refusal.reason} if len(rows) == 1 else {})
        if not culprits:
            return len(rows) // 2
        held: set[tuple[str, bytes]] = set()
        for row in rows:
            if row.id not in culprits or (row.key is not None and (row.topic, row.key) in held):
                continue
            self._reject(database, row, culprits[row.id])
            if row.key is not None and self._on_reject is OnReject.HOLD:
                held.add((row.topic, row.key))  # later ones of its key wait where they are
        return len(rows)

    def _reject(self, database: OutboxDatabase, row: OutboxRow, reason: str) -> None:
        if self._on_reject is OnReject.STOP:
            raise OutboxError(f"row {row.id} ({row.topic}, message {row.message_id}) was refused: {reason}")
        database.check_held()
        database.reject(row.id, reason)
        self.counts.rejected += 1
        self.say(f"REJECTED row {row.id} ({row.topic}, message {row.message_id}): {reason}")


class _RelaySession:
    """One stretch of work: a lock that is held, a transactional id that is ours, and nothing left to settle."""

    def __init__(
        self, relay: Relay, database: OutboxDatabase, sender: TransactionalSender, agreement: RelayAgreement
    ) -> None:
        self._counts, self._topic = relay.counts, marker_topic(relay.name)
        self._marker_fields = {"identity": agreement.identity, "shards": relay.shards, "shard": relay.shard}
        self.database, self._sender = database, sender

    def mark(self, foreign_keys: Sequence[bytes]) -> None:
        """A transaction with nothing but a marker of no rows: what it fails of, no row is to blame for."""
        try:
            self._publish([], dict.fromkeys(foreign_keys))
        except RowsRefused as refusal:
            raise OutboxError(f"topic {self._topic}: {refusal.reason}") from None

    def relay(self, rows: Sequence[OutboxRow]) -> None:
        self._publish(rows)
        self.database.delete(row.id for row in rows)
        self._counts.relayed += len(rows)
        self._counts.batches += 1

    def _publish(self, rows: Sequence[OutboxRow], more: Mapping[bytes, None] = MappingProxyType({})) -> None:
        marker = Marker.of(rows, **self._marker_fields)  # type: ignore[arg-type]
        self._sender.send(rows, {marker.key: marker.to_bytes(), **more})
        self.database.check_held()
        self._sender.commit()


def _check_arguments(shards: int, shard: int, batch_rows: int) -> None:
    if not 1 <= shards <= SHARDS_MAX:
        raise OutboxError(f"an outbox has 1 to {SHARDS_MAX} shards, not {shards}")
    if not 0 <= shard < shards:
        raise OutboxError(f"of {shards} shards there is no shard {shard}: they are counted from 0")
    if not 1 <= batch_rows <= BATCH_ROWS_MAX:
        raise OutboxError(f"a batch has 1 to {BATCH_ROWS_MAX} rows, not {batch_rows}")


def run_relays(relays: Sequence[Relay], stopping: threading.Event, *, once: bool = False) -> None:
    """Returns when all have ended. Raises what the first of them has raised; the others then stop too."""
    failures: list[BaseException] = []

    def run(relay: Relay) -> None:
        try:
            relay.run(stopping, once=once)
        except BaseException as error:
            failures.append(error)
            stopping.set()

    threads = [
        threading.Thread(target=run, args=(relay,), name=f"outbox-{relay.shard}", daemon=True)
        for relay in relays
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
