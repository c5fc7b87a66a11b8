"""All share partitions of one `__share_group_state` partition, with their dead letters.

State and dead letters are separate: a share partition that is deleted leaves its dead letters, which are written
nevertheless.
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
#: How many ranges of pending dead letters are handed out at a time.
_VIEW_RANGES_MAX: Final = 5_000


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorResult:
    """Append the records as one, replay them, and give out the replies once they are committed."""

    records: tuple[KeyValue, ...] = ()
    replies: tuple[tuple[ReplyToken, object], ...] = ()


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
        # By a record's key without its kind, which is one lookup for every record.
        self._states: dict[bytes, StoredShareState] = {}
        self._dead_letters: dict[bytes, StoredDeadLetters] = {}
        self._totals: dict[bytes, DeliveryTotals] = {}
        self._keys: dict[bytes, SharePartitionKey] = {}
        #: Records of kinds that are not known here, passed over on replay.
        self.unknown_records = 0
        # What follows is lost with the shard, and may be.
        self._watcher: ReplyToken | None = None
        self._busy: frozenset[bytes] = frozenset()
        self._traffic = FinishedCounts()

    def __repr__(self) -> str:
        return f"<ShareStateShard of {len(self._states)} share partitions>"

    # Replay

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
        else:
            self.unknown_records += 1

    def _replay_update(self, name: bytes, key: bytes, value: bytes | None) -> None:
        if value is None:
            return
        update = share_state_records.decode_update(value)
        state = self._states.get(name)
        if state is None:
            # Kafka may have deleted the records before it, the snapshot included, when it needed them no more.
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
        burials = self._dead_letters.get(name)
        if burials is None:
            burials = self._dead_letters[name] = StoredDeadLetters()
            self._keys[name] = decode_key(key)
        match kind:
            case share_state_records.DEAD_LETTERS_PENDING:
                burials.add(share_state_records.decode_pending(value))
            case share_state_records.DEAD_LETTER_PLAN:
                burials.begin(share_state_records.decode_plan(value))
            case share_state_records.DEAD_LETTER_PLAN_SETTLED:
                burials.settle(share_state_records.decode_settled(value))
            case share_state_records.WORKER_ERRORS:
                burials.explain(share_state_records.decode_errors(value))
            case _:
                burials.install(share_state_records.decode_dead_letter_snapshot(value))

    def _replay_totals(self, name: bytes, key: bytes, value: bytes | None) -> None:
        if value is None:
            self._totals.pop(name, None)
            self._forget_name(name)
            return
        self._totals[name] = share_state_records.decode_totals(value)
        self._keys.setdefault(name, decode_key(key))

    def _forget_name(self, name: bytes) -> None:
        if name not in self._states and name not in self._dead_letters and name not in self._totals:
            self._keys.pop(name, None)

    # Time: nothing here runs out.

    def loaded(self, now_ms: int) -> CoordinatorResult:
        self._traffic.take()  # what was finished before is no traffic of now
        return CoordinatorResult()

    def tick(self, now_ms: int) -> CoordinatorResult:
        return CoordinatorResult()

    def next_deadline_ms(self) -> int | None:
        return None

    def clock_moved(self, by_ms: int) -> None:
        pass

    # State

    def ask(
        self, questions: Sequence[ShareStateRequest], token: ReplyToken, *, now_ms: int
    ) -> CoordinatorResult:
        """One Answer for each. No share partition may be asked about twice."""
        self._traffic.now(now_ms)
        stored: list[KeyValue] = []
        answers = []
        for question in questions:
            match question:
                case WriteState():
                    answers.append(self._write(question, stored, now_ms))
                case ReadState():
                    answers.append(self._read(question, stored, now_ms))
                case InitializeState():
                    answers.append(self._initialize(question, stored, now_ms))
                case DeleteState():
                    answers.append(self._delete(question, stored))
                case ReadStateSummary():
                    answers.append(self._summary(question))
                case StoreWorkerErrors():
                    answers.append(self._explain(question, stored))
        with_pending = [key[_KIND_BYTES:] for key, _ in stored if key[:_KIND_BYTES] == _PENDING_KIND]
        return self._work(stored, ((token, tuple(answers)),), with_pending)

    def _write(self, write: WriteState, stored: list[KeyValue], now_ms: int) -> ShareStateReply:
        name = _name(write.key)
        state = self._states.get(name)
        if state is None:
            return _INVALID_WRITE
        if UNSET != write.leader_epoch < state.leader_epoch:
            return _FENCED_LEADER
        if write.state_epoch not in (UNSET, state.state_epoch):
            # A later one, too: a group that was deleted and made again begins with earlier epochs.
            return _FENCED_STATE
        if write.totals is not None and min(write.totals) < 0:
            return _INVALID_BATCHES
        batches, highest = write.batches, _highest_state(write.batches)
        if highest is None:
            return _INVALID_BATCHES
        if highest > ARCHIVED:
            batches, buried = split_dead_letters(batches)
            self._store_dead_letters(name, state, buried, stored)
        leader_epoch = state.leader_epoch if write.leader_epoch == UNSET else write.leader_epoch
        write = _never_backwards(write, state)
        stored.append(self._stored(name, state, leader_epoch, write, normalize(batches), now_ms))
        if write.totals is not None:
            self._add_totals(name, write.totals, stored)
        return _DONE

    def _add_totals(self, name: bytes, totals: DeliveryTotals, stored: list[KeyValue]) -> None:
        """In one batch with the state that they are about. A write that comes late takes nothing back."""
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
        self, name: bytes, state: StoredShareState, buried: Sequence[StateRange], stored: list[KeyValue]
    ) -> None:
        fresh = state.new_dead_letters(buried)
        if fresh:
            stored.append((_PENDING_KIND + name, share_state_records.encode_pending(fresh)))

    def _read(self, read: ReadState, stored: list[KeyValue], now_ms: int) -> ShareStateReply:
        name = _name(read.key)
        state = self._states.get(name)
        if state is None:
            return _INVALID_READ
        if UNSET != read.leader_epoch < state.leader_epoch:
            return _FENCED_LEADER
        if read.leader_epoch > state.leader_epoch:
            # Stored, so that the previous leader stays fenced after a change of the coordinator.
            fence = WriteState(
                read.key,
                state.state_epoch,
                read.leader_epoch,
                state.start_offset,
                state.delivery_complete_count,
                (),
            )
            stored.append(self._stored(name, state, read.leader_epoch, fence, (), now_ms))
        return ShareStateReply(state=state.shown(self._totals.get(name, NO_DELIVERY_TOTALS)))

    def _initialize(self, question: InitializeState, stored: list[KeyValue], now_ms: int) -> ShareStateReply:
        name = _name(question.key)
        state = self._states.get(name)
        if question.start_offset < UNSET:
            return _INVALID_START
        known_epoch = 0 if state is None else max(state.state_epoch, 0)
        if question.state_epoch > known_epoch + _STATE_EPOCHS_AHEAD_MAX:
            return _NO_SUCH_STATE_EPOCH
        refusal = None if state is None else _initialize_refusal(question, state)
        if refusal is not None:
            return refusal
        snapshot = ShareSnapshot(
            0 if state is None else state.snapshot_epoch + 1,
            question.state_epoch,
            0 if state is None else state.leader_epoch,
            question.start_offset,
            now_ms,
            now_ms,
            UNSET if question.start_offset == UNSET else 0,
            (),
        )
        stored.append((_SNAPSHOT_KIND + name, share_state_records.encode_snapshot(snapshot)))
        return _DONE

    def _delete(self, question: DeleteState, stored: list[KeyValue]) -> ShareStateReply:
        name = _name(question.key)
        state = self._states.get(name)
        if state is not None and UNSET != question.state_epoch < state.state_epoch:
            return _FENCED_STATE
        self._delete_state(name, stored)
        return _DONE

    def _delete_state(self, name: bytes, stored: list[KeyValue]) -> None:
        if name in self._states:
            stored.append((_SNAPSHOT_KIND + name, None))
        if name in self._totals:
            stored.append((_TOTALS_KIND + name, None))
        burials = self._dead_letters.get(name)
        if burials is not None and not burials.pending:
            stored.append((_DEAD_LETTER_SNAPSHOT_KIND + name, None))

    def _explain(self, question: StoreWorkerErrors, stored: list[KeyValue]) -> ShareStateReply:
        name = _name(question.key)
        if name not in self._states:
            return _INVALID_WRITE
        stored.append(
            (_ERRORS_KIND + name, share_state_records.encode_errors(question.key, question.failures))
        )
        return _DONE

    def _summary(self, question: ReadStateSummary) -> ShareStateReply:
        state = self._states.get(_name(question.key))
        return ShareStateReply(summary=_NOTHING if state is None else state.summary())

    def forget_topics(self, topic_ids: Collection[UUID], token: ReplyToken) -> CoordinatorResult:
        """Forget the share partitions of deleted topics."""
        stored: list[KeyValue] = []
        for name, key in self._keys.items():
            if key.topic_id in topic_ids:
                self._delete_state(name, stored)
        return self._work(stored, ((token, None),))

    # Dead letters

    def next_dead_letters(self, busy: Iterable[SharePartitionKey], token: ReplyToken) -> CoordinatorResult:
        """Answered with the share partitions that have dead letters to bury; waits while there are none.

        Not with those that the one who asks is busy with already. Who asks again takes the place of who asked before.
        """
        self._watcher, self._busy = token, frozenset(map(_name, busy))
        return self._work([], (), [name for name, burials in self._dead_letters.items() if burials.pending])

    def _work(
        self,
        stored: list[KeyValue],
        replies: tuple[tuple[ReplyToken, object], ...],
        with_pending: Iterable[bytes] = (),
    ) -> CoordinatorResult:
        if self._watcher is not None:
            keys = tuple(decode_key(_PENDING_KIND + name) for name in with_pending if name not in self._busy)
            if keys:
                replies += ((self._watcher, keys),)
                self._watcher = None
        return CoordinatorResult(records=tuple(stored), replies=replies)

    def burial(self, key: SharePartitionKey) -> DeadLetterView | None:
        """None where nothing is left to do."""
        burials = self._dead_letters.get(_name(key))
        if burials is None or not burials.pending:
            return None
        return burials.view(key, _VIEW_RANGES_MAX)

    def plan_dead_letters(
        self, key: SharePartitionKey, plan: DeadLetterPlan, token: ReplyToken
    ) -> CoordinatorResult:
        """Answered with whether it is stored; False when it does not fit any more."""
        name = _name(key)
        burials = self._dead_letters.get(name)
        if burials is None or burials.refuses(plan):
            return self._work([], ((token, False),))
        return self._work([(_PLAN_KIND + name, share_state_records.encode_plan(plan))], ((token, True),))

    def settle_dead_letters(
        self, key: SharePartitionKey, settled: SettledPlan, plan: DeadLetterPlan | None, token: ReplyToken
    ) -> CoordinatorResult:
        """`plan` is over: carried out, if anything is resolved, or given up.

        Answered with whether it was the open one.
        """
        name = _name(key)
        burials = self._dead_letters.get(name)
        if burials is None or burials.plan != plan:
            return self._work([], ((token, False),))
        return self._work(
            [(_SETTLED_KIND + name, share_state_records.encode_settled(settled))], ((token, True),)
        )

    def forget_dead_letters(self, key: SharePartitionKey, token: ReplyToken) -> CoordinatorResult:
        """Nothing is left to do: if the share partition has gone meanwhile, this is the last that is known of it."""
        name = _name(key)
        burials = self._dead_letters.get(name)
        if burials is None or burials.pending or name in self._states:
            return self._work([], ((token, False),))
        return self._work([(_DEAD_LETTER_SNAPSHOT_KIND + name, None)], ((token, True),))

    def take_finished(self) -> tuple[FinishedInSecond, ...]:
        """What has been finished since this was last asked, as far as it was lately."""
        return self._traffic.take()

    # The whole

    def checkpoint(
        self, names: Iterable[bytes], token: ReplyToken, *, now_ms: int, bytes_max: int
    ) -> CoordinatorResult:
        """Say all of it again, so that the log before can go; in pieces, as `names` are some of `names()`.

        Answered with how many of them were: as many as there is room for, and one at least.
        """
        stored: list[KeyValue] = []
        count = size = 0
        for name in names:
            said = self._all_of(name, now_ms)
            size += sum(len(key) + len(value or b"") for key, value in said)
            if count and size > bytes_max:
                break
            stored += said
            count += 1
        return self._work(stored, ((token, count),))

    def _all_of(self, name: bytes, now_ms: int) -> list[KeyValue]:
        said: list[KeyValue] = []
        state, burials = self._states.get(name), self._dead_letters.get(name)
        if state is not None:
            said.append((_SNAPSHOT_KIND + name, share_state_records.encode_snapshot(state.snapshot(now_ms))))
        if name in self._totals:
            said.append((_TOTALS_KIND + name, share_state_records.encode_totals(self._totals[name])))
        if burials is not None:
            said += burials.snapshot(self._keys[name])
        return said

    def names(self) -> tuple[bytes, ...]:
        return tuple(self._keys)

    def keys(self) -> tuple[SharePartitionKey, ...]:
        return tuple(self._keys.values())

    def topic_ids(self) -> tuple[UUID, ...]:
        return tuple(dict.fromkeys(key.topic_id for key in self._keys.values()))

    def stored(
        self,
    ) -> dict[SharePartitionKey, tuple[ShareState | None, ShareStateSummary | None, DeadLetterView | None]]:
        """Everything durable: what a shard loaded from the same records would hold too."""
        return {key: self._stored_of(name, key) for name, key in sorted(self._keys.items())}

    def _stored_of(
        self, name: bytes, key: SharePartitionKey
    ) -> tuple[ShareState | None, ShareStateSummary | None, DeadLetterView | None]:
        state, burials = self._states.get(name), self._dead_letters.get(name)
        return (
            None if state is None else state.shown(self._totals.get(name, NO_DELIVERY_TOTALS)),
            None if state is None else state.summary(),
            None if burials is None else burials.view(key, burials.pending_count),
        )

    def totals(self) -> dict[SharePartitionKey, DeliveryTotals]:
        """Of those that have any."""
        return {self._keys[name]: totals for name, totals in self._totals.items()}

    def pending_by_group(self) -> dict[str, int]:
        """How many dead letters of each group are to be buried."""
        pending: dict[str, int] = {}
        for name, burials in self._dead_letters.items():
            group = self._keys[name].group
            pending[group] = pending.get(group, 0) + burials.pending_count
        return pending

    def counts(self) -> tuple[int, int, int]:
        """Dead letters that are pending, buried and lost."""
        all_dead_letters = self._dead_letters.values()
        return (
            sum(one.pending_count for one in all_dead_letters),
            sum(one.buried for one in all_dead_letters),
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
    )
)


def _highest_state(batches: Sequence[StateRange]) -> int | None:
    """None for batches that cannot be."""
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


def _never_backwards(write: WriteState, state: StoredShareState) -> WriteState:
    """One that comes late, or again, takes nothing back."""
    is_behind = UNSET != write.start_offset < state.start_offset
    is_level = write.start_offset in (UNSET, state.start_offset)
    if is_behind or (is_level and UNSET != write.delivery_complete_count < state.delivery_complete_count):
        return write._replace(start_offset=UNSET, delivery_complete_count=state.delivery_complete_count)
    return write


def _initialize_refusal(question: InitializeState, state: StoredShareState) -> ShareStateReply | None:
    """Why what is there stays as it is. What comes again must not take back what was done since."""
    if question.start_offset == UNSET:
        return _DONE
    if UNSET != question.state_epoch <= state.state_epoch:
        is_repeated = question.state_epoch == state.state_epoch
        return _DONE if is_repeated and question.start_offset == state.start_offset else _FENCED_STATE
    if question.only_forward and question.start_offset < state.acquired_upto:
        return _BACKWARDS
    return None


#: A group's epoch grows by one with every change of the group; a later one would shut out the group itself.
_STATE_EPOCHS_AHEAD_MAX: Final = 1 << 24
_DONE: Final = ShareStateReply()
_NO_SUCH_STATE_EPOCH: Final = ShareStateReply(
    ErrorCode.invalid_request, "a state epoch that the group has not had"
)
_NOTHING: Final = ShareStateSummary(0, 0, UNSET, UNSET)
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
    ErrorCode.policy_violation, "records that were handed out would be handed out again"
)
_INVALID_START: Final = ShareStateReply(ErrorCode.invalid_request, "a start offset that cannot be")
_INVALID_BATCHES: Final = ShareStateReply(ErrorCode.invalid_request, "state batches that cannot be")
