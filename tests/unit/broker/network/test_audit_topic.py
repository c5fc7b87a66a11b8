"""The audit topic: what it holds, who may read and write it, and that a flood or an outage does not fill memory."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from kio.schema.create_topics.v7 import request as create
from kio.schema.fetch.v12 import request as fetch
from tests.access.matrix import MILLISECOND, rule
from tests.access.ours import ADMIN, SETTINGS, Client
from tests.unit.broker.network.test_sasl import sasl_node
from tests.unit.broker.raw_client import until
from tests.unit.broker.three_nodes import PATIENT, Trio

from penstock.broker.config.node_settings import InvalidSetting, load_settings
from penstock.broker.metrics.exposition import collect_metrics
from penstock.broker.network import audit_topic
from penstock.broker.network.audit_topic import BYTES_MAX, LINES_MAX, AuditTopicWriter
from penstock.broker.node import Node
from penstock.broker.partition.idempotent_append import _produce_request
from penstock.cluster.controller.create_topics import CreateTopicResult, NewTopic
from penstock.cluster.image import ClusterImage, TopicState
from penstock.cluster.image import ResourceType as ConfigType
from penstock.cluster.topic_names import AUDIT
from penstock.protocol.acls import Operation, ResourceType
from penstock.protocol.backoff import ExponentialBackoff
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.record_batch import (
    BatchHeader,
    Record,
    decode_records,
    encode_batch,
    iter_batches,
    read_header,
)

NOW_MS = 1_700_000_000_000
AUDITED = {"penstock.audit.topic.enable": "true", "penstock.flush": "never"}
WITH_TOPIC = SETTINGS | AUDITED


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with sasl_node(tmp_path, **WITH_TOPIC) as node:
        yield node


def records(node: Node) -> list[Record]:
    partition = node.partitions.led(AUDIT, 0)
    data = b"" if partition is None else partition.log.read(0, 1 << 20, partition.high).data
    return [record for _, batch in iter_batches(data) for record in decode_records(batch, 1 << 20)]


async def refused(node: Node) -> list[Record]:
    """Ask for what is refused, and wait until the topic has it."""
    topic = create.CreatableTopic(
        name="orders", num_partitions=1, replication_factor=1, assignments=(), configs=()
    )
    request = create.CreateTopicsRequest(topics=(topic,), timeout=5000 * MILLISECOND, validate_only=False)
    await Client(node).ask(request)
    await until(lambda: records(node))
    return records(node)


async def test_the_topic_has_the_lines_of_the_audit_trail(node: Node) -> None:
    (record,) = await refused(node)
    line = json.loads(record.value or b"")
    assert (record.key, record.headers) == (b"User:alice", (("node", b"1"),))
    assert (line["event"], line["name"]) == ("refused", "orders")
    settings = node.image.config(ConfigType.TOPIC, AUDIT)
    assert (settings["cleanup.policy"], settings["retention.ms"]) == ("delete", "2592000000")
    families = {each.name: each.samples for each in await collect_metrics(node.metric_sources())}
    assert families["penstock_audit_topic_records"] == [((), 1)]
    assert families["penstock_audit_topic_dropped"] == [((), 0)]


async def test_only_nodes_write_it_and_only_a_rule_lets_clients_read_it(node: Node) -> None:
    await refused(node)
    batch = encode_batch([Record(0, NOW_MS, None, b"forged")])
    forged = _produce_request(node.image.topics[AUDIT].id, 0, batch)
    (answer,) = (await Client(node, principal=ADMIN).ask(forged)).responses[0].partition_responses
    assert answer.error_code is ErrorCode.invalid_topic_exception
    (answer,) = (
        (await Client(node, is_node=True, principal=ADMIN).ask(forged)).responses[0].partition_responses
    )
    assert answer.error_code is ErrorCode.none
    reader = Client(node)
    assert await read_error(reader) is ErrorCode.topic_authorization_failed
    assert node.authorizer is not None
    node.authorizer.update({uuid4(): rule((Operation.READ, ResourceType.TOPIC, AUDIT))})
    assert await read_error(reader) is ErrorCode.none


async def read_error(client: Client) -> ErrorCode:
    partition = fetch.FetchPartition(partition=0, fetch_offset=0, partition_max_bytes=1 << 20)
    request = fetch.FetchRequest(
        max_wait=timedelta(0),
        min_bytes=0,
        topics=(fetch.FetchTopic(topic=AUDIT, partitions=(partition,)),),
        forgotten_topics_data=(),
    )
    response = await client.ask(request)
    (answer,) = response.responses[0].partitions
    return answer.error_code


@pytest.mark.parametrize(
    "settings", [{"authorizer.class.name": ""}, {"allow.everyone.if.no.acl.found": "true"}]
)
def test_a_topic_that_everybody_could_read_is_refused(settings: dict[str, str]) -> None:
    given = {"authorizer.class.name": "StandardAuthorizer", "penstock.audit.topic.enable": "true"} | settings
    with pytest.raises(InvalidSetting, match="read the topic"):
        load_settings(given, {})


class Cluster:
    """Takes the place of the topic: `errors` are what the next attempts to create it or to append get."""

    def __init__(self, *errors: ErrorCode) -> None:
        self.image = ClusterImage()
        self.errors = list(errors)
        self.is_open = asyncio.Event()
        self.batches: list[tuple[BatchHeader, list[Record]]] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        self._ids = count(1)
        self.writer = AuditTopicWriter(
            settings=load_settings({}, {}),
            metadata=self,
            environment=self,  # type: ignore[arg-type]
            appends=self,  # type: ignore[arg-type]
            create_topics=self.create_topics,
        )

    def spawn(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        return task

    async def create_topics(self, topics: Sequence[NewTopic]) -> Sequence[CreateTopicResult]:
        (topic,) = topics
        if self.errors:
            return (CreateTopicResult(name=topic.name, error=self.errors.pop(), message="not now"),)
        self.image.topics[topic.name] = TopicState(topic.name, uuid4(), {0: None})  # type: ignore[dict-item]
        return (CreateTopicResult(name=topic.name, error=ErrorCode.none),)

    async def new_producer_id(self) -> int:
        return next(self._ids)

    async def append(self, topic: str, partition: int, batch: bytearray, **_: Any) -> int:
        await self.is_open.wait()
        if self.errors:
            raise ApiError(self.errors.pop())
        self.batches.append((read_header(batch), decode_records(batch, 1 << 20)))
        return 0

    def lines(self) -> list[bytes | None]:
        return [record.value for _, records in self.batches for record in records]


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_topic, "_BACKOFF", ExponentialBackoff(base_ms=1, cap_ms=1))


async def test_lines_above_the_bound_are_dropped_and_the_topic_says_how_many() -> None:
    cluster = Cluster()
    for number in range(LINES_MAX + 7):
        cluster.writer.add("User:mallory", f"{number}", NOW_MS)
    cluster.is_open.set()
    await until(lambda: cluster.writer.written == LINES_MAX)
    lines = cluster.lines()
    reports = [line for line in lines if line is not None and line.startswith(b"{")]
    assert [json.loads(report) for report in reports] == [{"event": "dropped", "lines": 7}]
    assert [line for line in lines if line not in reports] == [b"%d" % number for number in range(LINES_MAX)]
    assert cluster.writer.dropped == 7
    cluster.writer.add("User:alice", "afterwards", NOW_MS)
    await until(lambda: cluster.lines()[-1] == b"afterwards")


async def test_large_lines_are_bounded_by_their_bytes() -> None:
    cluster, line = Cluster(), "x" * 100_000
    for _ in range(100):
        cluster.writer.add("", line, NOW_MS)
    kept = BYTES_MAX // len(line)
    assert cluster.writer.dropped == 100 - kept
    cluster.is_open.set()
    await until(lambda: cluster.writer.written == kept)
    assert max(len(records) for _, records in cluster.batches) <= 3


async def test_sequences_continue_and_start_again_with_a_new_id_after_a_refusal() -> None:
    cluster = Cluster(ErrorCode.policy_violation)  # when the topic is created
    cluster.is_open.set()
    cluster.writer.add("", "a", NOW_MS)
    await until(lambda: cluster.writer.written == 1)
    cluster.writer.add("", "b", NOW_MS)
    await until(lambda: cluster.writer.written == 2)
    cluster.errors.append(ErrorCode.out_of_order_sequence_number)
    cluster.writer.add("", "c", NOW_MS)
    await until(lambda: cluster.writer.written == 3)
    assert cluster.lines() == [b"a", b"b", b"c"]
    headers = [header for header, _ in cluster.batches]
    assert [(header.producer_id, header.base_sequence) for header in headers] == [(1, 0), (1, 1), (2, 0)]


async def test_lines_that_the_topic_refuses_do_not_hold_up_the_others() -> None:
    cluster = Cluster()
    cluster.image.topics[AUDIT] = TopicState(AUDIT, uuid4(), {0: None})  # type: ignore[dict-item]
    cluster.errors.append(ErrorCode.message_too_large)
    cluster.is_open.set()
    cluster.writer.add("", "too large", NOW_MS)
    await until(lambda: cluster.writer.dropped == 1)
    cluster.writer.add("", "small", NOW_MS)
    await until(lambda: cluster.writer.written == 1)
    assert cluster.lines() == [b"small", b'{"event": "dropped", "lines": 1}']


async def test_every_node_writes_to_the_leader_of_its_partition(tmp_path: Path) -> None:
    rules = {"authorizer.class.name": "StandardAuthorizer", "super.users": "User:ANONYMOUS"}
    trio = Trio(tmp_path, PATIENT | AUDITED | rules)
    await trio.start()
    try:
        for number, node in trio.nodes.items():
            node.services.audit.write(f"User:{number}", NOW_MS, {"event": "refused"})

        def found() -> set[bytes]:
            leader = trio.leader(AUDIT)
            return set() if leader is None else {record.headers[0][1] or b"" for record in records(leader)}

        await until(lambda: found() == {b"1", b"2", b"3"})
    finally:
        await trio.stop()
