"""What is asked of the state of share partitions, and what is answered: values without a version."""

from collections.abc import Sequence
from typing import Final, NamedTuple
from uuid import UUID

from penstock.protocol.errors import ErrorCode
from penstock.protocol.share_failures import WorkerFailure

#: Delivery states as they are stored.
AVAILABLE: Final = 0
ACKNOWLEDGED: Final = 2
ARCHIVED: Final = 4
#: Delivery states that are only written: archived, and to be buried in the dead-letter topic. Readers see ARCHIVED.
BURIED_LIMIT: Final = 32  # delivered as often as it may be
BURIED_REJECTED: Final = 33  # a consumer has said that it cannot be processed
BURIED_LOCK_EXPIRED: Final = 34  # delivered as often as it may be, and the last one never answered
#: The three above, in order.
BURIED: Final = (BURIED_LIMIT, BURIED_REJECTED, BURIED_LOCK_EXPIRED)

#: Not states at all, but a share partition's totals on the wire, which has no field for them: the offsets of such a
#: batch are (handed out, confirmed) and (expired, 0).
TOTALS: Final = 40
TOTALS_EXPIRED: Final = 41

#: A start offset or count that is not being written, or not known yet.
UNSET: Final = -1


class StateBatch(NamedTuple):
    """Any 4-tuple of this shape will do: writes are hot."""

    first_offset: int
    last_offset: int
    delivery_state: int
    delivery_count: int


class Totals(NamedTuple):
    """Since a share partition was made. They never go back, so the same ones may be written again.

    Under at-most-once, `handed_out` are records that are final because of a hand-out, whether anybody got them or not,
    of which members have `confirmed` some: the others may be lost. `expired`: offsets that retention deleted before
    they were handed out.
    """

    handed_out: int = 0
    confirmed: int = 0
    expired: int = 0

    @property
    def unconfirmed(self) -> int:
        return self.handed_out - self.confirmed

    def at_least(self, other: "Totals") -> "Totals":
        return Totals(*map(max, self, other))


NO_TOTALS: Final = Totals()


class Key(NamedTuple):
    """A share partition."""

    group: str
    topic_id: UUID
    partition: int


class ShareState(NamedTuple):
    """`start_offset` is UNSET until it has been initialised; `batches` are sorted and do not overlap."""

    state_epoch: int
    start_offset: int
    batches: tuple[StateBatch, ...] = ()
    totals: Totals = NO_TOTALS


class ShareSummary(NamedTuple):
    """`delivery_complete_count`: offsets from the start offset on that are final; UNSET where nobody has told."""

    state_epoch: int
    leader_epoch: int
    start_offset: int
    delivery_complete_count: int


class Initialize(NamedTuple):
    """Without a start offset (UNSET) only what is missing is made; with one, what is there begins anew."""

    key: Key
    state_epoch: int
    start_offset: int
    #: Refused where it would begin before what was already handed out.
    only_forward: bool = False


class Read(NamedTuple):
    key: Key
    leader_epoch: int


class Write(NamedTuple):
    """Batches need not be sorted. Where they overlap or meet older ones, more deliveries win, then the higher state."""

    key: Key
    state_epoch: int
    leader_epoch: int
    start_offset: int
    delivery_complete_count: int
    batches: Sequence[tuple[int, int, int, int]]
    totals: Totals | None = None  # as they are now, where they have changed


class Delete(NamedTuple):
    """A state that was begun at a later epoch stays: whoever asks was too late. UNSET asks for any."""

    key: Key
    state_epoch: int = UNSET


class Summary(NamedTuple):
    key: Key
    leader_epoch: int


class Explain(NamedTuple):
    """What workers say records died of that they are about to give up. The same may come again."""

    key: Key
    failures: tuple[WorkerFailure, ...]


Question = Initialize | Read | Write | Delete | Summary | Explain


class Answer(NamedTuple):
    error: ErrorCode = ErrorCode.none
    message: str | None = None
    state: ShareState | None = None  # to Read
    summary: ShareSummary | None = None  # to Summary
