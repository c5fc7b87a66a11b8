"""A share partition written without regard to speed, as a model: an object for each record, a loop for each rule."""

from dataclasses import dataclass, field

from penstock.groups.share.partition import in_flight_records
from penstock.groups.share.partition.share_partition_state import (
    ACCEPT,
    GAP,
    REJECT,
    RELEASE,
    RENEW,
    AcknowledgementBatch,
    AcquireLimits,
    ReadableRecords,
    SharePartitionPolicy,
)
from penstock.protocol.errors import ApiError, ErrorCode


@dataclass
class Record:
    state: int = in_flight_records.AVAILABLE
    count: int = 0
    owner: str | None = None
    time_ms: int = 0
    #: The state that it takes when the write is done, and in which write that is.
    target: int | None = None
    launched: bool = False

    @property
    def seen(self) -> int | str:
        return self.state if self.target is None else f"waiting for {self.target}"


@dataclass
class Naive:
    start: int
    records: dict[int, Record] = field(default_factory=dict)
    deleted_upto: int = 0

    @classmethod
    def load(
        cls,
        start: int,
        stored: dict[int, tuple[int, int]],
        policy: SharePartitionPolicy,
        now_ms: int,
        chance: float,
    ) -> "Naive":
        naive = cls(start)
        for offset in range(start, max(stored, default=start - 1) + 1):
            state, count = stored.get(offset, (in_flight_records.AVAILABLE, 0))
            record = naive.records[offset] = Record(state, count)
            if state == in_flight_records.AVAILABLE and count and policy.backoff is not None:
                record.state = in_flight_records.DELAYED
                record.time_ms = now_ms + policy.backoff.delay_ms(count, chance)
        naive.move_start()
        return naive

    @property
    def end(self) -> int:
        return self.start + len(self.records)

    def move_start(self) -> None:
        while self.records:
            first = self.records[self.start]
            if first.target is not None or first.state not in (
                in_flight_records.ACKNOWLEDGED,
                in_flight_records.ARCHIVED,
            ):
                return
            del self.records[self.start]
            self.start += 1

    def room(self, policy: SharePartitionPolicy) -> int:
        final = (in_flight_records.ACKNOWLEDGED, in_flight_records.ARCHIVED)
        locks = sum(1 for r in self.records.values() if r.target is not None or r.state not in final)
        return min(policy.locks_max - locks, policy.window_max - len(self.records))

    def acquire(
        self,
        member: str,
        found: ReadableRecords,
        limits: AcquireLimits,
        policy: SharePartitionPolicy,
        now_ms: int,
        *,
        reserve: bool = False,
    ) -> list[tuple[int, int]]:
        """The offsets handed out, each with its delivery count; or only paid for."""
        handed: list[tuple[int, int]] = []
        left, limit_at, has_last_time = limits.records_max, None, False
        for offset in range(found.first_offset, found.next_offset):
            is_hole = not any(first <= offset < end for first, end in found.spans)
            if offset >= self.end:
                if is_hole:
                    self.records[offset] = Record(in_flight_records.ARCHIVED)
                    continue
                if policy.is_at_most_once and not reserve:
                    break
                if limit_at is None or offset >= limit_at:
                    limit_at = self._new_limit(offset, found, limits, left, policy)
                    if limit_at is None:
                        break
                self.records[offset] = Record()
                left -= self._hand(offset, member, policy, now_ms, reserve, handed)
                continue
            record = self.records.get(offset)
            if record is None or record.target is not None:
                continue
            if is_hole:
                if record.state in (
                    in_flight_records.AVAILABLE,
                    in_flight_records.DELAYED,
                    in_flight_records.RESERVED,
                ):
                    record.state = in_flight_records.ARCHIVED
            elif left > 0 and self._is_ready(record, policy, reserve):
                is_last_time = not reserve and record.count + 1 >= policy.delivery_limit > 2
                if is_last_time and has_last_time:
                    continue
                has_last_time |= is_last_time
                left -= self._hand(offset, member, policy, now_ms, reserve, handed)
        self.move_start()
        return handed

    def _new_limit(
        self,
        offset: int,
        found: ReadableRecords,
        limits: AcquireLimits,
        left: int,
        policy: SharePartitionPolicy,
    ) -> int | None:
        """Up to where new records of this span may be taken."""
        room = self.room(policy)
        if left <= 0 or room <= 0:
            return None
        (span_end,) = (end for first, end in found.spans if first <= offset < end)
        limit = offset + min(left, room)
        if limit >= span_end:
            return span_end
        return limit if limits.exact else min(end for end in found.ends if end >= limit)

    def _is_ready(self, record: Record, policy: SharePartitionPolicy, reserve: bool) -> bool:
        if reserve:
            return record.state == in_flight_records.AVAILABLE
        if record.state == in_flight_records.RESERVED:
            return True
        return record.state == in_flight_records.AVAILABLE and not policy.is_at_most_once

    def _hand(
        self,
        offset: int,
        member: str,
        policy: SharePartitionPolicy,
        now_ms: int,
        reserve: bool,
        handed: list[tuple[int, int]],
    ) -> int:
        record = self.records[offset]
        if reserve:
            record.target = in_flight_records.ARCHIVED if record.count else in_flight_records.RESERVED
            record.count = max(record.count, 1)
            return 1
        if record.state == in_flight_records.RESERVED:
            record.state = in_flight_records.ACQUIRED_FINAL
        else:
            record.state = in_flight_records.ACQUIRED
            record.count += 1
        record.owner, record.time_ms = member, now_ms + policy.lock_ms
        handed.append((offset, record.count))
        return 1

    def acknowledge(
        self,
        member: str,
        batches: list[AcknowledgementBatch],
        policy: SharePartitionPolicy,
        now_ms: int,
        chance: float,
    ) -> None:
        said = {
            offset: types[0 if len(types) == 1 else offset - first]
            for first, last, types in batches
            for offset in range(first, last + 1)
            if offset >= min(self.deleted_upto, self.start)
        }
        if any(offset < self.start and offset >= self.deleted_upto for offset in said):
            raise ApiError(ErrorCode.invalid_record_state)
        said = {offset: kind for offset, kind in said.items() if offset >= self.start}
        if any(offset >= self.end for offset in said):
            raise ApiError(ErrorCode.invalid_request)
        for offset in said:
            record = self.records[offset]
            held = record.target is None and record.state in (
                in_flight_records.ACQUIRED,
                in_flight_records.ACQUIRED_FINAL,
            )
            if not held or record.owner != member:
                raise ApiError(ErrorCode.invalid_record_state)
        if RENEW in said.values() and not policy.may_renew:
            raise ApiError(ErrorCode.invalid_record_state)
        for offset, kind in said.items():
            self._answer(self.records[offset], kind, policy, now_ms, chance)
        self.move_start()

    def _answer(
        self, record: Record, kind: int, policy: SharePartitionPolicy, now_ms: int, chance: float
    ) -> None:
        if kind == RENEW:
            record.time_ms = now_ms + policy.lock_ms
        elif record.state == in_flight_records.ACQUIRED_FINAL:
            record.state = in_flight_records.ACKNOWLEDGED
        elif kind == ACCEPT:
            record.target = in_flight_records.ACKNOWLEDGED
        elif kind == GAP:
            record.target = in_flight_records.ARCHIVED
        elif kind == REJECT:
            record.target = (
                in_flight_records.REJECTED if policy.writes_dead_letters else in_flight_records.ARCHIVED
            )
        else:
            assert kind == RELEASE
            self._let_go(record, policy, now_ms, chance, in_flight_records.DELIVERY_LIMIT_REACHED)

    def _let_go(
        self, record: Record, policy: SharePartitionPolicy, now_ms: int, chance: float, dead_letter: int
    ) -> None:
        if record.state == in_flight_records.ACQUIRED_FINAL:
            record.state = in_flight_records.ACKNOWLEDGED
        elif policy.is_at_most_once:
            record.target = in_flight_records.ARCHIVED
        elif record.count >= policy.delivery_limit:
            record.target = dead_letter if policy.writes_dead_letters else in_flight_records.ARCHIVED
        elif policy.backoff is not None:
            record.target = in_flight_records.DELAYED
            record.time_ms = now_ms + policy.backoff.delay_ms(record.count, chance)
        else:
            record.target = in_flight_records.AVAILABLE

    def release(self, member: str, policy: SharePartitionPolicy, now_ms: int, chance: float) -> None:
        for record in self.records.values():
            if self._is_held(record) and record.owner == member:
                self._let_go(record, policy, now_ms, chance, in_flight_records.DELIVERY_LIMIT_REACHED)
        self.move_start()

    def _is_held(self, record: Record) -> bool:
        return record.target is None and record.state in (
            in_flight_records.ACQUIRED,
            in_flight_records.ACQUIRED_FINAL,
        )

    def tick(self, policy: SharePartitionPolicy, now_ms: int, chance: float) -> None:
        for record in self.records.values():
            if record.time_ms > now_ms:
                continue
            if self._is_held(record):
                self._let_go(record, policy, now_ms, chance, in_flight_records.LOCK_EXPIRED)
            elif record.state == in_flight_records.DELAYED and record.target is None:
                record.state = in_flight_records.AVAILABLE
        self.move_start()

    def log_start_moved(self, log_start: int) -> None:
        self.deleted_upto = max(self.deleted_upto, log_start)
        while self.start < log_start:
            record = self.records.get(self.start)
            if record is not None and record.target is not None:
                break
            self.records.pop(self.start, None)
            self.start += 1
        self.move_start()

    def launch(self) -> None:
        for record in self.records.values():
            record.launched = record.target is not None

    def settle(self) -> None:
        for record in self.records.values():
            if record.launched and record.target is not None:
                dead_letter = record.target in (
                    in_flight_records.DELIVERY_LIMIT_REACHED,
                    in_flight_records.REJECTED,
                    in_flight_records.LOCK_EXPIRED,
                )
                record.state = in_flight_records.ARCHIVED if dead_letter else record.target
                record.target, record.launched = None, False
        self.move_start()
