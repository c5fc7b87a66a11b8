"""A node that follows, with real logs, and leaders in memory that answer its fetches."""

from __future__ import annotations

import asyncio
import datetime
import io
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from functools import partial
from pathlib import Path
from typing import Any, Literal
from uuid import UUID

from kio.schema.errors import ErrorCode
from kio.schema.fetch.v17 import response as schema
from kio.serial import entity_writer
from tests.unit.broker.partition.process_stubs import FetchedPeers, PublishedMetadata, SetClockEnvironment

from penstock.broker.config.effective_settings import DynamicSettings
from penstock.broker.config.node_settings import load_settings
from penstock.broker.metrics.counters import Metrics
from penstock.broker.network.peers import PeerUnreachable
from penstock.broker.partition.follower_replica import FollowerReplica
from penstock.broker.partition.partition import Partition
from penstock.broker.partition.replica_fetcher import ReplicaFetcherManager
from penstock.cluster.image import PartitionState, ResourceType
from penstock.cluster.metadata_records import ConfigRecord
from penstock.log.config import LogConfig
from penstock.log.log import Log
from penstock.log.log_manager import LogManager
from penstock.log.segment_files import FilePool
from penstock.protocol.errors import ApiError
from penstock.protocol.fetch import FetchPartition, FetchRequest, parse_fetch_request
from penstock.protocol.record_batch import Record, encode_batch

NOW_MS = 1_700_000_000_000
SETTINGS = {
    "listeners": "PLAINTEXT://127.0.0.1:0",
    "node.id": "2",
    "replica.fetch.wait.max.ms": "60000",
    "replica.lag.time.max.ms": "60000",
    "replica.socket.timeout.ms": "60000",
    "replica.fetch.backoff.ms": "5",
}


def batch_of(*values: bytes) -> memoryview:
    return memoryview(encode_batch([Record(i, NOW_MS, b"key", value) for i, value in enumerate(values)]))


class HeldSyncs(Executor):
    """A disk that syncs when the test says so."""

    def __init__(self) -> None:
        self.wanted = asyncio.Event()
        self._held: list[Callable[[], object]] = []

    def submit(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self._held.append(partial(call, *args, **kwargs))
        self.wanted.set()
        return Future()

    def run(self) -> None:
        held, self._held = self._held, []
        for call in held:
            call()


class FollowerPartition(Partition):
    """A partition that follows node 1. Its syncs wait for `sync_now`."""

    def __init__(self, log: Log, topic_id: UUID, index: int) -> None:
        self._syncs = HeldSyncs()
        super().__init__(
            log,
            topic="orders",
            topic_id=topic_id,
            index=index,
            executor=self._syncs,
            metrics=Metrics(),
            loop=asyncio.get_running_loop(),
            high_watermark=0,
        )
        state = PartitionState((1, 2), (1,), leader=1, leader_epoch=1, partition_epoch=1, directories=())
        self.follow(state, local_id=2)

    async def sync_wanted(self) -> None:
        await self._syncs.wanted.wait()

    def sync_now(self) -> None:
        self._syncs.run()


class Follower:
    """Node 2, as far as it follows."""

    def __init__(self, directory: Path) -> None:
        self.environment = SetClockEnvironment(NOW_MS)
        self.store = LogManager.open(directory / "follower", node_id=2)
        self.dynamic = DynamicSettings(load_settings(SETTINGS, {}))
        self.metadata = PublishedMetadata()
        self.leaders: dict[int, Leader] = {}
        self.heard_of_truncation: list[Partition] = []

    def partition(
        self, index: int = 0, *, topic_id: UUID | None = None, flush: Literal["ack", "never"] = "never"
    ) -> FollowerPartition:
        topic_id = topic_id or UUID(int=1000)
        log = self.store.open_or_create("orders", index, topic_id, LogConfig(flush=flush), now_ms=NOW_MS)
        return FollowerPartition(log, topic_id, index)

    def replica(self, partition: Partition, leader_id: int = 1, leader_epoch: int = 1) -> FollowerReplica:
        return FollowerReplica(
            partition,
            leader_id,
            leader_epoch,
            environment=self.environment,
            store=self.store,
            handle_read_error=self._read_error,
            truncated=self._truncated,
        )

    def fetchers(self, **settings: str) -> ReplicaFetcherManager:
        given = SETTINGS | {name.replace("_", "."): value for name, value in settings.items()}
        return ReplicaFetcherManager(
            self.environment,
            load_settings(given, {}),
            self.dynamic,
            metadata=self.metadata,
            peers=Leaders(self.leaders),
            new_follower=self.replica,
            broker_epoch=lambda: 42,
        )

    def configure(self, name: str, value: int) -> None:
        """Change a setting of all brokers while they run."""
        image = self.metadata.image.fork()
        image.apply(
            [ConfigRecord(resource_type=ResourceType.BROKER, resource_name="", name=name, value=str(value))]
        )
        self.metadata.image = image
        self.dynamic.image_changed(image)

    async def close(self) -> None:
        await self.environment.cancel_tasks()
        self.environment.close()
        self.store.close(clean=False)

    def _read_error(self, partition: Partition, error: ApiError) -> None:
        raise AssertionError(f"{partition} cannot be read: {error}")

    def _truncated(self, partition: Partition) -> None:
        partition.truncated()
        self.heard_of_truncation.append(partition)


class Leaders(FetchedPeers):
    def __init__(self, leaders: Mapping[int, Leader]) -> None:
        self._leaders = leaders

    async def fetch(
        self, where: int | tuple[str, int], body: Any, *, version: int, timeout_s: float, purpose: str = ""
    ) -> memoryview:
        assert version == 17
        assert isinstance(where, int)
        leader = self._leaders.get(where)
        if leader is None:
            raise PeerUnreachable("nobody there", refused=True)
        return await leader.fetch(parse_fetch_request(memoryview(body), 0, version))


class Leader:
    """Serves logs of its own by the rules of a session, parks what brings no news, and remembers all requests."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files = FilePool()
        self.logs: dict[tuple[bytes, int], Log] = {}
        self.high: dict[tuple[bytes, int], int] = {}
        self.epoch = 1
        self.errors: dict[tuple[bytes, int], ErrorCode] = {}
        self.requests: list[FetchRequest] = []
        self.session: dict[tuple[bytes, int], FetchPartition] = {}
        self.session_id, self.session_epoch = 0, 0
        self.given_up = self.waiting = 0
        self._told: dict[tuple[bytes, int], tuple[int, int]] = {}
        self._news = asyncio.Event()
        self._asked = asyncio.Event()

    def log(self, index: int = 0, topic_id: UUID | None = None) -> Log:
        key = ((topic_id or UUID(int=1000)).bytes, index)
        if key not in self.logs:
            directory = self._directory / f"leader-{key[0].hex()}-{index}"
            directory.mkdir(parents=True)
            self.logs[key] = Log.open(directory, LogConfig(), files=self._files, now_ms=NOW_MS)
        return self.logs[key]

    def write(self, *values: bytes, index: int = 0, topic_id: UUID | None = None, epoch: int = 1) -> None:
        log = self.log(index, topic_id)
        log.append(batch_of(*values), leader_epoch=epoch, now_ms=NOW_MS)
        self.high[(topic_id or UUID(int=1000)).bytes, index] = log.end_offset
        self._news.set()

    def forget_session(self) -> None:
        self.session_id = -1
        self._news.set()

    async def asked(self, count: int) -> FetchRequest:
        """The request of that number, from 1, once it has come."""
        while len(self.requests) < count:
            self._asked.clear()
            await self._asked.wait()
        return self.requests[count - 1]

    async def fetch(self, request: FetchRequest) -> memoryview:
        self.requests.append(request)
        self._asked.set()
        error = self._open(request)
        if error is not ErrorCode.none:
            return _response(error, 0, {})
        session_id = self.session_id
        try:
            while not (answers := self._answers(is_full=request.session_epoch == 0)):
                self._news.clear()
                self.waiting += 1
                try:
                    async with asyncio.timeout(request.max_wait_ms / 1000):
                        await self._news.wait()
                finally:
                    self.waiting -= 1
                if self.session_id != session_id:
                    return _response(ErrorCode.fetch_session_id_not_found, 0, {})
        except TimeoutError:
            answers = {}
        except asyncio.CancelledError:
            self.given_up += 1
            raise
        return _response(ErrorCode.none, self.session_id, answers)

    def _open(self, request: FetchRequest) -> ErrorCode:
        if request.session_epoch == 0:
            self.session.clear()
            self._told.clear()
            self.session_id, self.session_epoch = max(self.session_id, 0) + 1, 0
        elif request.session_id != self.session_id:
            return ErrorCode.fetch_session_id_not_found
        elif request.session_epoch != self.session_epoch:
            return ErrorCode.invalid_fetch_session_epoch
        self.session_epoch += 1
        for topic_id, partitions in request.topics:
            self.session.update({(topic_id, asked.partition): asked for asked in partitions})
        for topic_id, indexes in request.forgotten:
            for index in indexes:
                del self.session[topic_id, index]
                self._told.pop((topic_id, index), None)
        return ErrorCode.none

    def _answers(self, *, is_full: bool) -> dict[tuple[bytes, int], Any]:
        answers: dict[tuple[bytes, int], Any] = {}
        for key, asked in self.session.items():
            answer = self._answer(key, asked)
            told = (answer.high_watermark, answer.log_start_offset)
            is_news = answer.records or answer.error_code is not ErrorCode.none or self._told.get(key) != told
            if is_news or answer.diverging_epoch.epoch >= 0:
                answers[key] = answer
                self._told[key] = told
        return answers

    def _answer(self, key: tuple[bytes, int], asked: FetchPartition) -> Any:
        log = self.logs.get(key)
        if log is None or key in self.errors:
            return _partition(key[1], self.errors.get(key, ErrorCode.unknown_topic_or_partition))
        if asked.leader_epoch != self.epoch:
            return _partition(key[1], ErrorCode.fenced_leader_epoch)
        high, start = self.high.get(key, 0), log.start_offset
        if asked.last_fetched_epoch >= 0:
            epoch, end = log.end_offset_for(asked.last_fetched_epoch)
            if epoch < 0:
                epoch, end = log.epochs.latest, log.end_offset
            if epoch < asked.last_fetched_epoch or end < asked.offset:
                return _partition(key[1], ErrorCode.none, high, start, diverging=(epoch, end))
        try:
            piece = log.read(asked.offset, asked.max_bytes, log.end)
        except ApiError as error:
            return _partition(key[1], error.code, high, start)
        return _partition(key[1], ErrorCode.none, high, start, bytes(piece.data))


def _partition(
    index: int,
    error: ErrorCode,
    high: int = -1,
    start: int = -1,
    records: bytes = b"",
    diverging: tuple[int, int] = (-1, -1),
) -> Any:
    return schema.PartitionData(
        partition_index=index,
        error_code=error,
        high_watermark=high,
        last_stable_offset=high,
        log_start_offset=start,
        diverging_epoch=schema.EpochEndOffset(epoch=diverging[0], end_offset=diverging[1]),
        aborted_transactions=None,
        preferred_read_replica=-1,
        records=records,
    )


def _response(error: ErrorCode, session_id: int, answers: dict[tuple[bytes, int], Any]) -> memoryview:
    topics: dict[bytes, list[Any]] = {}
    for (topic_id, _), answer in answers.items():
        topics.setdefault(topic_id, []).append(answer)
    message = schema.FetchResponse(
        throttle_time=datetime.timedelta(0),
        error_code=error,
        session_id=session_id,
        responses=tuple(
            schema.FetchableTopicResponse(topic_id=UUID(bytes=topic_id), partitions=tuple(partitions))
            for topic_id, partitions in topics.items()
        ),
    )
    out = io.BytesIO()
    entity_writer(schema.FetchResponse)(out, message)
    return memoryview(out.getvalue())
