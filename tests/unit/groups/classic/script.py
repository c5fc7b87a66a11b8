"""Runs a script of group operations and writes down everything that comes of each.

A line that starts with `>` is an operation; the lines below it are the records stored, the replies given and the
groups that changed, in that order. `at` moves the clock, and timeouts happen on the way. `restart` loads a new
shard from the records. A commit with `txn=7` is staged in the transaction of producer 7, which `end` ends. Names in
capitals are clients: each remembers the id and generation it was last given.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

from penstock.groups.coordinator_records import (
    CommittedOffset,
    GroupMetadataRecord,
    OffsetCommitRecord,
    decode_record,
)
from penstock.groups.group import (
    CommitRequest,
    GroupResult,
    HeartbeatRequest,
    JoinReply,
    JoinRequest,
    LeaveReply,
    LeaveRequest,
    LeavingMember,
    OffsetToCommit,
    PartitionsReply,
    SyncReply,
    SyncRequest,
    TransactionProducer,
)
from penstock.groups.group_config import GroupCoordinatorConfig
from penstock.groups.group_shard import GroupCoordinatorShard
from penstock.protocol.errors import ErrorCode


def subscription(topics: tuple[str, ...], user_data: bytes = b"") -> bytes:
    """A consumer's metadata, as clients send it (version 0)."""
    names = b"".join(struct.pack(">h", len(topic)) + topic.encode() for topic in topics)
    return struct.pack(">hi", 0, len(topics)) + names + struct.pack(">i", len(user_data)) + user_data


class Client:
    def __init__(self, name: str) -> None:
        self.name = name
        self.member_id = ""
        self.generation = -1
        self.ids_given = 0


class Script:
    def __init__(self) -> None:
        self.settings = GroupCoordinatorConfig()
        self.shard = GroupCoordinatorShard(self.settings)
        #: What was done to the shard by replay: a method's name, and what it was given.
        self.log: list[tuple[Any, ...]] = []
        self.now_ms = 0
        self.clients: dict[str, Client] = {}
        self.waiting: dict[object, None] = {}
        self._shown: dict[str, str] = {}
        self._verbs: dict[str, Callable[[list[str], dict[str, str]], Iterator[str]]] = {
            "set": self._set,
            "join": self._join,
            "sync": self._sync,
            "heartbeat": self._heartbeat,
            "leave": self._leave,
            "commit": self._commit,
            "end": self._end,
            "fetch": self._fetch,
            "delete-offsets": self._delete_offsets,
            "delete-groups": self._delete_groups,
            "forget-topics": self._forget_topics,
            "describe": self._describe,
            "list": self._list,
            "at": self._at,
            "restart": self._restart,
            "waiting": self._waiting,
        }
        self._apply(self.shard.loaded(0))

    def run(self, line: str) -> list[str]:
        verb, *words = line.split()
        named = dict(word.split("=", 1) for word in words if "=" in word)
        plain = [word for word in words if "=" not in word]
        return [*self._verbs[verb](plain, named), *self._changes()]

    # Operations

    def _set(self, _: list[str], named: dict[str, str]) -> Iterator[str]:
        known = {field.name for field in fields(GroupCoordinatorConfig)}
        assert set(named) <= known, named
        self.settings = replace(self.settings, **{name: int(value) for name, value in named.items()})
        self.shard.settings = self.settings
        yield from ()

    def _join(self, plain: list[str], named: dict[str, str]) -> Iterator[str]:
        client = self._client(plain[0])
        version = int(named.get("v", "9"))
        client.ids_given += 1
        request = JoinRequest(
            group_id=named.get("group", "g"),
            member_id=self._id(client, named),
            instance_id=named.get("instance"),
            client_id=client.name,
            client_host="/host",
            session_timeout_ms=int(named.get("session", "10000")),
            rebalance_timeout_ms=int(named.get("rebalance", "60000")),
            protocol_type=named.get("type", "consumer"),
            protocols=_protocols(named),
            member_id_required=version >= 4,
            can_skip_assignment=version >= 9,
        )
        new_id = f"{named.get('instance', client.name)}-{client.ids_given}"
        token = (client.name, "join", client.ids_given)
        yield from self._wait(
            token, self.shard.join(request, token, now_ms=self.now_ms, new_member_id=new_id)
        )

    def _sync(self, plain: list[str], named: dict[str, str]) -> Iterator[str]:
        client = self._client(plain[0])
        assignments = tuple(
            (self.clients[name].member_id if name in self.clients else name, value.encode())
            for name, value in (pair.split(":") for pair in named.get("assign", "").split(",") if pair)
        )
        request = SyncRequest(
            group_id=named.get("group", "g"),
            generation=self._generation(client, named),
            member_id=self._id(client, named),
            instance_id=named.get("instance"),
            protocol_type=named.get("type"),
            protocol=named.get("protocol"),
            assignments=assignments,
        )
        client.ids_given += 1
        token = (client.name, "sync", client.ids_given)
        yield from self._wait(token, self.shard.sync(request, token, now_ms=self.now_ms))

    def _heartbeat(self, plain: list[str], named: dict[str, str]) -> Iterator[str]:
        for name in plain:
            client = self._client(name)
            request = HeartbeatRequest(
                group_id=named.get("group", "g"),
                generation=self._generation(client, named),
                member_id=self._id(client, named),
                instance_id=named.get("instance"),
            )
            yield from self._apply(self.shard.heartbeat(request, (name, "heartbeat"), now_ms=self.now_ms))

    def _leave(self, plain: list[str], named: dict[str, str]) -> Iterator[str]:
        """`leave A B`, or `leave by=operator instance=i` without an id."""
        instance_id = named.get("instance")
        members = [
            LeavingMember(member_id=self._id(self._client(n), named), instance_id=instance_id) for n in plain
        ]
        if not plain:
            members = [LeavingMember(member_id="", instance_id=instance_id)]
        request = LeaveRequest(group_id=named.get("group", "g"), members=tuple(members))
        token = (plain[0] if plain else named["by"], "leave")
        yield from self._apply(self.shard.leave(request, token, now_ms=self.now_ms))

    def _commit(self, plain: list[str], named: dict[str, str]) -> Iterator[str]:
        """`commit A t-0@5 t-1@7` as a member, `commit by=admin t-0@5` from outside."""
        places = [word for word in plain if "@" in word]
        names = [word for word in plain if "@" not in word]
        client = self._client(names[0]) if names else None
        request = CommitRequest(
            group_id=named.get("group", "g"),
            member_id=self._id(client, named) if client else named.get("id", ""),
            generation=self._generation(client, named) if client else int(named.get("generation", "-1")),
            instance_id=named.get("instance"),
            offsets=tuple(_offset(word, named) for word in places),
            retention_ms=int(named["retention"]) if "retention" in named else None,
        )
        token = (names[0] if names else named["by"], "commit")
        if "txn" in named:
            producer = TransactionProducer(int(named["txn"]), 0)
            work = self.shard.commit_in_transaction(request, producer, token, now_ms=self.now_ms)
        else:
            work = self.shard.commit(request, token, now_ms=self.now_ms)
        yield from self._apply(work)

    def _end(self, plain: list[str], _: dict[str, str]) -> Iterator[str]:
        """`end 7 commit` or `end 7 abort`."""
        self._replay("transaction_ended", int(plain[0]), plain[1] == "commit")
        yield from ()

    def _fetch(self, plain: list[str], named: dict[str, str]) -> Iterator[str]:
        """`fetch t-0 t-1`, or `fetch` for all; with `only=stable` not what an open transaction may change."""
        places = [_place(word) for word in plain] if plain else None
        require_stable = named.get("only") == "stable"
        for each in self.shard.fetch(named.get("group", "g"), places, require_stable=require_stable):
            offset = "UNSTABLE" if each.is_unstable else _committed(each.committed)
            yield f"{each.topic}-{each.partition}: {offset}"

    def _delete_offsets(self, plain: list[str], named: dict[str, str]) -> Iterator[str]:
        places = [_place(word) for word in plain]
        work = self.shard.delete_offsets(
            named.get("group", "g"), places, ("admin", "delete-offsets"), now_ms=self.now_ms
        )
        yield from self._apply(work)

    def _delete_groups(self, plain: list[str], _: dict[str, str]) -> Iterator[str]:
        yield from self._apply(
            self.shard.delete_groups(plain, ("admin", "delete-groups"), now_ms=self.now_ms)
        )

    def _forget_topics(self, plain: list[str], _: dict[str, str]) -> Iterator[str]:
        yield from self._apply(self.shard.forget_topics(plain, ("broker", "forget"), now_ms=self.now_ms))

    def _describe(self, plain: list[str], _: dict[str, str]) -> Iterator[str]:
        group = self.shard.describe(plain[0])
        if group is None:
            yield "unknown"
            return
        yield f"{group.state} type={group.protocol_type or '-'} protocol={group.protocol or '-'}"
        for member in group.members:
            metadata = f"{len(member.metadata)} bytes" if member.metadata else "-"
            yield (
                f"  {member.member_id} instance={member.instance_id or '-'} client={member.client_id}"
                f" at {member.client_host} metadata={metadata} assignment={member.assignment.decode() or '-'}"
            )

    def _list(self, *_: Any) -> Iterator[str]:
        for group in self.shard.list_groups():
            yield f"{group.group_id} {group.state} type={group.protocol_type or '-'}"

    def _at(self, plain: list[str], _: dict[str, str]) -> Iterator[str]:
        target_ms = int(plain[0])
        assert target_ms >= self.now_ms, "the clock does not go back"
        while (deadline_ms := self.shard.next_deadline_ms()) is not None and deadline_ms <= target_ms:
            self.now_ms = max(deadline_ms, self.now_ms)
            lines = [*self._apply(self.shard.tick(self.now_ms)), *self._changes()]
            if lines:
                yield f"at {self.now_ms}"
                yield from (f"  {line}" for line in lines)
        self.now_ms = target_ms

    def _restart(self, *_: Any) -> Iterator[str]:
        self.shard = GroupCoordinatorShard(self.settings)
        for name, *given in self.log:
            getattr(self.shard, name)(*given)
        for token in self.waiting:
            yield f"{_name(token)}: no reply"
        self.waiting.clear()
        yield from self._apply(self.shard.loaded(self.now_ms))

    def _waiting(self, *_: Any) -> Iterator[str]:
        yield ", ".join(_name(token) for token in self.waiting) or "none"

    # What comes of them

    def _wait(self, token: object, work: GroupResult) -> Iterator[str]:
        self.waiting[token] = None
        yield from self._apply(work)

    def _apply(self, work: GroupResult) -> Iterator[str]:
        lines = []
        for key, value in work.records:
            line = _record(decode_record(key, value))
            if work.producer is None:
                self._replay("replay", key, value)
            else:
                line = line.replace("store", f"stage by {work.producer.id}", 1)
                self._replay("replay_pending", work.producer.id, key, value)
            lines.append(line)
        for token, reply in work.replies:
            self.waiting.pop(token, None)
            lines.append(f"{_name(token)}: {self._reply(token, reply)}")
        return iter(lines)

    def _replay(self, *step: Any) -> None:
        self.log.append(step)
        getattr(self.shard, step[0])(*step[1:])

    def _reply(self, token: Any, reply: object) -> str:
        match reply:
            case JoinReply():
                return self._joined(self._client(token[0]), reply)
            case SyncReply(error=ErrorCode.none):
                return f"assigned {reply.assignment.decode() or '-'}"
            case LeaveReply(error=ErrorCode.none):
                return ", ".join(
                    f"{member.member_id or member.instance_id} {error.name.upper()}"
                    for member, error in reply.members
                )
            case PartitionsReply(error=ErrorCode.none):
                return ", ".join(
                    f"{each.topic}-{each.partition} {each.error.name.upper()}" for each in reply.partitions
                )
            case dict():
                return ", ".join(f"{name} {error.name.upper()}" for name, error in reply.items())
            case None:
                return "done"
            case _:
                return str(reply.error.name.upper())  # type: ignore[attr-defined]

    def _joined(self, client: Client, reply: JoinReply) -> str:
        if reply.error in (ErrorCode.none, ErrorCode.member_id_required):
            client.member_id = reply.member_id
        if reply.error is not ErrorCode.none:
            return f"{reply.error.name.upper()} {reply.member_id}".strip()
        client.generation = reply.generation
        text = (
            f"{reply.member_id} in generation {reply.generation} by {reply.protocol}, leader {reply.leader}"
        )
        if reply.members:
            members = (m.member_id + (f"({m.instance_id})" if m.instance_id else "") for m in reply.members)
            text += " of " + " ".join(members)
        return text + (", skip the assignment" if reply.skip_assignment else "")

    def _changes(self) -> list[str]:
        shown = {group_id: _state(group) for group_id, group in self.shard.groups.items()}
        lines = [f"{name}: {text}" for name, text in shown.items() if self._shown.get(name) != text]
        lines += [f"{name}: gone" for name in self._shown if name not in shown]
        self._shown = shown
        return lines

    def _client(self, name: str) -> Client:
        return self.clients.setdefault(name, Client(name))

    def _id(self, client: Client, named: dict[str, str]) -> str:
        return named["id"].removeprefix("-") if "id" in named else client.member_id

    def _generation(self, client: Client, named: dict[str, str]) -> int:
        return int(named.get("generation", client.generation))


def _protocols(named: dict[str, str]) -> tuple[tuple[str, bytes], ...]:
    topics = tuple(named.get("topics", "t").split(","))
    names = named.get("protocols", "range").split(",")
    return tuple((name, subscription(topics, named.get("data", "").encode())) for name in names if name)


def _place(word: str) -> tuple[str, int]:
    topic, partition = word.rsplit("-", 1)
    return topic, int(partition)


def _offset(word: str, named: dict[str, str]) -> OffsetToCommit:
    place, offset = word.split("@")
    topic, partition = _place(place)
    return OffsetToCommit(
        topic=topic,
        partition=partition,
        offset=int(offset),
        leader_epoch=int(named.get("epoch", "-1")),
        metadata=named.get("metadata", ""),
    )


def _committed(committed: CommittedOffset | None) -> str:
    if committed is None:
        return "none"
    text = f"{committed.offset} epoch={committed.leader_epoch} metadata={committed.metadata or '-'}"
    text += f" at {committed.commit_timestamp_ms}"
    return text if committed.expire_timestamp_ms is None else f"{text} until {committed.expire_timestamp_ms}"


def _record(record: OffsetCommitRecord | GroupMetadataRecord | None) -> str:
    match record:
        case OffsetCommitRecord(value=None):
            return f"store {record.group}/{record.topic}-{record.partition}: deleted"
        case OffsetCommitRecord(value=CommittedOffset() as value):
            return f"store {record.group}/{record.topic}-{record.partition}: {_committed(value)}"
        case GroupMetadataRecord(value=None):
            return f"store {record.group}: deleted"
        case GroupMetadataRecord(value=value):
            assert value is not None
            members = " ".join(f"{m.member_id}({m.assignment.decode() or '-'})" for m in value.members)
            return (
                f"store {record.group}: generation {value.generation} by {value.protocol}"
                f" leader {value.leader} members {members or '-'}"
            )
    raise AssertionError(record)


def _state(group: Any) -> str:
    members = " ".join(f"{name}{'*' if name == group.leader else ''}" for name in group.members)
    text = f"{group.state.value} generation {group.generation} members {members or '-'}"
    return text + (f" pending {' '.join(sorted(group.pending))}" if group.pending else "")


def _name(token: Any) -> str:
    return f"{token[0]} {token[1]}"
