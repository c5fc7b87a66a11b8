"""One broker of three, without a network: the test plays the controller and the other brokers."""

from __future__ import annotations

import asyncio
import contextlib
import io
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from kio.index import load_request_schema, load_response_schema
from kio.serial import entity_reader, entity_writer
from tests.unit.broker.partition.process_stubs import PublishedMetadata, SetClockEnvironment
from tests.unit.broker.raw_client import turn_until, until

from penstock.broker.config.effective_settings import DynamicSettings
from penstock.broker.config.node_settings import load_settings
from penstock.broker.environment import Lazy, NoStorageBudgets
from penstock.broker.handlers import fetch, produce
from penstock.broker.metrics.counters import Metrics
from penstock.broker.network.quotas import ClientQuotaManager
from penstock.broker.network.requests import RequestContext
from penstock.broker.network.slices import TimeSlices
from penstock.broker.partition.alter_partition_manager import AlterPartitionManager
from penstock.broker.partition.fetch_sessions import FetchSessions
from penstock.broker.partition.follower_replica import FollowerReplica
from penstock.broker.partition.housekeeping import Housekeeping
from penstock.broker.partition.overflow import OverflowManager
from penstock.broker.partition.partition import Partition
from penstock.broker.partition.produced_batch import BatchPreparer
from penstock.broker.partition.replica_fetcher import ReplicationQuota
from penstock.broker.partition.replica_manager import ReplicaManager
from penstock.cluster.image import ClusterImage, ImageDelta, ResourceType
from penstock.cluster.metadata_records import (
    NO_LEADER_CHANGE,
    BrokerEndpoint,
    ConfigRecord,
    MetadataRecord,
    PartitionChangeRecord,
    PartitionRecord,
    RegisterBrokerRecord,
    TopicRecord,
)
from penstock.log.log_manager import LogManager
from penstock.protocol.errors import ErrorCode
from penstock.protocol.record_batch import Record, encode_batch

LISTENER = "PLAINTEXT"
TOPIC_ID = UUID(int=77)
#: This broker, and the two others.
ME, PEER, OTHER = 1, 2, 3
BROKER_EPOCH = 100


class Fetchers:
    """What this node follows, and in which epoch of whom."""

    def __init__(self) -> None:
        self.following: dict[tuple[str, int], tuple[int, int]] = {}
        self.may_stop = asyncio.Event()
        self.may_stop.set()

    def follow(self, partition: Partition) -> None:
        self.following[partition.key] = (partition.leader_id, partition.leader_epoch)

    def unfollow(self, partition: Partition) -> Awaitable[object]:
        self.following.pop(partition.key, None)
        return self.may_stop.wait()

    def is_truncating(self, partition: Partition) -> bool:
        return False


class Controller:
    """Keeps the requests that reach it, and answers as the test says."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.answer: Callable[[Any], Any] | None = None
        self.is_answered: Callable[[Any], bool] = lambda request: self.answer is not None
        self.lost: list[set[tuple[str, int]]] = []

    async def call(self, api_key: int, request: Any, timeout_s: float = 15.0) -> Any:
        self.requests.append(request)
        await turn_until(lambda: self.is_answered(request))
        assert self.answer is not None
        return self.answer(request)

    async def report_lost(self, keys: Collection[tuple[str, int]]) -> set[tuple[str, int]]:
        self.lost.append(set(keys))
        return set(keys)


class Broker:
    """The components of a broker that the data path uses. To its handlers it is their `BrokerServices`."""

    def __init__(
        self,
        tmp_path: Path,
        state: str = "serving",
        node_id: int = ME,
        controller: Controller | None = None,
        **settings: str,
    ) -> None:
        given = {
            "listeners": f"{LISTENER}://127.0.0.1:0",
            "log.dirs": str(tmp_path / "data"),
            "node.id": str(node_id),
        }
        given |= {name.replace("_", "."): value for name, value in settings.items()}
        self.settings = load_settings(given, {})
        self.dynamic = DynamicSettings(self.settings)
        self.node_id = node_id
        self.state = state
        self.metrics = Metrics()
        self.authorizer = None
        self.quotas = ClientQuotaManager(self.settings, lambda: self.now_ms())
        self.image_changes: list[ImageDelta] = []
        self.environment = environment = SetClockEnvironment(1_700_000_000_000)
        self.now_ms, self.spawn, self.in_thread = environment.now_ms, environment.spawn, environment.in_thread
        self.store = LogManager.open(tmp_path / "data", node_id=node_id)
        self.metadata = PublishedMetadata()
        self.controller = controller or Controller()
        self.was_clean = True
        self.fetchers: Any = Fetchers()
        self.partitions = ReplicaManager(
            environment,
            self.settings,
            self.store,
            metadata=self.metadata,
            metrics=self.metrics,
            sync_executor=environment.sync_executor,
            fetchers=lambda: self.fetchers,
            isr=lambda: self.isr,
            overflow=OverflowManager(
                environment,
                self.settings,
                self.store,
                metadata=self.metadata,
                budgets=NoStorageBudgets(),
                partitions=lambda: self.partitions,
                retain=lambda partition: self.housekeeping.apply_retention(partition),
                is_unlinking=lambda partition: self.housekeeping.is_unlinking(partition),
            ),
            report_lost=self.controller.report_lost,
            was_clean=lambda: self.was_clean,
            pause=TimeSlices(1.0).pause,
            is_starting=lambda: self.state == "starting",
        )
        self.isr = AlterPartitionManager(
            environment,
            self.settings,
            self.metadata,
            partitions=self.partitions,
            call_controller=self.controller.call,
            broker_epoch=lambda: BROKER_EPOCH + node_id,
        )
        self.housekeeping = Housekeeping(
            environment,
            self.settings,
            self.store,
            dynamic=self.dynamic,
            metadata=self.metadata,
            partitions=self.partitions,
            fetchers=lambda: self.fetchers,
            schedule=Lazy(lambda: pytest.fail("nothing is scheduled")),
            image_changed=self.image_changes.append,
        )
        self.fetch_sessions = FetchSessions(1000, iter(range(1, 10_000)).__next__)
        self.preparer = BatchPreparer(self.settings, environment, pytest.fail)
        self.fetch_bytes_max = 1 << 30
        self.selects_replicas = False
        self.leader_rate, self.throttle_clock_s = -1, 0.0
        self.leader_throttle = ReplicationQuota(lambda: self.leader_rate, lambda: self.throttle_clock_s)
        self.server = SimpleNamespace(
            response_bytes_left=lambda: 1 << 30,
            failed=self._failed,
            gathered=lambda work: work(),
            buffers=SimpleNamespace(hold=lambda size: None, release=lambda size: None, is_full=False),
        )

    @property
    def image(self) -> ClusterImage:
        return self.metadata.image

    def new_follower(self, partition: Partition, leader_id: int, leader_epoch: int) -> FollowerReplica:
        return FollowerReplica(
            partition,
            leader_id,
            leader_epoch,
            environment=self.environment,
            store=self.store,
            handle_read_error=self.partitions.handle_read_error,
            truncated=self.housekeeping.truncated,
        )

    def _failed(self, _: object) -> None:
        raise AssertionError("a handler has failed")

    async def close(self, *, clean: bool = True) -> None:
        await self.environment.cancel_tasks()
        saved = self.partitions.high_watermarks()
        for partition in self.partitions:
            await partition.close()
        self.store.close(clean=clean, high_watermarks=saved)
        self.environment.close()

    # -- the controller ------------------------------------------------------------------------------

    async def apply(self, *records: MetadataRecord) -> None:
        image = self.image.fork()
        delta = image.apply(records)
        await self.partitions.apply(delta, image)
        self.metadata.image = image

    async def register(self, *broker_ids: int, epoch: int = BROKER_EPOCH) -> None:
        await self.apply(*(registration(broker, epoch + broker) for broker in broker_ids))

    async def create(
        self, topic: str = "t", *, leader: int = ME, partitions: int = 1, min_isr: int = 1, **state: Any
    ) -> None:
        settings = {"penstock.flush": "never", "min.insync.replicas": str(min_isr)}
        settings |= state.pop("configs", {})
        await self.apply(
            TopicRecord(name=topic, topic_id=state.setdefault("topic_id", TOPIC_ID)),
            *configs(topic, settings),
            *(_partition(index, leader, state) for index in range(partitions)),
        )

    async def change(self, index: int = 0, *, leader: int = NO_LEADER_CHANGE, **changes: Any) -> None:
        await self.apply(
            PartitionChangeRecord(partition_id=index, topic_id=TOPIC_ID, leader=leader, **changes)
        )

    def partition(self, index: int = 0) -> Partition:
        partition = self.partitions.get("t", index)
        assert partition is not None
        return partition

    # -- clients and followers -----------------------------------------------------------------------

    def send(self, handler: Any, request: Any) -> Pending:
        """Carry out a hot request; the answer may come later."""
        schema = type(request)
        out = io.BytesIO()
        entity_writer(schema)(out, request)
        pending = Pending(schema.__api_key__, schema.__version__)
        ctx = RequestContext(self, schema.__api_key__, schema.__version__, "c", "h", LISTENER)  # type: ignore[arg-type]
        reply = handler.handle(ctx, pending, memoryview(bytearray(out.getvalue())), 0, 9)
        if reply is not pending:
            pending.fulfil(pending, reply)
        return pending

    def produce(self, value: bytes = b"x", *, acks: int = -1, index: int = 0, version: int = 12) -> Pending:
        schema = _schema(0, version)
        part = schema.PartitionProduceData(
            index=index, records=bytes(encode_batch([Record(0, 1, None, value)]))
        )
        topic = schema.TopicProduceData(name="t", partition_data=(part,))
        return self.send(
            produce,
            schema.ProduceRequest(acks=acks, timeout=_ms(60_000), topic_data=(topic,), transactional_id=None),
        )

    def fetch(
        self,
        offsets: Mapping[int, int] | None = None,
        *,
        replica: int = -1,
        session: tuple[int, int] = (0, 0),
        max_wait_ms: int = 0,
        leader_epoch: int | None = None,
        last_epoch: int = -1,
        broker_epoch: int | None = None,
        topic_id: UUID = TOPIC_ID,
        isolation: int = 0,
        rack: str = "",
    ) -> Pending:
        schema = _schema(1, 17)
        asked = tuple(
            schema.FetchPartition(
                partition=index,
                current_leader_epoch=self._epoch(index) if leader_epoch is None else leader_epoch,
                fetch_offset=offset,
                last_fetched_epoch=last_epoch,
                partition_max_bytes=1 << 20,
            )
            for index, offset in (offsets or {}).items()
        )
        epoch = BROKER_EPOCH + replica if broker_epoch is None else broker_epoch
        return self.send(
            fetch,
            schema.FetchRequest(
                max_wait=_ms(max_wait_ms),
                min_bytes=1,
                isolation_level=isolation,
                session_id=session[0],
                session_epoch=session[1],
                topics=(schema.FetchTopic(topic_id=topic_id, partitions=asked),) if asked else (),
                forgotten_topics_data=(),
                rack_id=rack,
                replica_state=schema.ReplicaState(
                    replica_id=replica, replica_epoch=epoch if replica >= 0 else -1
                ),
            ),
        )

    def _epoch(self, index: int) -> int:
        state = self.image.partition("t", index)
        return -1 if state is None else state.leader_epoch


class Pending:
    """A connection with one request under way."""

    is_inter_broker = may_send_as_node = serves_controller = True
    account = None
    is_open = True
    throttle_ms = 0

    def __init__(self, api_key: int, version: int) -> None:
        self._schema = load_response_schema(api_key, version)
        self.on_lost: Callable[[], None] | None = None
        self._reply: bytes | None = None

    def defer(self, api_key: int) -> Pending:
        return self

    def fulfil(self, slot: Pending, reply: Any) -> None:
        assert self._reply is None, "answered twice"
        self._reply = reply if isinstance(reply, bytes) else b"".join(bytes(part) for part in reply)

    @property
    def is_done(self) -> bool:
        return self._reply is not None

    @property
    def answer(self) -> Any:
        assert self._reply is not None, "not answered yet"
        (size,) = struct.unpack_from(">i", self._reply)
        assert size == len(self._reply) - 4
        body, used = entity_reader(self._schema)(self._reply, 9)
        assert 9 + used == len(self._reply)
        return body

    @property
    def raw(self) -> bytes:
        assert self._reply is not None, "not answered yet"
        return self._reply

    @property
    def produced(self) -> Any:
        return self.answer.responses[0].partition_responses[0]

    @property
    def fetched(self) -> dict[int, Any]:
        return {part.partition_index: part for topic in self.answer.responses for part in topic.partitions}

    async def done(self) -> Pending:
        await until(lambda: self.is_done)
        return self


@contextlib.asynccontextmanager
async def broker_of_three(tmp_path: Path, **settings: str) -> AsyncIterator[Broker]:
    broker = Broker(tmp_path, **settings)
    await broker.register(ME, PEER, OTHER)
    try:
        yield broker
    finally:
        await broker.close()


async def turn() -> None:
    """Let the loop do everything that needs no time."""
    for _ in range(10):
        await asyncio.sleep(0)


def registration(broker: int, epoch: int, **changes: Any) -> RegisterBrokerRecord:
    at = BrokerEndpoint(name=LISTENER, host=f"host-{broker}", port=9090 + broker, security_protocol=0)
    fields: dict[str, Any] = {"fenced": False, "rack": f"rack-{broker}"} | changes
    return RegisterBrokerRecord(
        broker_id=broker, incarnation_id=UUID(int=epoch), broker_epoch=epoch, end_points=(at,), **fields
    )


def configs(topic: str, settings: Mapping[str, str]) -> list[ConfigRecord]:
    return [
        ConfigRecord(resource_type=ResourceType.TOPIC, resource_name=topic, name=name, value=value)
        for name, value in settings.items()
    ]


def _partition(index: int, leader: int, state: Mapping[str, Any]) -> PartitionRecord:
    replicas = state.get("replicas", (ME, PEER, OTHER))
    fields: dict[str, Any] = {"leader_epoch": 5, "partition_epoch": 7, "topic_id": TOPIC_ID, "isr": replicas}
    fields |= dict(state) | {"replicas": replicas}
    return PartitionRecord(
        partition_id=index, leader=leader, directories=(UUID(int=9),) * len(replicas), **fields
    )


def alter_partition_answer(request: Any, error: ErrorCode = ErrorCode.none) -> Any:
    """As the controller answers when it does what it was asked to."""
    from kio.schema.alter_partition.v3 import response as schema

    return schema.AlterPartitionResponse(
        throttle_time=_ms(0),
        error_code=ErrorCode.none,
        topics=tuple(
            schema.TopicData(
                topic_id=topic.topic_id,
                partitions=tuple(
                    schema.PartitionData(
                        partition_index=part.partition_index,
                        error_code=error,
                        leader_id=request.broker_id,
                        leader_epoch=part.leader_epoch,
                        isr=tuple(member.broker_id for member in part.new_isr_with_epochs),
                        partition_epoch=part.partition_epoch + 1,
                    )
                    for part in topic.partitions
                ),
            )
            for topic in request.topics
        ),
    )


def _schema(api_key: int, version: int) -> Any:
    import importlib

    return importlib.import_module(load_request_schema(api_key, version).__module__)


def _ms(count: int) -> Any:
    from datetime import timedelta

    return timedelta(milliseconds=count)
