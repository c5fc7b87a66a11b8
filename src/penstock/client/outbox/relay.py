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
from penstock.client.retry import Deadline, attempts
from penstock.protocol.backoff import ExponentialBackoff

__all__ = ("OnReject", "Relay", "RelayCounts", "agree_on_shards", "run_relays")


#: Relays that start at the same time block each other for a moment.
AGREEMENT_TIMEOUT_MS: Final = 10_000
_AGREEMENT_BACKOFF: Final = ExponentialBackoff(base_ms=20, cap_ms=500)

SettlePrevious = Callable[[RelayAgreement], None]


def agree_on_shards(
    database: OutboxDatabase, name: str, shards: int, *, settle: SettlePrevious, stopping: threading.Event
) -> RelayAgreement | None:
    """Takes the table's lock, shared with all relays of the same name and number of shards. Returns None on stop.

    `settle` settles the transactions of earlier relays with other values. Raises OutboxError while such relays run.
    """
    found: RelayAgreement | None = None
    for _ in attempts(
        Deadline(AGREEMENT_TIMEOUT_MS),
        _AGREEMENT_BACKOFF,
        Random(),
        sleep=stopping.wait,
    ):
        if stopping.is_set():
            return None
        if database.hold_table(alone=False):
            found = database.agreement()
            if found is not None and (found.name, found.shards) == (name, shards):
                return found
            database.release_table()
        if database.hold_table(alone=True):
            before = database.agreement()
            if before is not None and (before.name, before.shards) != (name, shards):
                settle(before)
            database.agree(name, shards)
            database.release_table()
    if found is None:
        raise OutboxError(
            "other relays of this database keep starting and stopping: start relays one after the other"
        )
    raise OutboxError(
        f"relays of this database run with {found.shards} shards under the name {found.name}: "
        f"stop all of them before you start one with {shards} shards under the name {name}"
    )


BATCH_ROWS: Final = 500
BATCH_ROWS_MAX: Final = 10_000
BATCH_BYTES: Final = 8 << 20
_POLL_S: Final = 5.0
_STANDBY_S: Final = 0.5
#: `penstock outbox status` holds a shard's lock for a moment.
_ONCE_WAIT_MS: Final = 500
_RESTART_BACKOFF: Final = ExponentialBackoff(base_ms=100, cap_ms=10_000)


class OnReject(StrEnum):
    """How to treat the rows behind a row that the broker refuses for good."""

    #: Hold rows of the same key until an operator retries or discards the rejected row; relay the others.
    HOLD = "hold"
    #: Relay all other rows. If the rejected row is retried later, it is out of order.
    SKIP = "skip"
    #: Stop the relay.
    STOP = "stop"


@dataclass(slots=True)
class RelayCounts:
    """Counts since the relay was created. One thread writes them; any thread may read them."""

    relayed: int = 0
    batches: int = 0
    #: Rows that an earlier relay had published and not deleted.
    settled: int = 0
    rejected: int = 0
    restarts: int = 0


class Relay:
    """The relay of one shard. `run` may be called again after it has returned, by one thread at a time."""

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
        """`settings` are librdkafka settings. Raises OutboxError for invalid parameters."""
        _check_arguments(shards, shard, batch_rows)
        self.name, self.shards, self.shard = check_name(name), shards, shard
        self.counts = RelayCounts()
        self._url = url
        self._batch_rows, self._batch_bytes, self._poll_s = batch_rows, batch_bytes, poll_s
        #: Smaller than `batch_rows` while the relay searches for a refused row.
        self._rows_max = batch_rows
        self._on_reject = OnReject(on_reject)
        self._may_take_over = take_over
        self._settings = client_settings(bootstrap, settings)
        self._report = say

    def run(self, stopping: threading.Event | None = None, *, once: bool = False) -> RelayCounts:
        """Runs until `stopping` is set, or with `once` until all rows are relayed. Raises OutboxError.

        Reports errors that may go away, and restarts after a backoff.
        """
        stopping = stopping or threading.Event()
        chance, failures = Random(), 0
        while not stopping.is_set():
            before = self.counts.batches
            try:
                self._work(stopping, once)
                break
            except RelayInterrupted as error:
                self.counts.restarts += 1
                failures = 0 if self.counts.batches > before else failures + 1
                if not stopping.is_set():
                    self.say(f"{error}; restarting")
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

    def _read_markers(self, name: str, stopping: threading.Event) -> list[Marker]:
        return read_markers(self._settings, name, stopping)

    def _open_sender(
        self, name: str, shards: int, shard: int, stopping: threading.Event
    ) -> TransactionalSender:
        identity = transactional_id(name, shards, shard)
        sender = TransactionalSender(self._settings, identity, marker_topic(name), stopping)
        sender.open()
        return sender

    def _await_shard(self, database: OutboxDatabase, stopping: threading.Event, once: bool) -> bool:
        """Waits for the shard's lock. Returns False on stop."""
        is_reported = False
        deadline = Deadline(_ONCE_WAIT_MS)
        while not database.hold_shard(self.shard):
            if once and deadline.is_over:
                raise OutboxError(f"another relay runs for shard {self.shard} of {self.shards}")
            if not is_reported and not once:
                self.say("another relay runs for this shard; waiting to take over")
                is_reported = True
            if stopping.wait(_ONCE_WAIT_MS / 10_000 if once else _STANDBY_S):
                return False
            database.query("SELECT 1")  # detects a lost session
        return True

    # Settling transactions of earlier relays

    def _settle_others(
        self, database: OutboxDatabase, before: RelayAgreement, stopping: threading.Event
    ) -> None:
        """Settles relays with another name or number of shards.

        Fences them first, so that even a relay that still runs without its database connection cannot commit.
        """
        self.say(f"settling the transactions of {before.shards} shards under the name {before.name}")
        ensure_marker_topic(self._settings, before.name)
        for shard in range(before.shards):
            self._open_sender(before.name, before.shards, shard, stopping).close()
        self._settle(database, before, self._read_markers(before.name, stopping))

    def _settle(self, database: OutboxDatabase, agreement: RelayAgreement, markers: Sequence[Marker]) -> None:
        """Deletes the rows of all shards that committed markers name."""
        for marker in markers:
            if marker.identity == agreement.identity:
                self.counts.settled += database.delete_published(marker.rows)

    def _foreign_marker_keys(self, markers: Sequence[Marker], agreement: RelayAgreement) -> list[bytes]:
        """Returns the keys of markers of another database that this relay may delete.

        Raises OutboxError without `take_over`. Each shard handles its own markers.
        """
        ours = b"%d/%d" % (self.shards, self.shard)
        found = [marker for marker in markers if marker.shards != self.shards or marker.key == ours]
        foreign_keys = [marker.key for marker in found if marker.identity != agreement.identity]
        if foreign_keys and not self._may_take_over:
            raise OutboxError(
                f"topic {marker_topic(self.name)} has markers of another database: use another --name for this one, "
                "or --take-over if the other database no longer exists"
            )
        return [key for key in foreign_keys if key != ours]

    # Relaying new rows

    def _relay_all(self, session: _RelaySession, stopping: threading.Event, once: bool) -> None:
        self.say(f"relaying to {self._settings['bootstrap.servers']}, markers in {marker_topic(self.name)}")
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
        """Rejects rows that are known to be refused. Returns how many rows to send together next."""
        culprits = refusal.culprits or ({rows[0].id: refusal.reason} if len(rows) == 1 else {})
        if not culprits:
            return len(rows) // 2
        held: set[tuple[str, bytes]] = set()
        for row in rows:
            if row.id not in culprits or (row.key is not None and (row.topic, row.key) in held):
                continue
            self._reject(database, row, culprits[row.id])
            if row.key is not None and self._on_reject is OnReject.HOLD:
                held.add((row.topic, row.key))  # later rows of this key wait in the outbox
        return len(rows)

    def _reject(self, database: OutboxDatabase, row: OutboxRow, reason: str) -> None:
        if self._on_reject is OnReject.STOP:
            raise OutboxError(
                f"the broker refused row {row.id} ({row.topic}, message {row.message_id}): {reason}"
            )
        database.check_held()
        database.reject(row.id, reason)
        self.counts.rejected += 1
        self.say(f"REJECTED row {row.id} ({row.topic}, message {row.message_id}): {reason}")


class _RelaySession:
    """Relays rows after the lock is held, the transactional id is taken over, and earlier relays are settled."""

    def __init__(
        self, relay: Relay, database: OutboxDatabase, sender: TransactionalSender, agreement: RelayAgreement
    ) -> None:
        self._counts, self._topic = relay.counts, marker_topic(relay.name)
        self._marker_fields = {"identity": agreement.identity, "shards": relay.shards, "shard": relay.shard}
        self.database, self._sender = database, sender

    def mark(self, foreign_keys: Sequence[bytes]) -> None:
        """Commits a marker without rows, so that errors of the marker topic show before the first row is sent."""
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
        raise OutboxError(
            f"there is no shard {shard}: with {shards} shards they are numbered from 0 to {shards - 1}"
        )
    if not 1 <= batch_rows <= BATCH_ROWS_MAX:
        raise OutboxError(f"a batch has 1 to {BATCH_ROWS_MAX} rows, not {batch_rows}")


def run_relays(relays: Sequence[Relay], stopping: threading.Event, *, once: bool = False) -> None:
    """Runs relays in threads until all have ended. If one raises, stops the others and raises the same."""
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
