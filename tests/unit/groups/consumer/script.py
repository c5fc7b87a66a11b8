"""Runs a script of heartbeats in consumer groups and writes down everything that comes of each.

Commands beside those of classic groups: `topic t 4` makes, grows or (with 0) deletes a topic, `beat A topics=t` is a
heartbeat with what is named in it (`owned=t:0,1` is what it has, `owned=-` that it has nothing), `quit A` and `away A`
end a membership. A client sends the id and epoch that it last heard of, unless told otherwise; with `deaf=yes` it does
not hear the reply.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import UUID

from tests.unit.groups.classic import script as classic_script
from tests.unit.groups.consumer.world import FakeTopics

from penstock.groups.consumer.consumer_group import ConsumerGroup
from penstock.groups.consumer.consumer_group_records import CONSUMER_GROUP_CODEC, ConsumerGroupRecordType
from penstock.groups.consumer.consumer_heartbeat import consumer_group_heartbeat
from penstock.groups.consumer.membership import ConsumerHeartbeatReply, ConsumerHeartbeatRequest
from penstock.groups.coordinator_records import CONSUMER_KEY_TYPES, GroupMetadataRecord
from penstock.groups.coordinator_records import decode_record as decode_classic
from penstock.groups.embedded_protocol import encode_assignment, parse_assignment
from penstock.groups.group import GroupResult, SyncReply, SyncRequest
from penstock.groups.group_shard import GroupCoordinatorShard
from penstock.groups.modern_group import (
    LEAVE_GROUP_MEMBER_EPOCH,
    LEAVE_GROUP_STATIC_MEMBER_EPOCH,
    Assignment,
    ModernGroupRecord,
)
from penstock.protocol.errors import ErrorCode
from penstock.protocol.stored_records import key_type

_HEARTBEAT_MS = 5_000


class ConsumerScript(classic_script.Script):
    def __init__(self) -> None:
        self.topics = FakeTopics()
        self.interval_ms = 0
        super().__init__()
        self._verbs.update(topic=self._topic, beat=self._beat, quit=self._quit, away=self._away)
        self._verbs["restart"] = self._reload
        self.shard = self._new_shard()
        self._apply(self.shard.loaded(0))

    def _new_shard(self) -> GroupCoordinatorShard:
        return GroupCoordinatorShard(self.settings, self.topics)

    def _set(self, plain: list[str], named: dict[str, str]) -> Iterator[str]:
        policy = named.pop("policy", None)
        self.interval_ms = int(named.pop("interval", self.interval_ms))
        yield from super()._set(plain, named)
        if policy is not None:
            self.settings = classic_script.replace(self.settings, consumer_migration_policy=policy)
            self.shard.settings = self.settings

    def _reload(self, *_: Any) -> Iterator[str]:
        self.shard = self._new_shard()
        for name, *given in self.log:
            getattr(self.shard, name)(*given)
        yield from self._apply(self.shard.loaded(self.now_ms))

    def _topic(self, plain: list[str], named: dict[str, str]) -> Iterator[str]:
        name, partitions, *racks = plain
        self.topics.set(name, int(partitions), tuple(racks))
        yield from ()

    def _beat(self, plain: list[str], named: dict[str, str]) -> Iterator[str]:
        client = self._client(plain[0])
        if not client.member_id:
            client.member_id, client.generation = named.get("id", client.name.lower()), 0
        epoch = int(named.get("epoch", client.generation))
        names = named["topics"].split(",") if "topics" in named else None
        owned = self._places(named["owned"]) if "owned" in named else ({} if epoch == 0 else None)
        yield from self._ask(client, named, epoch, topic_names=names and tuple(names), owned=owned)

    def _quit(self, plain: list[str], named: dict[str, str]) -> Iterator[str]:
        yield from self._ask(self._client(plain[0]), named, LEAVE_GROUP_MEMBER_EPOCH)

    def _away(self, plain: list[str], named: dict[str, str]) -> Iterator[str]:
        yield from self._ask(self._client(plain[0]), named, LEAVE_GROUP_STATIC_MEMBER_EPOCH)

    def _ask(self, client: Any, named: dict[str, str], epoch: int, **more: Any) -> Iterator[str]:
        request = ConsumerHeartbeatRequest(
            group_id=named.get("group", "g"),
            member_id=self._id(client, named),
            member_epoch=epoch,
            instance_id=named.get("instance"),
            rack_id=named.get("rack"),
            client_id=client.name,
            client_host="/host",
            rebalance_timeout_ms=int(named.get("rebalance", "60000" if epoch == 0 else "-1")),
            topic_regex=named.get("regex"),
            assignor=named.get("assignor"),
            session_timeout_ms=45_000,
            heartbeat_interval_ms=_HEARTBEAT_MS,
            assignment_interval_ms=self.interval_ms,
            **more,
        )
        verb = "deaf" if "deaf" in named else "beat"
        work = consumer_group_heartbeat(self.shard, request, (client.name, verb), now_ms=self.now_ms)
        yield from self._apply(work)

    def _sync(self, plain: list[str], named: dict[str, str]) -> Iterator[str]:
        """`assign=A:0.1,B:2` are partitions of topic t."""
        client = self._client(plain[0])
        pairs = [pair.split(":") for pair in named.get("assign", "").split(",") if pair]
        request = SyncRequest(
            group_id="g",
            generation=self._generation(client, named),
            member_id=self._id(client, named),
            instance_id=named.get("instance"),
            assignments=tuple(
                (self._client(name).member_id, encode_assignment([("t", map(int, numbers.split(".")))], 0))
                for name, numbers in pairs
            ),
        )
        token = (client.name, "sync")
        yield from self._wait(token, self.shard.sync(request, token, now_ms=self.now_ms))

    # What comes of them

    def _apply(self, work: GroupResult) -> Iterator[str]:
        lines = []
        for key, value in work.records:
            if key_type(key) in CONSUMER_KEY_TYPES:
                lines.append(self._stored(CONSUMER_GROUP_CODEC.decode(key, value)))
                self._replay("replay", key, value)
            elif isinstance(record := decode_classic(key, value), GroupMetadataRecord):
                lines.append(_classic(record))
                self._replay("replay", key, value)
            else:
                lines += super()._apply(GroupResult(records=((key, value),)))
        return iter([*lines, *super()._apply(GroupResult(replies=work.replies))])

    def _stored(self, record: ModernGroupRecord) -> str:
        what = f"store {record.group_id}{record.name and '/' + record.name} {record.kind.name.lower()}"
        value = record.value
        if value is None:
            return f"{what}: deleted"
        match record.kind:
            case ConsumerGroupRecordType.GROUP_METADATA | ConsumerGroupRecordType.TARGET_ASSIGNMENT_METADATA:
                return f"{what}: {value.epoch}"
            case ConsumerGroupRecordType.MEMBER_METADATA:
                names = ",".join(value.topic_names) + (f" /{value.topic_regex}/" if value.topic_regex else "")
                return f"{what}: {names}{' classic' if value.classic else ''}"
            case ConsumerGroupRecordType.TARGET_ASSIGNMENT_MEMBER:
                return f"{what}: {self._named(value)}"
            case ConsumerGroupRecordType.CURRENT_MEMBER_ASSIGNMENT:
                text = f"{what}: epoch {value.epoch} after {value.previous_epoch} {value.phase.name}"
                text += f" {self._named(value.assigned)}"
                return text + (f" revoking {self._named(value.revoking)}" if value.revoking else "")
            case ConsumerGroupRecordType.REGULAR_EXPRESSION:
                return f"{what}: {','.join(sorted(value.topics)) or '-'}"
            case _:
                return f"{what}: {value}"

    def _reply(self, token: Any, reply: object) -> str:
        if isinstance(reply, SyncReply) and reply.error is ErrorCode.none:
            return f"assigned {_given(reply.assignment)}"
        if not isinstance(reply, ConsumerHeartbeatReply):
            return super()._reply(token, reply)
        client = self._client(token[0])
        if reply.error is not ErrorCode.none:
            return reply.error.name.upper()
        if token[1] == "deaf":
            return "not heard"
        client.generation = reply.member_epoch
        text = f"{reply.member_id} at epoch {reply.member_epoch}"
        if reply.member_epoch > 0 and reply.heartbeat_interval_ms != _HEARTBEAT_MS:
            text += f" back in {reply.heartbeat_interval_ms} ms"
        return text if reply.assigned is None else f"{text} has {self._named(reply.assigned)}"

    def _changes(self) -> list[str]:
        shown = {name: _state(group) for name, group in self.shard.groups.items()}
        lines = [f"{name}: {text}" for name, text in shown.items() if self._shown.get(name) != text]
        lines += [f"{name}: gone" for name in self._shown if name not in shown]
        self._shown = shown
        return lines

    # Partitions by name

    def _places(self, text: str) -> Assignment:
        found: dict[UUID, frozenset[int]] = {}
        for part in [] if text == "-" else text.split("/"):
            name, numbers = part.split(":")
            topic = self.topics.get(name)
            assert topic is not None, name
            found[topic.id] = frozenset(int(number) for number in numbers.split(","))
        return found

    def _named(self, places: Assignment) -> str:
        topics = {id: topic.name if (topic := self.topics.by_id(id)) else "gone" for id in places}
        return "/".join(sorted(f"{topics[id]}:{_numbers(each)}" for id, each in places.items())) or "-"


def _classic(record: GroupMetadataRecord) -> str:
    if record.value is None:
        return f"store {record.group} classic: deleted"
    members = " ".join(f"{m.member_id}({_given(m.assignment)})" for m in record.value.members)
    return f"store {record.group} classic: generation {record.value.generation} members {members or '-'}"


def _given(data: bytes) -> str:
    return " ".join(f"{topic}:{_numbers(each)}" for topic, each in parse_assignment(data)) or "-"


def _numbers(numbers: Any) -> str:
    return ",".join(str(number) for number in sorted(numbers))


def _state(group: Any) -> str:
    if not isinstance(group, ConsumerGroup):
        return classic_script._state(group)
    members = " ".join(
        f"{name}@{member.current.epoch}{'' if member.current.phase == 0 else ' ' + member.current.phase.name}"
        for name, member in group.members.items()
    )
    return f"consumer {group.state_name} epoch {group.epoch} members {members or '-'}"
