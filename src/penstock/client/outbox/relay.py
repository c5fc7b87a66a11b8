"""The relay: rows of one shard become messages, in the order of their ids, each of them once.

A batch and a marker with its row ids are one Kafka transaction; then the rows are deleted. Whatever ends a relay in
between, the next one begins with the same three steps: it makes the transactional id its own, which commits or aborts
what was under way; it reads the last markers; and it deletes the rows that they name. Where it goes on is for the table
to say, and no memory of an id: ids are given out in one order and committed in another.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from random import Random
from types import MappingProxyType
from typing import Any, Final

from penstock.client.outbox.agreeing import agree
from penstock.client.outbox.databases.base import Agreement, Database
from penstock.client.outbox.databases.opening import open_database
from penstock.client.outbox.errors import Disturbed, OutboxError, RowsRefused
from penstock.client.outbox.kafka import settings_of
from penstock.client.outbox.marker_log import ensure_topic, read_markers
from penstock.client.outbox.markers import SHARDS_MAX, Marker, check_name, marker_topic, transactional_id
from penstock.client.outbox.rows import Row
from penstock.client.outbox.sending import Sender
from penstock.client.retrying import Backoff, Deadline

__all__ = ["OnReject", "Relay", "RelayCounts"]

BATCH_ROWS: Final = 500
BATCH_ROWS_MAX: Final = 10_000
BATCH_BYTES: Final = 8 << 20
_POLL_S: Final = 5.0
_STANDBY_S: Final = 0.5
#: Who only looks whether there is a relay holds its lock for a moment.
_ONCE_MS: Final = 500
_RESTS: Final = Backoff(base_ms=100, cap_ms=10_000)


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
        _check(shards, shard, batch_rows)
        self.name, self.shards, self.shard = check_name(name), shards, shard
        self.counts = RelayCounts()
        self._url = url
        self._batch_rows, self._batch_bytes, self._poll_s = batch_rows, batch_bytes, poll_s
        #: Smaller while it is being found out which row is refused.
        self._rows_max = batch_rows
        self._on_reject = OnReject(on_reject)
        self._may_take_over = take_over
        self._settings = settings_of(bootstrap, settings)
        self._tell = say

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
            except Disturbed as error:
                self.counts.disturbances += 1
                failures = 0 if self.counts.batches > before else failures + 1
                if not stopping.is_set():
                    self.say(f"{error}; begins anew")
                stopping.wait(_RESTS.delay_ms(failures, chance) / 1000)
        return self.counts

    def say(self, sentence: str) -> None:
        self._tell(f"shard {self.shard} of {self.shards}: {sentence}")

    def _work(self, stopping: threading.Event, once: bool) -> None:
        database = self._open_database()
        try:
            agreement = agree(
                database,
                self.name,
                self.shards,
                settle=lambda before: self._settle_others(database, before, stopping),
                stopping=stopping,
            )
            if agreement is None or not self._await_shard(database, stopping, once):
                return
            ensure_topic(self._settings, self.name)
            sender = self._open_sender(self.name, self.shards, self.shard, stopping)
            try:
                markers = self._read_markers(self.name, stopping)
                strangers = self._strangers(markers, agreement)
                self._settle(database, agreement, markers)
                shift = _Shift(self, database, sender, agreement)
                shift.mark(strangers)
                self._relay_all(shift, stopping, once)
            finally:
                sender.close()
        finally:
            database.close()

    def _open_database(self) -> Database:
        return open_database(self._url)

    def _open_sender(self, name: str, shards: int, shard: int, stopping: threading.Event) -> Sender:
        identity = transactional_id(name, shards, shard)
        sender = Sender(self._settings, identity, marker_topic(name), stopping)
        sender.open()
        return sender

    def _await_shard(self, database: Database, stopping: threading.Event, once: bool) -> bool:
        """False if it is time to stop."""
        is_told = False
        patience = Deadline(_ONCE_MS)
        while not database.hold_shard(self.shard):
            if once and patience.is_over:
                raise OutboxError(f"another relay is at work on shard {self.shard} of {self.shards}")
            if not is_told and not once:
                self.say("another relay is at work; waits to take its place")
                is_told = True
            if stopping.wait(_ONCE_MS / 10_000 if once else _STANDBY_S):
                return False
            database.query("SELECT 1")  # a session that is lost waits for nothing
        return True

    # What earlier relays have left

    def _settle_others(self, database: Database, before: Agreement, stopping: threading.Event) -> None:
        """Of another kind: even one that is not gone, and only cut off from the database, can commit nothing now."""
        self.say(f"follows {before.shards} shards under the name {before.name}; settles what they have left")
        ensure_topic(self._settings, before.name)
        for shard in range(before.shards):
            self._open_sender(before.name, before.shards, shard, stopping).close()
        self._settle(database, before, self._read_markers(before.name, stopping))

    def _settle(self, database: Database, agreement: Agreement, markers: Sequence[Marker]) -> None:
        """Delete what is published. A marker that is committed says so whosever shard it is."""
        for marker in markers:
            if marker.identity == agreement.identity:
                self.counts.settled += database.delete_published(marker.rows)

    def _read_markers(self, name: str, stopping: threading.Event) -> list[Marker]:
        return read_markers(self._settings, name, stopping)

    def _strangers(self, markers: Sequence[Marker], agreement: Agreement) -> list[bytes]:
        """Keys of markers that another database has left, if we may take them over. Other shards see to their own."""
        ours = b"%d/%d" % (self.shards, self.shard)
        found = [marker for marker in markers if marker.shards != self.shards or marker.key == ours]
        strangers = [marker.key for marker in found if marker.identity != agreement.identity]
        if strangers and not self._may_take_over:
            raise OutboxError(
                f"topic {marker_topic(self.name)} has markers of another database: relay this one under "
                "another --name, or with --take-over if the other one is gone for good"
            )
        return [key for key in strangers if key != ours]

    # What is new

    def _relay_all(self, shift: _Shift, stopping: threading.Event, once: bool) -> None:
        self.say(f"relays to {self._settings['bootstrap.servers']}, markers in {marker_topic(self.name)}")
        while not stopping.is_set():
            rows = self._select(shift.database, self._rows_max)
            if not rows and once:
                return
            if not rows:
                shift.database.wait(self._poll_s, stopping)
                continue
            try:
                shift.relay(rows)
                self._rows_max = min(2 * self._rows_max, self._batch_rows)
            except RowsRefused as refusal:
                self._rows_max = self._refused(shift.database, rows, refusal)

    def _select(self, database: Database, rows_max: int) -> list[Row]:
        return database.batch(
            self.shard,
            self.shards,
            rows_max=rows_max,
            bytes_max=self._batch_bytes,
            holds_keys=self._on_reject is not OnReject.SKIP,
        )

    def _refused(self, database: Database, rows: Sequence[Row], refusal: RowsRefused) -> int:
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

    def _reject(self, database: Database, row: Row, reason: str) -> None:
        if self._on_reject is OnReject.STOP:
            raise OutboxError(f"row {row.id} ({row.topic}, message {row.message_id}) was refused: {reason}")
        database.check_held()
        database.reject(row.id, reason)
        self.counts.rejected += 1
        self.say(f"REJECTED row {row.id} ({row.topic}, message {row.message_id}): {reason}")


class _Shift:
    """One stretch of work: a lock that is held, a transactional id that is ours, and nothing left to settle."""

    def __init__(self, relay: Relay, database: Database, sender: Sender, agreement: Agreement) -> None:
        self._counts, self._topic = relay.counts, marker_topic(relay.name)
        self._place = {"identity": agreement.identity, "shards": relay.shards, "shard": relay.shard}
        self.database, self._sender = database, sender

    def mark(self, strangers: Sequence[bytes]) -> None:
        """A transaction with nothing but a marker of no rows: what it fails of, no row is to blame for."""
        try:
            self._publish([], dict.fromkeys(strangers))
        except RowsRefused as refusal:
            raise OutboxError(f"topic {self._topic}: {refusal.reason}") from None

    def relay(self, rows: Sequence[Row]) -> None:
        self._publish(rows)
        self.database.delete(row.id for row in rows)
        self._counts.relayed += len(rows)
        self._counts.batches += 1

    def _publish(self, rows: Sequence[Row], more: Mapping[bytes, None] = MappingProxyType({})) -> None:
        marker = Marker.of(rows, **self._place)  # type: ignore[arg-type]
        self._sender.send(rows, {marker.key: marker.to_bytes(), **more})
        self.database.check_held()
        self._sender.commit()


def _check(shards: int, shard: int, batch_rows: int) -> None:
    if not 1 <= shards <= SHARDS_MAX:
        raise OutboxError(f"an outbox has 1 to {SHARDS_MAX} shards, not {shards}")
    if not 0 <= shard < shards:
        raise OutboxError(f"of {shards} shards there is no shard {shard}: they are counted from 0")
    if not 1 <= batch_rows <= BATCH_ROWS_MAX:
        raise OutboxError(f"a batch has 1 to {BATCH_ROWS_MAX} rows, not {batch_rows}")
