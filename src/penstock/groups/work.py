"""What an operation hands back, and the pad on which it is written down."""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from penstock.groups.config import GroupConfig
from penstock.groups.records import GroupRecord, KeyValue, OffsetRecord, encode_group, encode_offset
from penstock.groups.settings import GroupSettings
from penstock.groups.timers import Timers
from penstock.groups.topics import Topics

if TYPE_CHECKING:
    from penstock.groups.group import Group

#: Whatever the caller wants back beside the reply; a waiting request keeps it in the group meanwhile.
Token = Hashable


class Producer(NamedTuple):
    id: int
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Append the records as one, replay them, and give out the replies once they are committed."""

    records: tuple[KeyValue, ...] = ()
    replies: tuple[tuple[Token, object], ...] = ()
    #: In whose transaction the records are; they are pending then, and replayed as such.
    producer: Producer | None = None


class Timer(NamedTuple):
    kind: str  # "expire" is the shard's; what the others mean is the affair of the group's kind
    group_id: str = ""
    member_id: str = ""


class Step:
    """One operation under way: its time, its records and replies so far, and the timers it may set."""

    __slots__ = ("_records", "_replies", "config_of", "groups", "now_ms", "settings", "timers", "topics")

    def __init__(
        self,
        *,
        now_ms: int,
        settings: GroupSettings,
        config_of: Callable[[str], GroupConfig],
        timers: Timers[Timer],
        topics: Topics,
        groups: "dict[str, Group]",
    ) -> None:
        self.now_ms = now_ms
        self.settings = settings
        self.config_of = config_of
        self.timers = timers
        self.topics = topics
        #: Those of the shard: a group that goes on as one of another kind is replaced here.
        self.groups = groups
        self._records: list[KeyValue] = []
        self._replies: list[tuple[Token, object]] = []

    @property
    def has_records(self) -> bool:
        return bool(self._records)

    def reply(self, token: Token, reply: object) -> None:
        self._replies.append((token, reply))

    def store(self, record: KeyValue) -> None:
        self._records.append(record)

    def store_all(self, records: Iterable[KeyValue]) -> None:
        self._records.extend(records)

    def store_group(self, record: GroupRecord) -> None:
        self._records.append(encode_group(record))

    def store_offset(self, record: OffsetRecord) -> None:
        self._records.append(encode_offset(record))

    def schedule_in(self, timer: Timer, delay_ms: int) -> None:
        self.timers.schedule(timer, self.now_ms + delay_ms)

    def work(self, producer: Producer | None = None) -> Work:
        return Work(records=tuple(self._records), replies=tuple(self._replies), producer=producer)
