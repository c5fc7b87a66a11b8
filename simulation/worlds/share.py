"""Members of share groups: at least once with dead letters and backoff, at least once without, and at most once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, ClassVar, Final
from uuid import UUID

from penstock.broker.coordinators.share import persister
from penstock.cluster.image import ResourceType
from penstock.cluster.topic_names import SHARE_GROUP_STATE
from penstock.groups.share.partition.share_partition_state import ACCEPT, REJECT, RELEASE, RENEW
from penstock.groups.share.state.share_state_shard import ShareCoordinatorShard
from penstock.protocol.dead_letter_headers import (
    DELIVERY_COUNT_HEADER,
    GROUP_HEADER,
    OFFSET_HEADER,
    PARTITION_HEADER,
    REASON_HEADER,
    TOPIC_HEADER,
)
from penstock.protocol.errors import ErrorCode
from penstock.protocol.record_batch import Record, checksum, decode_records, encode_batch, iter_batches
from simulation.checks.committed import CommittedLogs
from simulation.checks.share import Acknowledged, DeadLetter, GroupPolicy, Shared, ShareHistory
from simulation.checks.share_state import CommittedShareState
from simulation.client import FIND_COORDINATOR, Client, fetched_records, message
from simulation.cluster import Cluster, TopicShape
from simulation.engine.loop import OUTSIDE
from simulation.worlds.base import World

INCREMENTAL_ALTER_CONFIGS: Final = 44
SHARE_GROUP_HEARTBEAT: Final = 76
SHARE_FETCH: Final = 78
SHARE_ACKNOWLEDGE: Final = 79
DESCRIBE_SHARE_GROUP_OFFSETS: Final = 90

TOPIC: Final = "orders"
DEAD_LETTERS: Final = "orders.dlq"
_WORKERS: Final = "workers"
_ONCE: Final = "once"
_PLAIN: Final = "plain"
_LOCK_MS: Final = 200
_LIMIT: Final = 3
_HEARTBEAT_S: Final = 0.2
_MEMBERS: Final = 2
_PACE_S: Final = (0.02, 0.12)
_FETCH_WAIT_MS: Final = 100
#: None: the member says nothing, and the lock expires.
_OUTCOMES: Final = (*[ACCEPT] * 12, RELEASE, RELEASE, RELEASE, REJECT, RENEW, RENEW, None, None)
#: How long a member works on the records of a fetch. A lock may expire meanwhile.
_WORK_S: Final = (0.001, 0.02)
_SLOW_S: Final = (0.05, 0.35)
_SLOW_AFTER_RENEWAL_S: Final = (0.12, 0.28)
_FINAL_EPOCH: Final = -1
#: Shorter than shipped, so that writes of share state fail during the faults.
_PERSISTER_RETRY_S: Final = 0.4

#: Topic id and partition, with what is acknowledged there.
Acknowledgements = dict[tuple[UUID, int], list[Acknowledged]]


class Producer(Client):
    """Sends a few records now and then, and sends them again if it hears nothing; duplicates do not matter."""

    def __init__(self, world: ShareWorld, number: int) -> None:
        super().__init__(world.cluster, number, world.counts)
        self.world = world
        self.is_done = False
        self._sent = 0

    async def run(self) -> None:
        while not self.world.is_closing:
            await self._send()
            await asyncio.sleep(self.loop.between(*_PACE_S))
        await self._send()  # so that each group has work to do after the faults
        self.is_done = True

    async def _send(self) -> None:
        index, count = self.loop.draw(self.world.partitions), 1 + self.loop.draw(3)
        values = tuple(b"s%d-%d" % (index, self._sent + place) for place in range(count))
        self._sent += count
        records = [Record(place, 1, None, value) for place, value in enumerate(values)]
        while True:
            reply = await self.produce(TOPIC, index, encode_batch(records))
            if reply is not None and reply[0] is ErrorCode.none:
                self.world.committed.acknowledged(TOPIC, index, reply[1], values)
                return
            await self.back_off()


class ShareMember(Client):
    """Fetches, takes its time, and says what became of each record, or nothing."""

    def __init__(self, world: ShareWorld, number: int, group: str) -> None:
        super().__init__(world.cluster, number, world.counts)
        self.world = world
        self.group = group
        self.member = f"member-{number}"
        self.is_leaving = False
        self.is_over = False
        self._assigned: dict[tuple[UUID, int], None] = {}
        self._epoch = 0
        #: A member renews locks because its work takes long.
        self._has_renewed = False
        #: Records that came with a wrong checksum.
        self._damaged: dict[tuple[UUID, int, int], None] = {}
        #: The next session epoch on each node, and the partitions of the session.
        self._sessions: dict[int, tuple[int, dict[tuple[UUID, int], None]]] = {}

    def __repr__(self) -> str:
        return f"<ShareMember {self.member} of {self.group}>"

    def start(self) -> None:
        self.spawn(self._heartbeats())
        self.spawn(self._work())

    def crash(self) -> None:
        self.is_over = True
        self.loop.note("member crashes", self)
        self.loop.end(self.process)
        self.cluster.network.process_ended(self.process)

    # -- membership ------------------------------------------------------------------------------------

    async def _heartbeats(self) -> None:
        while not self.is_over:
            node = await self.world.find_coordinator(self, self.group)
            while not self.is_over and await self._heartbeat(node, self._epoch):
                await asyncio.sleep(self.loop.between(0.5 * _HEARTBEAT_S, _HEARTBEAT_S))
            await self.back_off()

    async def _heartbeat(self, node: int, epoch: int) -> bool:
        """Return whether to go on with this coordinator."""
        request = message(SHARE_GROUP_HEARTBEAT, 1)(
            "ShareGroupHeartbeatRequest",
            group_id=self.group,
            member_id=self.member,
            member_epoch=epoch,
            rack_id=None,
            subscribed_topic_names=(TOPIC,) if epoch == 0 else None,
        )
        reply = await self.call(node, SHARE_GROUP_HEARTBEAT, 1, request, timeout_s=1.0)
        if reply is None:
            return False
        if reply.error_code in (ErrorCode.unknown_member_id, ErrorCode.fenced_member_epoch):
            self.counts["members fenced"] += 1
            self._epoch = 0
            self._assigned = {}
            return True
        if reply.error_code != ErrorCode.none:
            return False
        self.counts["heartbeats"] += 1
        self._epoch = max(reply.member_epoch, 0)
        if reply.assignment is not None:
            self._assigned = {
                (part.topic_id, index): None
                for part in reply.assignment.topic_partitions
                for index in part.partitions
            }
        return True

    async def _leave(self) -> None:
        """Close the sessions, then leave the group."""
        self.is_over = True
        for node, (epoch, _) in tuple(self._sessions.items()):
            if epoch > 0:
                await self._acknowledge(node, {}, epoch=_FINAL_EPOCH)
        node = await self.world.find_coordinator(self, self.group)
        await self._heartbeat(node, -1)
        self.counts["members left"] += 1

    # -- records ---------------------------------------------------------------------------------------

    async def _work(self) -> None:
        while not self.is_leaving:
            place = self._any_assigned()
            node = -1 if place is None else self.cluster.leader_hint(TOPIC, place[1])
            if place is None or node < 0:
                await self.back_off()
                continue
            acquired = await self._fetch(node, place, {})
            while acquired:
                acquired = await self._handle(node, place, acquired)
        await self._leave()

    def _any_assigned(self) -> tuple[UUID, int] | None:
        places = list(self._assigned)
        return places[self.loop.draw(len(places))] if places else None

    async def _handle(
        self, node: int, place: tuple[UUID, int], acquired: Acknowledgements
    ) -> Acknowledgements | None:
        """Work on records and acknowledge them. Return records to work on next: renewed ones, or new ones."""
        is_diligent = self.world.is_closing
        is_slow = not is_diligent and self.loop.chance(0.7 if self._has_renewed else 0.15)
        slow_s = _SLOW_AFTER_RENEWAL_S if self._has_renewed else _SLOW_S
        await asyncio.sleep(self.loop.between(*(slow_s if is_slow else _WORK_S)))
        said: Acknowledgements = {}
        renewed: Acknowledgements = {}
        for where, batches in acquired.items():
            for first, last, _ in batches:
                for offset in range(first, last + 1):
                    kind = ACCEPT if is_diligent else self._outcome()
                    if (*where, offset) in self._damaged:
                        kind = RELEASE
                    if kind is not None:
                        said.setdefault(where, []).append((offset, offset, bytes((kind,))))
                    if kind == RENEW:
                        renewed.setdefault(where, []).append((offset, offset, b""))
        self._has_renewed = bool(renewed)
        if not said:
            return None
        if not renewed and self.loop.chance(0.3) and not self.is_leaving:
            return await self._fetch(node, place, said)
        await self._acknowledge(node, said, is_renewal=bool(renewed))
        return renewed

    def _outcome(self) -> int | None:
        if self.group == _WORKERS and not self.world.has_begun and self.loop.chance(0.2):
            return REJECT  # so that there is a dead-letter topic before the faults
        return _OUTCOMES[self.loop.draw(len(_OUTCOMES))]

    async def _fetch(
        self, node: int, place: tuple[UUID, int], said: Acknowledgements
    ) -> Acknowledgements | None:
        """Return the acquired records. `said` travels with the request."""
        epoch, places = self._sessions.get(node, (0, {}))
        if said and not epoch:
            return None  # the session is lost, and the locks with it
        new = message(SHARE_FETCH, 2)
        added = {} if place in places else {place: None}
        topics = tuple(
            new(
                "FetchTopic",
                topic_id=topic_id,
                partitions=(
                    new(
                        "FetchPartition",
                        partition_index=index,
                        acknowledgement_batches=_batches(new, said.get((topic_id, index), [])),
                    ),
                ),
            )
            for topic_id, index in {**added, **dict.fromkeys(said)}
        )
        request = new(
            "ShareFetchRequest",
            group_id=self.group,
            member_id=self.member,
            share_session_epoch=epoch,
            max_wait=timedelta(milliseconds=_FETCH_WAIT_MS),
            min_bytes=1,
            max_bytes=1 << 20,
            max_records=1 + self.loop.draw(4),
            batch_size=4,
            share_acquire_mode=self.loop.draw(2),
            topics=topics,
            forgotten_topics_data=(),
        )
        reply = await self.call(node, SHARE_FETCH, 2, request, purpose="share")
        if reply is None or reply.error_code != ErrorCode.none:
            self._sessions.pop(node, None)
            await self.back_off()
            return None
        self._sessions[node] = (epoch + 1, {**places, **added})
        acquired: Acknowledgements = {}
        for topic in reply.responses:
            for part in topic.partitions:
                where = (topic.topic_id, part.partition_index)
                if where in said and part.acknowledge_error_code == ErrorCode.none.value:
                    self._confirmed(where[1], said[where])
                if part.error_code != ErrorCode.none:
                    self.counts["share fetch errors"] += 1
                    await self.back_off()
                elif part.acquired_records:
                    self._received(node, topic.topic_id, part)
                    acquired[where] = [
                        (one.first_offset, one.last_offset, b"") for one in part.acquired_records
                    ]
        return acquired

    def _received(self, node: int, topic_id: UUID, part: Any) -> None:
        index = part.partition_index
        records = {record.offset: record.value for record in fetched_records(part.records, 0)[0]}
        is_excused = (topic_id, index, node) in self.world.committed.excused
        for one in part.acquired_records:
            for offset in range(one.first_offset, one.last_offset + 1):
                if is_excused and offset not in records:
                    self._damaged[topic_id, index, offset] = None
                    self.counts["damaged records received"] += 1
                    continue
                self.counts["records received"] += 1
                self._damaged.pop((topic_id, index, offset), None)
                self.world.history.received(self.group, TOPIC, index, offset, records.get(offset))

    async def _acknowledge(
        self, node: int, said: Acknowledgements, *, epoch: int | None = None, is_renewal: bool = False
    ) -> None:
        known, places = self._sessions.get(node, (0, {}))
        if not known:
            return
        new = message(SHARE_ACKNOWLEDGE, 2)
        topics = tuple(
            new(
                "AcknowledgeTopic",
                topic_id=topic_id,
                partitions=(
                    new(
                        "AcknowledgePartition",
                        partition_index=index,
                        acknowledgement_batches=_batches(new, batches),
                    ),
                ),
            )
            for (topic_id, index), batches in said.items()
        )
        request = new(
            "ShareAcknowledgeRequest",
            group_id=self.group,
            member_id=self.member,
            share_session_epoch=known if epoch is None else epoch,
            is_renew_ack=is_renewal,
            topics=topics,
        )
        reply = await self.call(node, SHARE_ACKNOWLEDGE, 2, request, purpose="share")
        if reply is None or reply.error_code != ErrorCode.none or epoch is not None:
            self._sessions.pop(node, None)
            return
        self._sessions[node] = (known + 1, places)
        for topic in reply.responses:
            for part in topic.partitions:
                if part.error_code == ErrorCode.none:
                    self._confirmed(part.partition_index, said[topic.topic_id, part.partition_index])
                else:
                    self.counts["acknowledgements refused"] += 1

    def _confirmed(self, index: int, batches: list[Acknowledged]) -> None:
        self.counts["acknowledgements confirmed"] += len(batches)
        self.world.history.confirmed(self.group, TOPIC, index, self.member, batches)


def _batches(new: Any, batches: list[Acknowledged]) -> tuple[Any, ...]:
    return tuple(
        new("AcknowledgementBatch", first_offset=first, last_offset=last, acknowledge_types=tuple(types))
        for first, last, types in batches
    )


class DeadLetterReader(Client):
    """Reads all dead letters, once the nodes have created their topic."""

    def __init__(self, world: ShareWorld, number: int) -> None:
        super().__init__(world.cluster, number, world.counts)
        self.world = world
        self.positions: dict[int, int] = {}

    async def run(self, index: int) -> None:
        self.positions[index] = 0
        while True:
            if self._end(index) <= self.positions[index]:
                await asyncio.sleep(0.05)
                continue
            position = self.positions[index]
            part = await self.fetch(DEAD_LETTERS, index, position)
            if part is None or part.error_code != ErrorCode.none:
                await self.back_off()
                continue
            for header, batch in iter_batches(part.records or b""):
                if checksum(batch) != header.crc:
                    break
                for record in decode_records(batch, 1 << 24):
                    if record.offset >= position:
                        self.counts["dead letters"] += 1
                        self.world.history.dead_letter(_dead_letter(record))
                self.positions[index] = header.last_offset + 1

    def _end(self, index: int) -> int:
        if DEAD_LETTERS not in self.cluster.image.topics:
            return 0
        return self.world.committed.named(DEAD_LETTERS, index).end_offset

    @property
    def has_read_all(self) -> bool:
        return all(position >= self._end(index) for index, position in self.positions.items())


def _dead_letter(record: Record) -> DeadLetter:
    headers = {name: (value or b"").decode() for name, value in record.headers}
    source = Shared(
        headers[GROUP_HEADER],
        headers[TOPIC_HEADER],
        int(headers[PARTITION_HEADER]),
        int(headers[OFFSET_HEADER]),
    )
    return DeadLetter(source, headers[REASON_HEADER], int(headers[DELIVERY_COUNT_HEADER]), record.value)


class ShareWorld(World):
    settings: ClassVar = {
        "group.share.session.timeout.ms": "800",
        "group.share.min.session.timeout.ms": "500",
        "group.share.heartbeat.interval.ms": str(int(_HEARTBEAT_S * 1000)),
        "group.share.min.heartbeat.interval.ms": "100",
        "group.share.initialize.retry.interval.ms": "500",
        "group.share.record.lock.duration.ms": str(_LOCK_MS),
        "group.share.min.record.lock.duration.ms": "100",
        "group.share.delivery.count.limit": str(_LIMIT),
        "share.coordinator.write.timeout.ms": "500",
        "share.coordinator.snapshot.update.records.per.snapshot": "20",
    }

    def __init__(self, cluster: Cluster, committed: CommittedLogs) -> None:
        super().__init__(cluster, committed)
        self.partitions = 1 + self.loop.draw(2)
        backoff = ("none", "fixed", "exponential")[self.loop.draw(3)]
        backoff_ms = 0 if backoff == "none" else 30
        self.configs: dict[str, dict[str, str]] = {
            _WORKERS: {
                "share.auto.offset.reset": "earliest",
                "penstock.share.backoff": backoff,
                "penstock.share.backoff.ms": "30",
                "penstock.share.backoff.max.ms": "60",
            }
        }
        policy = GroupPolicy(_LOCK_MS, _LIMIT)
        policies = {_WORKERS: policy._replace(writes_dead_letters=True, backoff_ms=backoff_ms)}
        if self.loop.chance(0.65):
            self.configs[_ONCE] = {
                "share.auto.offset.reset": "earliest",
                "penstock.share.delivery": "at-most-once",
                "errors.deadletterqueue.topic.name": "",
            }
            policies[_ONCE] = policy._replace(is_at_most_once=True)
        else:
            self.configs[_PLAIN] = {
                "share.auto.offset.reset": "earliest",
                "errors.deadletterqueue.topic.name": "",
            }
            policies[_PLAIN] = policy
        self.history = ShareHistory(cluster, committed, policies)
        self._state = CommittedShareState(committed)
        self.producer = Producer(self, 1)
        self.reader = DeadLetterReader(self, 2)
        self.inspector = Client(cluster, 3, self.counts)
        self.members: list[ShareMember] = []
        self._drained: dict[str, bool] = dict.fromkeys(policies, False)
        self._lags: dict[str, str] = {}

    @property
    def topics(self) -> tuple[TopicShape, ...]:
        return (TopicShape(TOPIC, self.partitions),)

    @property
    def clients(self) -> list[Client]:
        return [self.producer, *(member for member in self.members if not member.is_over)]

    @contextmanager
    def observing(self) -> Iterator[None]:
        retry_s = persister.RETRY_TIMEOUT_S
        persister.RETRY_TIMEOUT_S = _PERSISTER_RETRY_S  # type: ignore[misc]
        try:
            with self.history.observing(), self._state.observing():
                yield
        finally:
            persister.RETRY_TIMEOUT_S = retry_s  # type: ignore[misc]

    # -- the beginning ---------------------------------------------------------------------------------

    def begin(self) -> None:
        self.admin.spawn(self._begin())

    async def _begin(self) -> None:
        for group, configs in self.configs.items():
            while not await self._configure(group, configs):
                await self.admin.back_off()
        self.producer.spawn(self.producer.run())
        for index in range(self.partitions):
            self.reader.spawn(self.reader.run(index))
        for group in self.configs:
            for _ in range(_MEMBERS):
                self._join(group)
            self.inspector.spawn(self._inspect(group))
        self._later(self._replace_member)

    async def _configure(self, group: str, configs: dict[str, str]) -> bool:
        new = message(INCREMENTAL_ALTER_CONFIGS, 1)
        changes = tuple(
            new("AlterableConfig", name=name, config_operation=0, value=value)
            for name, value in configs.items()
        )
        resource = new(
            "AlterConfigsResource",
            resource_type=ResourceType.GROUP.value,
            resource_name=group,
            configs=changes,
        )
        request = new("IncrementalAlterConfigsRequest", resources=(resource,), validate_only=False)
        reply = await self.admin.call(
            self.admin.any_node(), INCREMENTAL_ALTER_CONFIGS, 1, request, timeout_s=1
        )
        if reply is not None:
            assert reply.responses[0].error_code != ErrorCode.invalid_config, reply
        return reply is not None and reply.responses[0].error_code == ErrorCode.none

    def _join(self, group: str) -> None:
        member = ShareMember(self, 10 + len(self.members), group)
        self.members.append(member)
        member.start()

    def _later(self, call: Any) -> None:
        self.loop.call_later(self.loop.between(0.2, 1.2), call, context=OUTSIDE)

    def _replace_member(self) -> None:
        """Another member joins, and one leaves or crashes."""
        alive = [member for member in self.members if not member.is_over and not member.is_leaving]
        if self.is_closing or len(self.members) > 60:
            return
        if alive and self.has_begun:
            member = alive[self.loop.draw(len(alive))]
            self._join(member.group)
            if self.loop.chance(0.5):
                member.is_leaving = True
            else:
                member.crash()
        self._later(self._replace_member)

    @property
    def has_begun(self) -> bool:
        groups = {record.group for record in self.history.delivered}
        return len(groups) == len(self.configs) and self.counts["dead letters"] > 0

    # -- requests of several clients -------------------------------------------------------------------

    async def find_coordinator(self, client: Client, group: str) -> int:
        while True:
            request = message(FIND_COORDINATOR, 4)(
                "FindCoordinatorRequest", key_type=0, coordinator_keys=(group,)
            )
            reply = await client.call(client.any_node(), FIND_COORDINATOR, 4, request)
            if reply is not None and reply.coordinators[0].error_code == ErrorCode.none:
                return int(reply.coordinators[0].node_id)
            await client.back_off()

    # -- the end ---------------------------------------------------------------------------------------

    async def _inspect(self, group: str) -> None:
        """After the faults: look at the group's lag until it has none."""
        while not (self.is_closing and self.producer.is_done):
            await asyncio.sleep(0.1)
        while not self._drained[group]:
            node = await self.find_coordinator(self.inspector, group)
            self._drained[group] = await self._has_no_lag(node, group)
            await asyncio.sleep(0.05)

    async def _has_no_lag(self, node: int, group: str) -> bool:
        new = message(DESCRIBE_SHARE_GROUP_OFFSETS, 1)
        asked = new(
            "DescribeShareGroupOffsetsRequestTopic",
            topic_name=TOPIC,
            partitions=tuple(range(self.partitions)),
        )
        request = new(
            "DescribeShareGroupOffsetsRequest",
            groups=(new("DescribeShareGroupOffsetsRequestGroup", group_id=group, topics=(asked,)),),
        )
        reply = await self.inspector.call(node, DESCRIBE_SHARE_GROUP_OFFSETS, 1, request, timeout_s=1)
        if reply is None or reply.groups[0].error_code != ErrorCode.none:
            return False
        parts = reply.groups[0].topics[0].partitions
        self._lags[group] = str([(part.partition_index, part.start_offset, part.lag) for part in parts])
        return all(part.error_code == ErrorCode.none and part.lag == 0 for part in parts)

    def unfinished(self) -> str | None:
        if not self.producer.is_done:
            return "records of the producer are not acknowledged"
        for group, is_drained in self._drained.items():
            if not is_drained:
                return f"{group} has a lag: {self._lags.get(group)}"
        for shard in self._share_state_shards():
            if shard is None:
                return "a shard of the share state is not loaded, and may have pending dead letters"
            if pending := sum(shard.pending_by_group().values()):
                return f"{pending} dead letters are pending"
        return None if self.reader.has_read_all else "not all dead letters are read"

    def _share_state_shards(self) -> Iterator[ShareCoordinatorShard | None]:
        """Yield each shard as its leader has loaded it; None while it has not."""
        for topic, index, state in self.cluster.partitions():
            if topic != SHARE_GROUP_STATE:
                continue
            node = self.cluster.machines[state.leader].serving if state.has_leader else None
            coordinator = None if node is None else node.share_state.existing
            active = None if coordinator is None else coordinator._runtime._active.get(index)
            is_current = active is not None and active.leader_epoch == state.leader_epoch
            yield active.shard if active is not None and is_current else None

    def finish(self) -> None:
        for group in self.configs:
            for index in range(self.partitions):
                self.history.finish(group, TOPIC, index)
