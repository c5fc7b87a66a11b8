"""One shard of the share coordinator: the share partitions of one partition of `__share_group_state`.

State and dead letters are kept apart: when a share partition is deleted, its pending dead letters stay until they are
written.
"""

from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from operator import le
from typing import Final
from uuid import UUID

from penstock.groups.share.state import share_state_records
from penstock.groups.share.state.dead_letters import FinishedCounts, FinishedInSecond
from penstock.groups.share.state.share_state import (
    ACKNOWLEDGED,
    ARCHIVED,
    AVAILABLE,
    DEAD_LETTER_STATES,
    NO_DELIVERY_TOTALS,
    UNSET,
    DeleteState,
    DeliveryTotals,
    InitializeState,
    ReadState,
    ReadStateSummary,
    SharePartitionKey,
    ShareState,
    ShareStateReply,
    ShareStateRequest,
    ShareStateSummary,
    StateRange,
    StoreWorkerErrors,
    WriteState,
    drop_before,
    normalize,
)
from penstock.groups.share.state.share_state_records import (
    DeadLetterPlan,
    SettledPlan,
    ShareSnapshot,
    ShareUpdate,
    decode_key,
    encode_key,
)
from penstock.groups.share.state.stored_share_state import (
    DeadLetterView,
    KeyValue,
    StoredDeadLetters,
    StoredShareState,
    split_dead_letters,
)
from penstock.protocol.errors import ErrorCode
from penstock.protocol.stored_records import key_type

ReplyToken = Hashable

_STATES: Final = frozenset({AVAILABLE, ACKNOWLEDGED, ARCHIVED, *DEAD_LETTER_STATES})
_COUNT_MAX: Final = (1 << 15) - 1
_KIND_BYTES: Final = 2
#: The most ranges of pending dead letters in one view.
_VIEW_RANGES_MAX: Final = 5_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareStateResult:
    """The caller appends the records as one batch, replays them, and sends the replies once they are committed."""

    records: tuple[KeyValue, ...] = ()
    replies: tuple[tuple[ReplyToken, object], ...] = ()
    producer: None = None  # the records of this coordinator are never part of a transaction


class ShareCoordinatorShard:
    __slots__ = (
        "_busy",
        "_dead_letters",
        "_keys",
        "_states",
        "_totals",
        "_traffic",
        "_updates_per_snapshot",
        "_watcher",
        "unknown_records",
    )

    def __init__(self, *, updates_per_snapshot: int = 500) -> None:
        self._updates_per_snapshot = updates_per_snapshot
        # The dictionaries are keyed by a record's key without its kind, so that replay needs no decoding for a lookup.
        self._states: dict[bytes, StoredShareState] = {}
        self._dead_letters: dict[bytes, StoredDeadLetters] = {}
        self._totals: dict[bytes, DeliveryTotals] = {}
        self._keys: dict[bytes, SharePartitionKey] = {}
        #: Records of unknown kinds, which replay skips.
        self.unknown_records = 0
        # The fields below are not stored. Losing them with the shard does no harm.
        self._watcher: ReplyToken | None = None
        self._busy: frozenset[bytes] = frozenset()
        self._traffic = FinishedCounts()

    def __repr__(self) -> str:
        return f"<ShareCoordinatorShard of {len(self._states)} share partitions>"

    # Replay

    #: Producers never write to the log of this shard in transactions.
    transactional: None = None

    def replay(self, key: bytes, value: bytes | None) -> None:
        kind, name = key_type(key), key[_KIND_BYTES:]
        if kind == share_state_records.SHARE_UPDATE:
            self._replay_update(name, key, value)
        elif kind == share_state_records.SHARE_SNAPSHOT:
            self._replay_snapshot(name, key, value)
        elif (
            share_state_records.DEAD_LETTERS_PENDING <= kind <= share_state_records.DEAD_LETTER_SNAPSHOT
            or kind == share_state_records.WORKER_ERRORS
        ):
            self._replay_dead_letters(kind, name, key, value)
        elif kind == share_state_records.DELIVERY_TOTALS:
            self._replay_totals(name, key, value)
        elif kind == share_state_records.RECORD_DELAYS:
            self._replay_delays(name, value)
        else:
            self.unknown_records += 1

    def _replay_update(self, name: bytes, key: bytes, value: bytes | None) -> None:
        if value is None:
            return
        update = share_state_records.decode_update(value)
        state = self._states.get(name)
        if state is None:
            # Kafka may have deleted the earlier records, the snapshot included, because it no longer needed them.
            state = self._states[name] = StoredShareState(ShareSnapshot(0, 0, UNSET, UNSET, 0, 0, UNSET, ()))
            self._keys[name] = decode_key(key)
        before = state.progress
        state.apply(update)
        self._count_finished(name, before, state.progress)

    def _replay_snapshot(self, name: bytes, key: bytes, value: bytes | None) -> None:
        if value is None:
            self._states.pop(name, None)
            self._forget_name(name)
            return
        snapshot, state = share_state_records.decode_snapshot(value), self._states.get(name)
        if state is None:
            self._states[name] = StoredShareState(snapshot)
            self._keys[name] = decode_key(key)
            return
        before = state.progress
        same_history = snapshot.state_epoch == state.state_epoch
        state.install(snapshot)
        if same_history:
            self._count_finished(name, before, state.progress)

    def _count_finished(self, name: bytes, before: int | None, after: int | None) -> None:
        if before is not None and after is not None and after > before:
            self._traffic.finish(self._keys[name].group, after - before)

    def _replay_dead_letters(self, kind: int, name: bytes, key: bytes, value: bytes | None) -> None:
        if value is None:
            self._dead_letters.pop(name, None)
            self._forget_name(name)
            return
        dead_letters = self._dead_letters.get(name)
        if dead_letters is None:
            dead_letters = self._dead_letters[name] = StoredDeadLetters()
            self._keys[name] = decode_key(key)
        match kind:
            case share_state_records.DEAD_LETTERS_PENDING:
                dead_letters.add(share_state_records.decode_pending(value))
            case share_state_records.DEAD_LETTER_PLAN:
                dead_letters.begin(share_state_records.decode_plan(value))
            case share_state_records.DEAD_LETTER_PLAN_SETTLED:
                dead_letters.settle(share_state_records.decode_settled(value))
            case share_state_records.WORKER_ERRORS:
                dead_letters.add_errors(share_state_records.decode_errors(value))
            case _:
                dead_letters.install(share_state_records.decode_dead_letter_snapshot(value))

    def _replay_totals(self, name: bytes, key: bytes, value: bytes | None) -> None:
        if value is None:
            self._totals.pop(name, None)
            self._forget_name(name)
            return
        self._totals[name] = share_state_records.decode_totals(value)
        self._keys.setdefault(name, decode_key(key))

    def _replay_delays(self, name: bytes, value: bytes | None) -> None:
        state = self._states.get(name)
        if state is not None and value is not None:
            state.add_delays(share_state_records.decode_delays(value))

    def _forget_name(self, name: bytes) -> None:
        if name not in self._states and name not in self._dead_letters and name not in self._totals:
            self._keys.pop(name, None)

    # Time: a shard has no timers.

    def loaded(self, now_ms: int) -> ShareStateResult:
        self._traffic.take()  # replayed records became final at an unknown time in the past
        return ShareStateResult()

    def tick(self, now_ms: int) -> ShareStateResult:
        return ShareStateResult()

    def next_deadline_ms(self) -> int | None:
        return None

    def clock_moved(self, by_ms: int) -> None:
        pass

    # State

    def handle(
        self, requests: Sequence[ShareStateRequest], token: ReplyToken, *, now_ms: int
    ) -> ShareStateResult:
        """Reply to all requests at once. They must be for different share partitions."""
        self._traffic.now(now_ms)
        stored: list[KeyValue] = []
        replies = []
        for request in requests:
            match request:
                case WriteState():
                    replies.append(self._write(request, stored, now_ms))
                case ReadState():
                    replies.append(self._read(request, stored, now_ms))
                case InitializeState():
                    replies.append(self._initialize(request, stored, now_ms))
                case DeleteState():
                    replies.append(self._delete(request, stored))
                case ReadStateSummary():
                    replies.append(self._summary(request))
                case StoreWorkerErrors():
                    replies.append(self._store_errors(request, stored))
        with_pending = [key[_KIND_BYTES:] for key, _ in stored if key[:_KIND_BYTES] == _PENDING_KIND]
        return self._work(stored, ((token, tuple(replies)),), with_pending)

    def _write(self, write: WriteState, stored: list[KeyValue], now_ms: int) -> ShareStateReply:
        name = _name(write.key)
        state = self._states.get(name)
        if state is None:
            return _INVALID_WRITE
        if UNSET != write.leader_epoch < state.leader_epoch:
            return _FENCED_LEADER
        if write.state_epoch not in (UNSET, state.state_epoch):
            # A later epoch is fenced too: a group that was deleted and created again starts with lower epochs.
            return _FENCED_STATE
        if write.totals is not None and min(write.totals) < 0:
            return _INVALID_BATCHES
        if any(min(delay) < 0 or delay.delivery_count > _COUNT_MAX for delay in write.delays):
            return _INVALID_BATCHES
        batches, highest = write.batches, _highest_state(write.batches)
        if highest is None:
            return _INVALID_BATCHES
        if highest > ARCHIVED:
            batches, dead_lettered = split_dead_letters(batches)
            self._store_dead_letters(name, state, dead_lettered, stored)
        leader_epoch = state.leader_epoch if write.leader_epoch == UNSET else write.leader_epoch
        write = _without_regress(write, state)
        stored.append(self._stored(name, state, leader_epoch, write, normalize(batches), now_ms))
        if write.totals is not None:
            self._add_totals(name, write.totals, stored)
        if write.delays:
            # After the update of their records, and in the same batch.
            stored.append((_DELAYS_KIND + name, share_state_records.encode_delays(write.delays)))
        return _DONE

    def _add_totals(self, name: bytes, totals: DeliveryTotals, stored: list[KeyValue]) -> None:
        """Store totals in the same batch as the state. A late write does not lower them."""
        before = self._totals.get(name, NO_DELIVERY_TOTALS)
        now = totals.at_least(before)
        if now != before:
            stored.append((_TOTALS_KIND + name, share_state_records.encode_totals(now)))

    def _stored(
        self,
        name: bytes,
        state: StoredShareState,
        leader_epoch: int,
        write: WriteState,
        batches: Sequence[StateRange],
        now_ms: int,
    ) -> KeyValue:
        if batches and batches[0][0] < write.start_offset:
            batches = list(batches)
            drop_before(batches, write.start_offset)
        update = ShareUpdate(
            state.snapshot_epoch, leader_epoch, write.start_offset, write.delivery_complete_count, batches
        )
        if state.updates >= self._updates_per_snapshot:
            return _SNAPSHOT_KIND + name, share_state_records.encode_snapshot(
                state.snapshot_with(update, now_ms)
            )
        return _UPDATE_KIND + name, share_state_records.encode_update(update)

    def _store_dead_letters(
        self,
        name: bytes,
        state: StoredShareState,
        dead_lettered: Sequence[StateRange],
        stored: list[KeyValue],
    ) -> None:
        new = state.new_dead_letters(dead_lettered)
        if new:
            stored.append((_PENDING_KIND + name, share_state_records.encode_pending(new)))

    def _read(self, read: ReadState, stored: list[KeyValue], now_ms: int) -> ShareStateReply:
        name = _name(read.key)
        state = self._states.get(name)
        if state is None:
            return _INVALID_READ
        if UNSET != read.leader_epoch < state.leader_epoch:
            return _FENCED_LEADER
        if read.leader_epoch > state.leader_epoch:
            # The epoch is stored, so that the previous leader stays fenced when the coordinator changes.
            fence = WriteState(
                read.key,
                state.state_epoch,
                read.leader_epoch,
                state.start_offset,
                state.delivery_complete_count,
                (),
            )
            stored.append(self._stored(name, state, read.leader_epoch, fence, (), now_ms))
        return ShareStateReply(state=state.view(self._totals.get(name, NO_DELIVERY_TOTALS)))

    def _initialize(self, request: InitializeState, stored: list[KeyValue], now_ms: int) -> ShareStateReply:
        name = _name(request.key)
        state = self._states.get(name)
        if request.start_offset < UNSET:
            return _INVALID_START
        known_epoch = 0 if state is None else max(state.state_epoch, 0)
        if request.state_epoch > known_epoch + _STATE_EPOCHS_AHEAD_MAX:
            return _NO_SUCH_STATE_EPOCH
        refusal = None if state is None else _initialize_refusal(request, state)
        if refusal is not None:
            return refusal
        snapshot = ShareSnapshot(
            0 if state is None else state.snapshot_epoch + 1,
            request.state_epoch,
            0 if state is None else state.leader_epoch,
            request.start_offset,
            now_ms,
            now_ms,
            UNSET if request.start_offset == UNSET else 0,
            (),
        )
        stored.append((_SNAPSHOT_KIND + name, share_state_records.encode_snapshot(snapshot)))
        return _DONE

    def _delete(self, request: DeleteState, stored: list[KeyValue]) -> ShareStateReply:
        name = _name(request.key)
        state = self._states.get(name)
        if state is not None and UNSET != request.state_epoch < state.state_epoch:
            return _FENCED_STATE
        self._delete_state(name, stored)
        return _DONE

    def _delete_state(self, name: bytes, stored: list[KeyValue]) -> None:
        if name in self._states:
            stored.append((_SNAPSHOT_KIND + name, None))
        if name in self._totals:
            stored.append((_TOTALS_KIND + name, None))
        dead_letters = self._dead_letters.get(name)
        if dead_letters is not None and not dead_letters.pending:
            stored.append((_DEAD_LETTER_SNAPSHOT_KIND + name, None))

    def _store_errors(self, request: StoreWorkerErrors, stored: list[KeyValue]) -> ShareStateReply:
        name = _name(request.key)
        if name not in self._states:
            return _INVALID_WRITE
        stored.append((_ERRORS_KIND + name, share_state_records.encode_errors(request.key, request.failures)))
        return _DONE

    def _summary(self, request: ReadStateSummary) -> ShareStateReply:
        state = self._states.get(_name(request.key))
        return ShareStateReply(summary=_NO_SUMMARY if state is None else state.summary())

    def forget_topics(self, topic_ids: Collection[UUID], token: ReplyToken) -> ShareStateResult:
        """Delete the share partitions of deleted topics."""
        stored: list[KeyValue] = []
        for name, key in self._keys.items():
            if key.topic_id in topic_ids:
                self._delete_state(name, stored)
        return self._work(stored, ((token, None),))

    # Dead letters

    def next_dead_letters(self, busy: Iterable[SharePartitionKey], token: ReplyToken) -> ShareStateResult:
        """Reply with the share partitions that have pending dead letters, except `busy`; wait while there are none.

        There is one writer, so a new request replaces an earlier one that still waits.
        """
        self._watcher, self._busy = token, frozenset(map(_name, busy))
        return self._work(
            [], (), [name for name, dead_letters in self._dead_letters.items() if dead_letters.pending]
        )

    def _work(
        self,
        stored: list[KeyValue],
        replies: tuple[tuple[ReplyToken, object], ...],
        with_pending: Iterable[bytes] = (),
    ) -> ShareStateResult:
        if self._watcher is not None:
            keys = tuple(decode_key(_PENDING_KIND + name) for name in with_pending if name not in self._busy)
            if keys:
                replies += ((self._watcher, keys),)
                self._watcher = None
        return ShareStateResult(records=tuple(stored), replies=replies)

    def pending_dead_letters(self, key: SharePartitionKey) -> DeadLetterView | None:
        """Return None if no dead letter is pending."""
        dead_letters = self._dead_letters.get(_name(key))
        if dead_letters is None or not dead_letters.pending:
            return None
        return dead_letters.view(key, _VIEW_RANGES_MAX)

    def plan_dead_letters(
        self, key: SharePartitionKey, plan: DeadLetterPlan, token: ReplyToken
    ) -> ShareStateResult:
        """Reply with True if the plan is stored, with False if it no longer matches the pending dead letters."""
        name = _name(key)
        dead_letters = self._dead_letters.get(name)
        if dead_letters is None or dead_letters.refuses(plan):
            return self._work([], ((token, False),))
        return self._work([(_PLAN_KIND + name, share_state_records.encode_plan(plan))], ((token, True),))

    def settle_dead_letters(
        self, key: SharePartitionKey, settled: SettledPlan, plan: DeadLetterPlan | None, token: ReplyToken
    ) -> ShareStateResult:
        """End a plan: its dead letters are written if anything is resolved; otherwise it is abandoned.

        Reply with False if `plan` was not the open plan.
        """
        name = _name(key)
        dead_letters = self._dead_letters.get(name)
        if dead_letters is None or dead_letters.plan != plan:
            return self._work([], ((token, False),))
        return self._work(
            [(_SETTLED_KIND + name, share_state_records.encode_settled(settled))], ((token, True),)
        )

    def forget_dead_letters(self, key: SharePartitionKey, token: ReplyToken) -> ShareStateResult:
        """Delete the dead-letter counts of a deleted share partition once none of its dead letters is pending."""
        name = _name(key)
        dead_letters = self._dead_letters.get(name)
        if dead_letters is None or dead_letters.pending or name in self._states:
            return self._work([], ((token, False),))
        return self._work([(_DEAD_LETTER_SNAPSHOT_KIND + name, None)], ((token, True),))

    def take_finished(self) -> tuple[FinishedInSecond, ...]:
        """Return how many records became final since the last call, for about the last minute with traffic."""
        return self._traffic.take()

    # Checkpoints and queries

    def checkpoint(
        self, names: Iterable[bytes], token: ReplyToken, *, now_ms: int, bytes_max: int
    ) -> ShareStateResult:
        """Write the state of share partitions to the log again, so that the log before can be deleted.

        `names` are some of `names()`. Reply with how many of them were written: as many as `bytes_max` allows, and at
        least one.
        """
        stored: list[KeyValue] = []
        count = size = 0
        for name in names:
            records = self._records_of(name, now_ms)
            size += sum(len(key) + len(value or b"") for key, value in records)
            if count and size > bytes_max:
                break
            stored += records
            count += 1
        return self._work(stored, ((token, count),))

    def _records_of(self, name: bytes, now_ms: int) -> list[KeyValue]:
        records: list[KeyValue] = []
        state, dead_letters = self._states.get(name), self._dead_letters.get(name)
        if state is not None:
            records.append(
                (_SNAPSHOT_KIND + name, share_state_records.encode_snapshot(state.snapshot(now_ms)))
            )
            delays = state.current_delays()
            if delays:
                records.append((_DELAYS_KIND + name, share_state_records.encode_delays(delays)))
        if name in self._totals:
            records.append((_TOTALS_KIND + name, share_state_records.encode_totals(self._totals[name])))
        if dead_letters is not None:
            records += dead_letters.snapshot(self._keys[name])
        return records

    def names(self) -> tuple[bytes, ...]:
        return tuple(self._keys)

    def keys(self) -> tuple[SharePartitionKey, ...]:
        return tuple(self._keys.values())

    def topic_ids(self) -> tuple[UUID, ...]:
        return tuple(dict.fromkeys(key.topic_id for key in self._keys.values()))

    def stored(
        self,
    ) -> dict[SharePartitionKey, tuple[ShareState | None, ShareStateSummary | None, DeadLetterView | None]]:
        """Return everything that a shard loaded from the same records would have too."""
        return {key: self._stored_of(name, key) for name, key in sorted(self._keys.items())}

    def _stored_of(
        self, name: bytes, key: SharePartitionKey
    ) -> tuple[ShareState | None, ShareStateSummary | None, DeadLetterView | None]:
        state, dead_letters = self._states.get(name), self._dead_letters.get(name)
        return (
            None if state is None else state.view(self._totals.get(name, NO_DELIVERY_TOTALS)),
            None if state is None else state.summary(),
            None if dead_letters is None else dead_letters.view(key, dead_letters.pending_count),
        )

    def totals(self) -> dict[SharePartitionKey, DeliveryTotals]:
        """Return the totals of the share partitions that have any."""
        return {self._keys[name]: totals for name, totals in self._totals.items()}

    def pending_by_group(self) -> dict[str, int]:
        """Return the number of pending dead letters by group."""
        pending: dict[str, int] = {}
        for name, dead_letters in self._dead_letters.items():
            group = self._keys[name].group
            pending[group] = pending.get(group, 0) + dead_letters.pending_count
        return pending

    def counts(self) -> tuple[int, int, int]:
        """Return how many dead letters are pending, written and lost."""
        all_dead_letters = self._dead_letters.values()
        return (
            sum(one.pending_count for one in all_dead_letters),
            sum(one.written for one in all_dead_letters),
            sum(one.lost for one in all_dead_letters),
        )


def _name(key: SharePartitionKey) -> bytes:
    return encode_key(0, key)[_KIND_BYTES:]


_ANY = SharePartitionKey("", UUID(int=0), 0)
(
    _SNAPSHOT_KIND,
    _UPDATE_KIND,
    _PENDING_KIND,
    _PLAN_KIND,
    _SETTLED_KIND,
    _DEAD_LETTER_SNAPSHOT_KIND,
    _TOTALS_KIND,
    _ERRORS_KIND,
    _DELAYS_KIND,
) = (
    encode_key(kind, _ANY)[:_KIND_BYTES]
    for kind in (
        share_state_records.SHARE_SNAPSHOT,
        share_state_records.SHARE_UPDATE,
        share_state_records.DEAD_LETTERS_PENDING,
        share_state_records.DEAD_LETTER_PLAN,
        share_state_records.DEAD_LETTER_PLAN_SETTLED,
        share_state_records.DEAD_LETTER_SNAPSHOT,
        share_state_records.DELIVERY_TOTALS,
        share_state_records.WORKER_ERRORS,
        share_state_records.RECORD_DELAYS,
    )
)


def _highest_state(batches: Sequence[StateRange]) -> int | None:
    """Return the highest delivery state of the batches, or None if a batch is invalid."""
    if not batches:
        return AVAILABLE
    firsts, lasts, delivery_states, counts = zip(*batches, strict=True)
    is_fine = (
        min(firsts) >= 0
        and all(map(le, firsts, lasts))
        and _STATES.issuperset(delivery_states)
        and min(counts) >= 0
        and max(counts) <= _COUNT_MAX
    )
    return max(delivery_states) if is_fine else None


def _without_regress(write: WriteState, state: StoredShareState) -> WriteState:
    """Keep the stored start offset and count if a late or repeated write has lower ones."""
    is_behind = UNSET != write.start_offset < state.start_offset
    is_level = write.start_offset in (UNSET, state.start_offset)
    if is_behind or (is_level and UNSET != write.delivery_complete_count < state.delivery_complete_count):
        return write._replace(start_offset=UNSET, delivery_complete_count=state.delivery_complete_count)
    return write


def _initialize_refusal(request: InitializeState, state: StoredShareState) -> ShareStateReply | None:
    """Return the reply if the existing state must stay: a repeated request must not undo what was stored since."""
    if request.start_offset == UNSET:
        return _DONE
    if UNSET != request.state_epoch <= state.state_epoch:
        is_repeated = request.state_epoch == state.state_epoch
        return _DONE if is_repeated and request.start_offset == state.start_offset else _FENCED_STATE
    if request.only_forward and request.start_offset < state.acquired_upto:
        return _BACKWARDS
    return None


#: A group's epoch grows by one with every change, so a much larger one is a mistake. It would fence the group itself.
_STATE_EPOCHS_AHEAD_MAX: Final = 1 << 24
_DONE: Final = ShareStateReply()
_NO_SUCH_STATE_EPOCH: Final = ShareStateReply(
    ErrorCode.invalid_request, "a state epoch that the group has not had"
)
_NO_SUMMARY: Final = ShareStateSummary(0, 0, UNSET, UNSET)
_FENCED_LEADER: Final = ShareStateReply(
    ErrorCode.fenced_leader_epoch, "a later leader has read or written the state"
)
_FENCED_STATE: Final = ShareStateReply(ErrorCode.fenced_state_epoch, "the state was initialised again since")
_INVALID_WRITE: Final = ShareStateReply(
    ErrorCode.invalid_request, "Write operation on uninitialized share partition not allowed."
)
_INVALID_READ: Final = ShareStateReply(
    ErrorCode.invalid_request, "Read operation on uninitialized share partition not allowed."
)
_BACKWARDS: Final = ShareStateReply(
    ErrorCode.policy_violation, "records that were delivered would be delivered again"
)
_INVALID_START: Final = ShareStateReply(ErrorCode.invalid_request, "invalid start offset")
_INVALID_BATCHES: Final = ShareStateReply(ErrorCode.invalid_request, "invalid state batches")
