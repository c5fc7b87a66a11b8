"""Runs a script of what happens to a share group and writes down the records stored and the replies given.

`topic t 2` makes or grows a topic, and 0 deletes it. `join A t,s`, `beat A` (with `epoch=` or `topics=`), `leave A`;
`initialized t-0,t-1` and `deleted t` are what the share coordinator has done; `alter t-0@5`, `delete t` and
`delete-group` are what administrators ask for. `at` moves the clock, `restart` loads a new shard from the records.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.unit.groups.share.world import Member, World

from penstock.groups.modern_group import Assignment, GroupEpoch, ModernGroupRecord, to_assignment
from penstock.groups.share.share_group import PendingStateChanges, ShareHeartbeatReply
from penstock.groups.share.share_group_records import (
    SHARE_GROUP_CODEC,
    ShareCurrentAssignment,
    ShareGroupRecordType,
    ShareSubscription,
    StatePartitionMetadata,
)
from penstock.protocol.errors import ErrorCode


class Script:
    def __init__(self) -> None:
        self.world = World()
        self.members: dict[str, Member] = {}
        self._shown = 0

    def run(self, line: str) -> Iterator[str]:
        verb, *words = line.split()
        named = dict(word.split("=", 1) for word in words if "=" in word)
        reply = getattr(self, f"_{verb.replace('-', '_')}")(*[w for w in words if "=" not in w], **named)
        records = self.world.log[self._shown :]
        self._shown = len(self.world.log)
        yield from (self._record(SHARE_GROUP_CODEC.decode(*record)) for record in records)
        if reply is not None:
            yield reply

    # What happens

    def _topic(self, name: str, partitions: str) -> None:
        self.world.put_topic(name, int(partitions))

    def _join(self, name: str, topics: str) -> str:
        return self._reply(self._member(name).join(*topics.split(",")))

    def _beat(self, name: str, epoch: str | None = None, topics: str | None = None) -> str:
        member = self._member(name)
        if epoch is not None:
            member.epoch = int(epoch)
        return self._reply(member.beat(None if topics is None else tuple(topics.split(","))))

    def _leave(self, name: str) -> str:
        return self._reply(self._member(name).leave())

    def _initialized(self, places: str) -> None:
        self.world.initialized(to_assignment(self._place(word) for word in places.split(",")))

    def _deleted(self, name: str) -> None:
        topic = self.world.get(name)
        assert topic is not None
        self.world.deleted(topic.id)

    def _alter(self, *words: str) -> str:
        offsets: dict[str, dict[int, int]] = {}
        for word in words:
            place, offset = word.split("@")
            name, partition = place.rsplit("-", 1)
            offsets.setdefault(name, {})[int(partition)] = int(offset)
        reply = self.world.alter(offsets)
        if reply.error is not ErrorCode.none:
            return self._error(reply)
        begun = (
            f"begin {self._places(reply.partitions)} with epoch {reply.epoch}"
            if reply.partitions
            else "nothing"
        )
        return "wait for the deletion" if reply.waits_for_deletion else begun

    def _delete(self, *names: str) -> str:
        reply = self.world.delete(names or None)
        if reply.error is not ErrorCode.none:
            return self._error(reply)
        return f"delete {self._places(reply.partitions)}"

    def _delete_group(self) -> str:
        return self.world.delete_group().name.upper()

    def _at(self, ms: str) -> None:
        self.world.pass_time(int(ms) - self.world.now_ms)

    def _restart(self) -> None:
        self.world.load()

    def _show(self) -> str:
        group = self.world.group
        if group is None:
            return "no group"
        return f"{group.state_name} epoch {group.epoch} target {group.target_epoch}: {', '.join(group.members) or '-'}"

    # What is shown

    def _member(self, name: str) -> Member:
        return self.members.setdefault(name, Member(self.world, name))

    def _place(self, word: str) -> tuple[Any, int]:
        name, partition = word.rsplit("-", 1)
        topic = self.world.get(name)
        assert topic is not None
        return topic.id, int(partition)

    def _places(self, places: Assignment) -> str:
        return (
            ",".join(
                f"{self.world.name_of(topic_id)}-{index}"
                for topic_id, indexes in places.items()
                for index in sorted(indexes)
            )
            or "-"
        )

    def _reply(self, reply: ShareHeartbeatReply) -> str:
        if reply.error is not ErrorCode.none:
            return self._error(reply)
        text = f"{reply.member_id} at epoch {reply.member_epoch}"
        if reply.assigned is not None:
            text += f" reads {self._places(reply.assigned)}"
        return text + self._upkeep(reply.upkeep)

    def _error(self, reply: Any) -> str:
        return f"{reply.error.name.upper()} {reply.message}"

    def _upkeep(self, upkeep: PendingStateChanges | None) -> str:
        if upkeep is None:
            return ""
        first = f"; to delete {self._places(upkeep.delete)}" if upkeep.delete else ""
        then = f"; to initialise {self._places(upkeep.initialize)}" if upkeep.initialize else ""
        return first + then

    def _record(self, record: ModernGroupRecord) -> str:
        name = f" {record.name}" if record.name else ""
        return f"store {record.kind.name}{name}: {self._value(record.kind, record.value)}"

    def _value(self, kind: ShareGroupRecordType, value: Any) -> str:
        match value:
            case None:
                return "deleted"
            case GroupEpoch():
                return str(value.epoch)
            case ShareSubscription():
                return ",".join(value.topic_names)
            case ShareCurrentAssignment():
                return f"epoch {value.epoch} after {value.previous_epoch}, {self._places(value.assigned)}"
            case StatePartitionMetadata():
                deleting = ",".join(value.names[topic_id] for topic_id in sorted(value.deleting))
                return (
                    f"initialising {self._places(value.initializing)}, "
                    f"initialised {self._places(value.initialized)}, deleting {deleting or '-'}"
                )
            case _:
                return (
                    self._places(value)
                    if kind is ShareGroupRecordType.TARGET_ASSIGNMENT_MEMBER
                    else str(value)
                )
