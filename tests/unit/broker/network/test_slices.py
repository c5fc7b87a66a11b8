"""Requests of many parts are handled in slices: each turn of the loop does little of them, and order is kept.

The clock is a number that moves with each look at it, so a slice has room for a number of steps that is known.
"""

import asyncio
import io
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from kio.index import load_request_schema, load_response_schema
from kio.serial import entity_reader, entity_writer
from tests.unit.broker.raw_client import (
    API_VERSIONS,
    Client,
    batch_of,
    create_topic,
    frame,
    produce_many,
    produced,
    running,
    turn_until,
    until,
)

from penstock.broker.handlers import offset_commit
from penstock.broker.network.access import Each, Need
from penstock.broker.network.slices import TimeSlices
from penstock.broker.network.time_accounts import TimeAccount
from penstock.broker.node import Node
from penstock.protocol.acls import Operation, ResourceType
from penstock.protocol.errors import ErrorCode
from penstock.protocol.schemas import request_is_flexible
from penstock.protocol.steps import Steps, finish

PARTS = 600
#: A slice is one millisecond, so it has room for ten steps.
TICK_S = 0.0001
STEPS_OF_A_TURN = 30
#: Looks at the clock for each step: one after the step, and those of each slice at its begin and its end.
LOOKS_PER_STEP = 1.5


class Ticks:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        monkeypatch.setattr("penstock.broker.network.slices.perf_counter", self._now)

    def _now(self) -> float:
        self.count += 1
        return self.count * TICK_S

    @contextmanager
    def most_in_a_turn(self) -> Iterator[list[int]]:
        """A list that has, at last, the steps of each turn of the event loop."""
        turns: list[int] = []

        async def watch() -> None:
            before = self.count
            while True:
                await asyncio.sleep(0)
                turns.append(self.count - before)
                before = self.count

        task = asyncio.get_running_loop().create_task(watch())
        try:
            yield turns
        finally:
            task.cancel()


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> Ticks:
    return Ticks(monkeypatch)


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with running(tmp_path, auto_create_topics_enable="false") as node:
        await create_topic(node, "t", partitions=2)
        yield node


class Requester:
    def __init__(self) -> None:
        self.is_open = True
        self.account = None
        self.holds = 0

    def abort_if_peer_closed(self) -> bool:
        return False

    def hold(self) -> None:
        self.holds += 1

    def release(self) -> None:
        self.holds -= 1


def steps(count: int, log: list[int]) -> Steps[int]:
    for number in range(count):
        log.append(number)
        yield
    return count


# -- slices --------------------------------------------------------------------------------------------------


async def test_what_fits_into_a_slice_is_done_at_once(ticks: Ticks) -> None:
    requester, log = Requester(), []
    assert TimeSlices(0.001).run(steps(5, log), requester) == 5
    assert requester.holds == 0


async def test_the_rest_takes_a_slice_of_each_turn_and_holds_the_requester(ticks: Ticks) -> None:
    requester, log, spent = Requester(), [], []
    result = TimeSlices(0.001).run(steps(100, log), requester, spent.append)
    assert not isinstance(result, int)
    assert 5 < len(log) < 15
    assert requester.holds == 1
    with ticks.most_in_a_turn() as turns:
        assert await result == 100
    assert max(turns) <= STEPS_OF_A_TURN
    assert len(turns) >= 8
    assert len(spent) >= 8
    await turn_until(lambda: requester.holds == 0)


async def test_all_that_waits_shares_one_slice(ticks: Ticks) -> None:
    slices = TimeSlices(0.001)
    logs: list[list[int]] = [[] for _ in range(20)]
    results = [slices.run(steps(50, log), Requester()) for log in logs]
    for _ in range(100):
        before = [len(log) for log in logs]
        count = ticks.count
        await asyncio.sleep(0)
        assert ticks.count - count <= STEPS_OF_A_TURN
        after = [len(log) for log in logs]
        assert max(after) - min(after) <= 20, "they do not take turns"
        if before == after and min(after) == 50:
            break
    assert [await result for result in results if not isinstance(result, int)] == [50] * 20


async def test_nothing_is_done_for_a_requester_that_has_gone(ticks: Ticks) -> None:
    requester, log = Requester(), []
    result = TimeSlices(0.001).run(steps(1000, log), requester)
    assert not isinstance(result, int)
    requester.is_open = False
    done = len(log)
    with pytest.raises(asyncio.CancelledError):
        await result
    assert len(log) == done
    assert requester.holds == 0


async def test_an_error_in_a_later_slice_is_raised(ticks: Ticks) -> None:
    def failing() -> Steps[None]:
        yield from steps(50, [])
        raise LookupError

    result = TimeSlices(0.001).run(failing(), Requester())
    assert result is not None
    with pytest.raises(LookupError):
        await result


# -- requests ------------------------------------------------------------------------------------------------


def request(api_key: int, version: int, /, **values: Any) -> bytes:
    schema = load_request_schema(api_key, version)
    out = io.BytesIO()
    entity_writer(schema)(out, schema(**values))
    tags = b"\x00" if request_is_flexible(api_key, version) else b""
    return frame(api_key, version, tags + out.getvalue())


def part(api_key: int, version: int, name: str, /, **values: Any) -> Any:
    module = __import__(load_request_schema(api_key, version).__module__, fromlist=[name])
    return getattr(module, name)(**values)


def response(api_key: int, version: int, data: bytes) -> Any:
    start = 1 if request_is_flexible(api_key, version) else 0
    return entity_reader(load_response_schema(api_key, version))(memoryview(data), start)[0]


def metadata() -> tuple[bytes, Callable[[bytes], int]]:
    topics = tuple(
        part(3, 12, "MetadataRequestTopic", topic_id=None, name=f"absent-{number}") for number in range(PARTS)
    )
    asked = request(
        3, 12, topics=topics, allow_auto_topic_creation=True, include_topic_authorized_operations=False
    )
    return asked, lambda data: len(response(3, 12, data).topics)


def list_offsets() -> tuple[bytes, Callable[[bytes], int]]:
    parts = tuple(
        part(2, 7, "ListOffsetsPartition", partition_index=index, current_leader_epoch=-1, timestamp=-1)
        for index in range(PARTS)
    )
    topics = (part(2, 7, "ListOffsetsTopic", name="t", partitions=parts),)
    asked = request(2, 7, replica_id=-1, isolation_level=0, topics=topics)
    return asked, lambda data: len(response(2, 7, data).topics[0].partitions)


def describe_configs() -> tuple[bytes, Callable[[bytes], int]]:
    resources = tuple(
        part(
            32,
            4,
            "DescribeConfigsResource",
            resource_type=2,
            resource_name=f"absent-{number}",
            configuration_keys=None,
        )
        for number in range(PARTS)
    )
    asked = request(32, 4, resources=resources, include_synonyms=False, include_documentation=False)
    return asked, lambda data: len(response(32, 4, data).results)


def leader_epochs() -> tuple[bytes, Callable[[bytes], int]]:
    parts = tuple(
        part(23, 4, "OffsetForLeaderPartition", partition=index, current_leader_epoch=-1, leader_epoch=0)
        for index in range(PARTS)
    )
    topics = (part(23, 4, "OffsetForLeaderTopic", topic="t", partitions=parts),)
    asked = request(23, 4, replica_id=-1, topics=topics)
    return asked, lambda data: len(response(23, 4, data).topics[0].partitions)


def find_coordinators() -> tuple[bytes, Callable[[bytes], int]]:
    keys = tuple(f"group-{number}" for number in range(PARTS))
    asked = request(10, 4, key_type=0, coordinator_keys=keys)
    return asked, lambda data: len(response(10, 4, data).coordinators)


def commit_of(indexes: Iterator[int] | range, offset: int) -> bytes:
    parts = tuple(
        part(
            8,
            8,
            "OffsetCommitRequestPartition",
            partition_index=index,
            committed_offset=offset,
            committed_leader_epoch=-1,
            committed_metadata="",
        )
        for index in indexes
    )
    topics = (part(8, 8, "OffsetCommitRequestTopic", name="t", partitions=parts),)
    return request(
        8,
        8,
        group_id="g",
        generation_id_or_member_epoch=-1,
        member_id="",
        group_instance_id=None,
        topics=topics,
    )


def offset_commit_of_many() -> tuple[bytes, Callable[[bytes], int]]:
    return commit_of(range(PARTS), 7), lambda data: len(response(8, 8, data).topics[0].partitions)


def fetch_of(indexes: range) -> bytes:
    topics = (part(9, 8, "OffsetFetchRequestTopics", name="t", partition_indexes=tuple(indexes)),)
    groups = (part(9, 8, "OffsetFetchRequestGroup", group_id="g", topics=topics),)
    return request(9, 8, groups=groups, require_stable=False)


def offset_fetch() -> tuple[bytes, Callable[[bytes], int]]:
    def count(data: bytes) -> int:
        return len(response(9, 8, data).groups[0].topics[0].partitions)

    return fetch_of(range(PARTS)), count


def fetch_records() -> tuple[bytes, Callable[[bytes], int]]:
    """Most of the partitions do not exist, so that it is answered at once."""
    parts = tuple(
        part(
            1,
            12,
            "FetchPartition",
            partition=index,
            current_leader_epoch=-1,
            fetch_offset=0,
            last_fetched_epoch=-1,
            log_start_offset=-1,
            partition_max_bytes=1,
        )
        for index in range(PARTS)
    )
    asked = request(
        1,
        12,
        replica_id=-1,
        max_wait=timedelta(0),
        min_bytes=1,
        max_bytes=1 << 20,
        isolation_level=0,
        session_id=0,
        session_epoch=0,
        topics=(part(1, 12, "FetchTopic", topic="t", partitions=parts),),
        forgotten_topics_data=(),
        rack_id="",
    )
    return asked, lambda data: len(response(1, 12, data).responses[0].partitions)


def produce_records() -> tuple[bytes, Callable[[bytes], int]]:
    """Most of the partitions do not exist."""
    asked = produce_many([("t", [(index, batch_of(b"x")) for index in range(PARTS)])])
    return asked, lambda data: len(produced(data))


def many_topics(api_key: int, version: int, topic: str, /, **fields: Any) -> tuple[Any, ...]:
    return tuple(part(api_key, version, topic, name=f"absent-{number}", **fields) for number in range(PARTS))


def delete_records() -> tuple[bytes, Callable[[bytes], int]]:
    parts = tuple(
        part(21, 2, "DeleteRecordsPartition", partition_index=index, offset=0) for index in range(PARTS)
    )
    topics = (part(21, 2, "DeleteRecordsTopic", name="t", partitions=parts),)
    asked = request(21, 2, topics=topics, timeout=timedelta(0))
    return asked, lambda data: len(response(21, 2, data).topics[0].partitions)


def txn_offset_commit() -> tuple[bytes, Callable[[bytes], int]]:
    parts = tuple(
        part(
            28,
            3,
            "TxnOffsetCommitRequestPartition",
            partition_index=index,
            committed_offset=7,
            committed_leader_epoch=-1,
            committed_metadata="",
        )
        for index in range(PARTS)
    )
    topics = (part(28, 3, "TxnOffsetCommitRequestTopic", name="t", partitions=parts),)
    asked = request(
        28,
        3,
        transactional_id="tx",
        group_id="g",
        producer_id=1,
        producer_epoch=0,
        generation_id=-1,
        member_id="",
        group_instance_id=None,
        topics=topics,
    )
    return asked, lambda data: len(response(28, 3, data).topics[0].partitions)


def offset_delete() -> tuple[bytes, Callable[[bytes], int]]:
    parts = tuple(
        part(47, 0, "OffsetDeleteRequestPartition", partition_index=index) for index in range(PARTS)
    )
    topics = (part(47, 0, "OffsetDeleteRequestTopic", name="t", partitions=parts),)
    asked = request(47, 0, group_id="g", topics=topics)
    return asked, lambda data: len(response(47, 0, data).topics[0].partitions)


def alter_replica_log_dirs() -> tuple[bytes, Callable[[bytes], int]]:
    topics = (part(34, 2, "AlterReplicaLogDirTopic", name="t", partitions=tuple(range(PARTS))),)
    asked = request(34, 2, dirs=(part(34, 2, "AlterReplicaLogDir", path="/", topics=topics),))
    return asked, lambda data: len(response(34, 2, data).results[0].partitions)


def describe_log_dirs() -> tuple[bytes, Callable[[bytes], int]]:
    """Only the partitions that exist are described."""
    topics = (part(35, 4, "DescribableLogDirTopic", topic="t", partitions=tuple(range(PARTS))),)
    asked = request(35, 4, topics=topics)
    return asked, lambda data: PARTS - 2 + len(response(35, 4, data).results[0].topics[0].partitions)


def delete_groups() -> tuple[bytes, Callable[[bytes], int]]:
    asked = request(42, 2, groups_names=tuple(f"absent-{number}" for number in range(PARTS)))
    return asked, lambda data: len(response(42, 2, data).results)


def describe_scram_credentials() -> tuple[bytes, Callable[[bytes], int]]:
    asked = request(50, 0, users=many_topics(50, 0, "UserName"))
    return asked, lambda data: len(response(50, 0, data).results)


def describe_producers() -> tuple[bytes, Callable[[bytes], int]]:
    topics = (part(61, 0, "TopicRequest", name="t", partition_indexes=tuple(range(PARTS))),)
    asked = request(61, 0, topics=topics)
    return asked, lambda data: len(response(61, 0, data).topics[0].partitions)


def describe_transactions() -> tuple[bytes, Callable[[bytes], int]]:
    asked = request(65, 0, transactional_ids=tuple(f"absent-{number}" for number in range(PARTS)))
    return asked, lambda data: len(response(65, 0, data).transaction_states)


def describe_topic_partitions() -> tuple[bytes, Callable[[bytes], int]]:
    asked = request(
        75, 0, topics=many_topics(75, 0, "TopicRequest"), response_partition_limit=2000, cursor=None
    )
    return asked, lambda data: len(response(75, 0, data).topics)


def add_partitions() -> tuple[bytes, Callable[[bytes], int]]:
    topics = (part(24, 3, "AddPartitionsToTxnTopic", name="t", partitions=tuple(range(PARTS))),)
    asked = request(
        24,
        3,
        v3_and_below_transactional_id="tx",
        v3_and_below_producer_id=1,
        v3_and_below_producer_epoch=0,
        v3_and_below_topics=topics,
    )
    return asked, lambda data: len(
        response(24, 3, data).results_by_topic_v3_and_below[0].results_by_partition
    )


def leave_group() -> tuple[bytes, Callable[[bytes], int]]:
    members = tuple(
        part(13, 5, "MemberIdentity", member_id=f"m{number}", group_instance_id=None, reason=None)
        for number in range(PARTS)
    )
    asked = request(13, 5, group_id="absent", members=members)
    return asked, lambda data: len(response(13, 5, data).members)


def describe_share_offsets() -> tuple[bytes, Callable[[bytes], int]]:
    groups = tuple(
        part(90, 1, "DescribeShareGroupOffsetsRequestGroup", group_id=f"absent-{number}", topics=None)
        for number in range(PARTS)
    )
    return request(90, 1, groups=groups), lambda data: len(response(90, 1, data).groups)


def streams_heartbeat() -> tuple[bytes, Callable[[bytes], int]]:
    """A topology of many subtopologies, which is read in steps, and refused."""
    subtopologies = tuple(
        part(
            88,
            0,
            "Subtopology",
            subtopology_id=str(number),
            source_topics=(),
            source_topic_regex=(),
            state_changelog_topics=(),
            repartition_sink_topics=(),
            repartition_source_topics=(),
            copartition_groups=(),
        )
        for number in range(PARTS)
    )
    asked = request(
        88,
        0,
        group_id="g",
        member_id="m",
        member_epoch=-7,
        endpoint_information_epoch=-1,
        instance_id=None,
        rack_id=None,
        rebalance_timeout=timedelta(seconds=1),
        topology=part(88, 0, "Topology", epoch=1, subtopologies=subtopologies),
        active_tasks=None,
        standby_tasks=None,
        warmup_tasks=None,
        process_id="p",
        user_endpoint=None,
        client_tags=None,
        task_offsets=None,
        task_end_offsets=None,
        shutdown_application=False,
    )
    refused = ErrorCode.invalid_request
    return asked, lambda data: PARTS if response(88, 0, data).error_code is refused else 0


def share_topics(api_key: int, topic: str, partition: str, **fields: Any) -> tuple[Any, ...]:
    return tuple(
        part(
            api_key,
            2,
            topic,
            topic_id=UUID(int=number + 100),
            partitions=(part(api_key, 2, partition, partition_index=0, **fields),),
        )
        for number in range(PARTS)
    )


def share_fetch(epoch: int = 0) -> tuple[bytes, Callable[[bytes], int]]:
    """Of a topic that does not exist in each partition, so that it is answered at once."""
    topics = share_topics(78, "FetchTopic", "FetchPartition", acknowledgement_batches=())
    asked = request(
        78,
        2,
        group_id="s",
        member_id="m",
        share_session_epoch=epoch,
        max_wait=timedelta(0),
        min_bytes=1,
        max_bytes=1000,
        max_records=10,
        batch_size=10,
        share_acquire_mode=0,
        is_renew_ack=False,
        topics=topics if epoch == 0 else (),
        forgotten_topics_data=(),
    )
    return asked, lambda data: len(response(78, 2, data).responses)


def share_acknowledge() -> tuple[bytes, Callable[[bytes], int]]:
    batch = part(79, 2, "AcknowledgementBatch", first_offset=0, last_offset=0, acknowledge_types=(1,))
    topics = share_topics(79, "AcknowledgeTopic", "AcknowledgePartition", acknowledgement_batches=(batch,))
    asked = request(
        79, 2, group_id="s", member_id="m", share_session_epoch=1, is_renew_ack=False, topics=topics
    )
    return asked, lambda data: len(response(79, 2, data).responses)


def create_topics() -> tuple[bytes, Callable[[bytes], int]]:
    topics = many_topics(
        19, 7, "CreatableTopic", num_partitions=1, replication_factor=1, assignments=(), configs=()
    )
    asked = request(19, 7, topics=topics, timeout=timedelta(seconds=60), validate_only=True)
    return asked, lambda data: len(response(19, 7, data).topics)


def delete_topics() -> tuple[bytes, Callable[[bytes], int]]:
    topics = many_topics(20, 6, "DeleteTopicState", topic_id=None)
    asked = request(20, 6, topics=topics, timeout=timedelta(seconds=60))
    return asked, lambda data: len(response(20, 6, data).responses)


def create_partitions() -> tuple[bytes, Callable[[bytes], int]]:
    topics = many_topics(37, 3, "CreatePartitionsTopic", count=2, assignments=None)
    asked = request(37, 3, topics=topics, timeout=timedelta(seconds=60), validate_only=False)
    return asked, lambda data: len(response(37, 3, data).results)


def alter_configs() -> tuple[bytes, Callable[[bytes], int]]:
    resources = tuple(
        part(44, 1, "AlterConfigsResource", resource_type=2, resource_name=f"absent-{number}", configs=())
        for number in range(PARTS)
    )
    asked = request(44, 1, resources=resources, validate_only=False)
    return asked, lambda data: len(response(44, 1, data).responses)


def alter_configs_and_loggers() -> tuple[bytes, Callable[[bytes], int]]:
    """The loggers are this node's own, so the request is not forwarded as a whole."""
    resources = tuple(
        part(44, 1, "AlterConfigsResource", resource_type=kind, resource_name=f"absent-{number}", configs=())
        for number in range(PARTS // 2)
        for kind in (2, 8)
    )
    asked = request(44, 1, resources=resources, validate_only=False)
    return asked, lambda data: len(response(44, 1, data).responses)


def alter_quotas() -> tuple[bytes, Callable[[bytes], int]]:
    """These are altered: the records are replayed and encoded as well."""
    entries = tuple(
        part(
            49,
            1,
            "EntryData",
            entity=(part(49, 1, "EntityData", entity_type="user", entity_name=f"user-{number}"),),
            ops=(part(49, 1, "OpData", key="producer_byte_rate", value=1e9, remove=False),),
        )
        for number in range(PARTS)
    )
    asked = request(49, 1, entries=entries, validate_only=False)
    return asked, lambda data: len(response(49, 1, data).entries)


def elect_leaders() -> tuple[bytes, Callable[[bytes], int]]:
    topics = (part(43, 2, "TopicPartitions", topic="t", partitions=tuple(range(PARTS))),)
    asked = request(43, 2, election_type=0, topic_partitions=topics, timeout=timedelta(seconds=60))
    return asked, lambda data: len(response(43, 2, data).replica_election_results[0].partition_result)


def alter_scram_credentials() -> tuple[bytes, Callable[[bytes], int]]:
    deletions = many_topics(51, 0, "ScramCredentialDeletion", mechanism=1)
    asked = request(51, 0, deletions=deletions, upsertions=())
    return asked, lambda data: len(response(51, 0, data).results)


async def group_is_there(client: Client) -> None:
    """The first lookup creates the topic of offsets."""
    asked = request(10, 3, key="g", key_type=0)
    while response(10, 3, await client.ask(asked)).error_code is not ErrorCode.none:
        pass
    while response(8, 8, await client.ask(commit_of(range(1), 0))).topics[0].partitions[0].error_code:
        pass


#: Each with how many of its steps, per part, are those of decoding, handling and encoding.
MANY_PARTS = {
    metadata: 1 + 2 + 1,
    list_offsets: 1 + 1 + 1,
    describe_configs: 1 + 1 + 1,
    leader_epochs: 1 + 1 + 1,
    find_coordinators: 0 + 2 + 1,
    offset_commit_of_many: 1 + 2 + 1,
    offset_fetch: 0 + 2 + 1,
    # Reading a partition of the request takes no longer than a look at the clock, so many are read in a step.
    fetch_records: 0 + 1 + 0,
    # The same holds for writing its result. Leaders that are elsewhere are looked for in the results.
    produce_records: 0 + 2 + 0,
    # Each partition is read, deleted and put into the response; then the audit trail reads the response.
    delete_records: 1 + 3 + 1 + 1,
    txn_offset_commit: 1 + 2 + 1,
    offset_delete: 0 + 2 + 1 + 1,
    alter_replica_log_dirs: 0 + 1 + 1 + 1,
    describe_log_dirs: 0 + 1 + 0,
    # Each group is also deleted, a few at a time.
    delete_groups: 0 + 1 + 1 + 1,
    describe_scram_credentials: 1 + 1 + 1,
    describe_producers: 0 + 1 + 1,
    # Each transaction is also looked up, a few at a time.
    describe_transactions: 0 + 1 + 1,
    describe_topic_partitions: 1 + 1 + 1,
    add_partitions: 0 + 2 + 1,
    leave_group: 1 + 1 + 1,
    describe_share_offsets: 1 + 1 + 1,
    streams_heartbeat: 1 + 0 + 0,
    # Each topic has a partition, which is also acknowledged and acquired.
    share_fetch: 2 + 3 + 1,
    # Decisions of the controller: each part is read, decided on and put into the response, and the audit trail reads
    # the response.
    create_topics: 1 + 4 + 1 + 1,
    delete_topics: 1 + 3 + 1 + 1,
    create_partitions: 1 + 3 + 1 + 1,
    alter_configs: 1 + 3 + 1 + 1,
    # Half of them are loggers. The others are read, decided on and put into the response, which takes at least as many
    # steps as half of `alter_configs`; without the steps of the decision it would be fewer than 7.
    alter_configs_and_loggers: 7.5,
    elect_leaders: 0 + 2 + 1 + 1,
    alter_scram_credentials: 1 + 3 + 1 + 1,
    # Each is also applied twice, on the controller's copy of the image and on the node's, and encoded for the log.
    alter_quotas: 3 + 3 + 3 + 2 + 1,
}


@pytest.mark.parametrize("make", MANY_PARTS, ids=lambda make: make.__name__)
async def test_each_turn_does_little_of_a_request_of_many_parts(
    node: Node, ticks: Ticks, make: Callable[[], tuple[bytes, Callable[[bytes], int]]]
) -> None:
    asked, answered = make()
    client = await Client.connect(node)
    await group_is_there(client)
    before = ticks.count
    with ticks.most_in_a_turn() as turns:
        assert answered(await client.ask(asked)) == PARTS
    assert max(turns) <= STEPS_OF_A_TURN
    # Fewer steps would mean that some of the work is not cut into steps.
    assert ticks.count - before >= LOOKS_PER_STEP * MANY_PARTS[make] * PARTS


@pytest.mark.parametrize("limit", [2000, PARTS - 1])
@pytest.mark.parametrize("is_named", [True, False])
async def test_each_turn_describes_few_partitions_of_a_topic(
    node: Node, ticks: Ticks, limit: int, is_named: bool
) -> None:
    await create_topic(node, "many", partitions=PARTS)
    named = (part(75, 0, "TopicRequest", name="many"),)
    asked = request(75, 0, topics=named if is_named else (), response_partition_limit=limit, cursor=None)
    client = await Client.connect(node)
    before = ticks.count
    with ticks.most_in_a_turn() as turns:
        reply = response(75, 0, await client.ask(asked))
    assert len(reply.topics[0].partitions) == min(limit, PARTS)
    assert max(turns) <= STEPS_OF_A_TURN
    # Each is described and encoded.
    assert ticks.count - before >= LOOKS_PER_STEP * 2 * (PARTS - 1)


@pytest.mark.parametrize("make", [list_offsets, describe_topic_partitions], ids=lambda make: make.__name__)
async def test_each_turn_does_little_of_a_request_that_is_refused(
    tmp_path: Path, ticks: Ticks, make: Callable[[], tuple[bytes, Callable[[bytes], int]]]
) -> None:
    asked, answered = make()
    async with running(tmp_path, authorizer_class_name="StandardAuthorizer") as node:
        client = await Client.connect(node)
        before = ticks.count
        with ticks.most_in_a_turn() as turns:
            assert answered(await client.ask(asked)) == PARTS
    assert max(turns) <= STEPS_OF_A_TURN
    assert ticks.count - before >= LOOKS_PER_STEP * (1 + 1 + 1) * PARTS


async def test_each_turn_does_little_of_a_request_that_only_nodes_may_send(
    tmp_path: Path, ticks: Ticks
) -> None:
    topics = tuple(
        part(24, 4, "AddPartitionsToTxnTopic", name=f"t{number}", partitions=(0,)) for number in range(PARTS)
    )
    transaction = part(
        24,
        4,
        "AddPartitionsToTxnTransaction",
        transactional_id="tx",
        producer_id=1,
        producer_epoch=0,
        verify_only=False,
        topics=topics,
    )
    async with running(tmp_path, listeners="PLAINTEXT://127.0.0.1:0,NODES://127.0.0.1:0") as node:
        client = await Client.connect(node)
        before = ticks.count
        with ticks.most_in_a_turn() as turns:
            reply = response(24, 4, await client.ask(request(24, 4, transactions=(transaction,))))
        assert len(reply.results_by_transaction[0].topic_results) == PARTS
    assert max(turns) <= STEPS_OF_A_TURN
    # Each topic has a partition.
    assert ticks.count - before >= LOOKS_PER_STEP * (2 + 2 + 1) * PARTS


@pytest.mark.parametrize(
    ("asked", "answered", "steps"),
    [(*share_acknowledge(), 3 + 2 + 1), (*share_fetch(epoch=1), 0 + 2 + 1)],
    ids=["acknowledge", "fetch of a large session"],
)
async def test_each_turn_does_little_of_later_requests_in_a_share_session(
    node: Node, ticks: Ticks, asked: bytes, answered: Callable[[bytes], int], steps: int
) -> None:
    client = await Client.connect(node)
    await client.ask(share_fetch()[0])
    before = ticks.count
    with ticks.most_in_a_turn() as turns:
        assert answered(await client.ask(asked)) == PARTS
    assert max(turns) <= STEPS_OF_A_TURN
    assert ticks.count - before >= LOOKS_PER_STEP * steps * PARTS


async def test_a_neighbour_is_answered_meanwhile(node: Node, ticks: Ticks) -> None:
    client, neighbour = await Client.connect(node), await Client.connect(node)
    await neighbour.ask(frame(API_VERSIONS, 0))
    asked, answered = metadata()
    client.writer.write(asked)
    before = ticks.count
    await turn_until(lambda: ticks.count > before)
    await neighbour.ask(frame(API_VERSIONS, 0))
    assert ticks.count - before < PARTS
    assert answered((await client.reply())[1]) == PARTS


async def test_requests_behind_it_wait_and_take_effect_later(
    node: Node, ticks: Ticks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offset_commit, "_COMMITTED_AT_ONCE", 10)
    client = await Client.connect(node)
    await group_is_there(client)
    many = commit_of(iter([0, 1] * (PARTS // 2)), 7)
    client.writer.write(many + commit_of(range(2), 8) + fetch_of(range(2)))
    replies = [(await client.reply())[1] for _ in range(3)]
    committed = response(9, 8, replies[2]).groups[0].topics[0].partitions
    assert [each.committed_offset for each in committed] == [8, 8]
    (connection,) = node.server.connections
    await until(lambda: not connection._holds)


async def test_the_rest_is_not_done_for_a_peer_that_has_gone(node: Node, ticks: Ticks) -> None:
    client = await Client.connect(node)
    before = ticks.count
    client.writer.write(metadata()[0])
    await turn_until(lambda: ticks.count > before)
    client.writer.transport.abort()
    await until(lambda: not node.server.connections)
    assert ticks.count - before < PARTS * MANY_PARTS[metadata]
    assert not node.server.slices.waiting
    assert node.server.buffers.bytes_in_use == 0


async def test_the_time_of_all_slices_counts_for_the_quota(
    node: Node, ticks: Ticks, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[float] = []
    monkeypatch.setattr(node.quotas, "limits_requests", True)
    monkeypatch.setattr(node.quotas, "throttle_request", lambda *args: counted.append(args[2]) or 0)
    client = await Client.connect(node)
    asked, answered = metadata()
    assert answered(await client.ask(asked)) == PARTS
    assert sum(counted) >= PARTS * TICK_S


def test_each_resource_is_authorized_in_a_step() -> None:
    check = Each(
        (Need(Operation.DESCRIBE, ResourceType.TOPIC),),
        "topics",
        lambda _, name: (Operation.DESCRIBE, ResourceType.TOPIC, name),
    )
    schema = load_request_schema(19, 7)
    asked = schema(topics=tuple(map(str, range(100))), timeout=timedelta(0), validate_only=False)
    ctx: Any = SimpleNamespace(demand=lambda _operation, _kind, name: int(name) % 2 == 0)
    count = sum(1 for _ in check.split(ctx, asked))
    assert count == 100
    allowed, refused = finish(check.split(ctx, asked))
    assert len(allowed.topics) == 50
    assert [len(each.topics) for each, _ in refused] == [50]


async def test_the_work_of_nodes_and_of_the_only_user_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the two always has work left, and neither waits until the other has none."""
    Ticks(monkeypatch)
    slices = TimeSlices(TICK_S)
    user = slices.accounts.join("ann")
    done: list[str] = []

    class Endless:
        def __init__(self, name: str, account: TimeAccount | None) -> None:
            self.name, self.account = name, account

        def run_queued(self) -> None:
            done.append(self.name)
            if len(done) < 100:
                slices.queue(self, self.account)

    slices.queue(Endless("node", None), None)
    slices.queue(Endless("ann", user), user)
    await turn_until(lambda: len(done) >= 100)
    assert 40 <= done[:100].count("ann") <= 60
