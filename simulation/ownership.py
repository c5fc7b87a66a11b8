"""What an outside observer knows of a consumer group: all that is committed of it, and who believes to own what."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.groups.consumer.consumer_group import ConsumerGroup
from penstock.groups.coordinator_records import OFFSET_KEY_TYPES, OffsetCommitRecord, decode_record
from penstock.groups.group_shard import GroupCoordinatorShard
from penstock.protocol.stored_records import key_type
from simulation.kinds import GROUP_SETTINGS
from simulation.ledger import Violation

if TYPE_CHECKING:
    from simulation.cluster import Cluster
    from simulation.consumers import ConsumerMember
    from simulation.replica import Key

GROUP = "g"


def signature(member_id: str, epoch: int) -> str:
    """What members write into the metadata of their commits."""
    return f"{member_id}@{epoch}"


class Ownership:
    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.members: list[ConsumerMember] = []
        #: By partition: what somebody was told to be committed.
        self.committed: dict[int, int] = {}
        self._begin()

    def _begin(self) -> None:
        self._shard = GroupCoordinatorShard(GROUP_SETTINGS)
        self._seen = 0
        #: Since which epoch a member has had a partition without a break.
        self._since: dict[tuple[str, int], int] = {}

    @property
    def group(self) -> ConsumerGroup | None:
        found = self._shard.groups.get(GROUP)
        return found if isinstance(found, ConsumerGroup) else None

    def look(self, key: Key) -> None:
        """Take in what was committed since the last time, in its order."""
        batches = self.cluster.invariants.ledger(key).batches
        if len(batches) < self._seen:
            self._begin()  # an unclean election that was asked for
        for batch in batches[self._seen :]:
            for record in batch.payload:
                self._take_in(*record)
            self._one_owner()
            self._note_since()
        self._seen = len(batches)

    def _take_in(self, key: bytes, value: bytes | None) -> None:
        if key_type(key) in OFFSET_KEY_TYPES and value is not None:
            self._check_commit(decode_record(key, value))
        self._shard.replay(key, value)

    def _check_commit(self, record: Any) -> None:
        """Nobody commits who was fenced before, or for what it has not had since the epoch of its commit."""
        assert isinstance(record, OffsetCommitRecord)
        assert record.value is not None
        members = {} if self.group is None else self.group.members
        member_id, _, epoch = record.value.metadata.rpartition("@")
        member = members.get(member_id)
        since = self._since.get((member_id, record.partition), int(epoch) + 1)
        if member is None or (member.current.epoch != int(epoch) and since > int(epoch)):
            raise Violation("a fenced member's commit is refused", f"{record}: {member}")

    def _one_owner(self) -> None:
        owners: dict[Any, str] = {}
        for member in self.group.members.values() if self.group is not None else ():
            for place in member.current.owned():
                if place in owners:
                    story = f"{place}: {owners[place]} and {member.member_id} in {self.group}"
                    raise Violation("never two unfenced owners", story)
                owners[place] = member.member_id

    def _note_since(self) -> None:
        members = {} if self.group is None else self.group.members
        self._since = {
            (member.member_id, partition): self._since.get(
                (member.member_id, partition), member.current.epoch
            )
            for member in members.values()
            if member.current.epoch > 0
            for _, partition in member.current.owned()
        }

    def takes(self, taker: ConsumerMember, partition: int, key: Key) -> None:
        """A member begins to work on a partition: whoever else does so was fenced before."""
        self.look(key)
        unfenced = {} if self.group is None else self.group.members
        for other in self.members:
            if other is not taker and partition in other.owned and other.member_id in unfenced:
                raise Violation("never two unfenced owners", f"{taker} takes {partition} beside {other}")

    def told(self, partition: int, offset: int, known_before: int) -> None:
        if offset < known_before:
            raise Violation(
                "committed offsets never go back",
                f"partition {partition}: {offset} after {known_before} was told",
            )
        self.committed[partition] = max(self.committed.get(partition, -1), offset)
