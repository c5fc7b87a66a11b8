"""Three nodes in two racks: placement, reads from followers, throttled moves, and elections."""

import contextlib
import json
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, NewTopic
from kio.schema.alter_partition_reassignments.v1 import request as reassignment
from kio.schema.describe_topic_partitions.v0 import request as describing
from tests.brokers import ClusterProcesses, external_bootstrap
from tests.compat import confluent
from tests.compat.apache_kafka import has_tools, java_command
from tests.compat.message import Message, numbered, values
from tests.compat.raw import connected
from tests.topics import create_topics
from tests.waiting import eventually

from penstock.protocol.errors import ErrorCode

RACKS = {1: "north", 2: "south", 3: "south"}
SELECTOR = "org.apache.kafka.common.replica.RackAwareReplicaSelector"
RATE_BYTES = 400_000
MESSAGE_BYTES = 20_000
REASSIGN = "org.apache.kafka.tools.reassign.ReassignPartitionsCommand"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterProcesses]:
    if external_bootstrap():
        pytest.skip("needs a cluster of its own; PENSTOCK_TEST_BOOTSTRAP names another")
    settings = {"replica.selector.class": SELECTOR, "default.replication.factor": "2"}
    nodes = ClusterProcesses(tmp_path_factory.mktemp("racks"), settings=settings)
    for node_id, rack in RACKS.items():
        nodes.nodes[node_id].settings |= {"broker.rack": rack}
    yield nodes.start()
    nodes.kill()


@pytest.fixture(scope="module")
def admin(cluster: ClusterProcesses) -> AdminClient:
    return AdminClient({"bootstrap.servers": cluster.bootstrap_servers, "log_level": 0})


def create(admin: AdminClient, topic: str, partitions: int = 1, replicas: list[int] | None = None) -> None:
    placed: dict[str, Any] = {"replica_assignment": [replicas]} if replicas else {"replication_factor": 2}
    new = NewTopic(topic, num_partitions=partitions, **placed)
    create_topics(admin, new)
    eventually(lambda: len(in_sync(admin, topic)) == partitions)


def in_sync(admin: AdminClient, topic: str) -> dict[int, tuple[list[int], list[int]]]:
    """Replicas and in-sync replicas of those partitions that are led."""
    found = admin.list_topics(topic, timeout=60).topics[topic].partitions
    return {index: (part.replicas, sorted(part.isrs)) for index, part in found.items() if part.leader > 0}


def test_every_partition_has_a_replica_in_each_rack(admin: AdminClient, unique: Callable[[str], str]) -> None:
    topic = unique("placed")
    create(admin, topic, partitions=12)
    placed = [replicas for replicas, _ in in_sync(admin, topic).values()]
    assert [sorted(RACKS[replica] for replica in replicas) for replicas in placed] == [
        ["north", "south"]
    ] * 12
    held = [sum(node in replicas for replicas in placed) for node in RACKS]
    assert held[0] == 12
    assert min(held[1:]) >= 4, "the two nodes of one rack share its half"


@pytest.mark.parametrize(
    ("rack", "isolation", "broker"),
    [
        ("south", "read_uncommitted", 3),
        ("south", "read_committed", 3),
        ("north", "read_uncommitted", 1),
        ("elsewhere", "read_uncommitted", 1),
    ],
)
def test_a_consumer_reads_from_the_replica_in_its_rack(
    cluster: ClusterProcesses,
    admin: AdminClient,
    unique: Callable[[str], str],
    closing: contextlib.ExitStack,
    rack: str,
    isolation: str,
    broker: int,
) -> None:
    topic, bootstrap = unique("near"), cluster.bootstrap_servers
    create(admin, topic, replicas=[1, 3])
    eventually(lambda: in_sync(admin, topic)[0][1] == [1, 3])
    confluent.publish(bootstrap, topic, numbered(50))
    read_at: dict[str, Any] = {}
    consumer = _consumer(bootstrap, rack, isolation, read_at)
    closing.callback(consumer.close)
    consumer.assign([TopicPartition(topic, 0, OFFSET_BEGINNING)])
    assert values(confluent.take(consumer, 50)) == [message.value for message in numbered(50)]
    eventually(lambda: consumer.poll(0.05) is None and read_at.get("broker") == broker)
    # What is written from now on is read there too, as soon as it is committed.
    confluent.publish(bootstrap, topic, [Message(value=b"later")])
    assert values(confluent.take(consumer, 1)) == [b"later"]
    assert read_at["leader"] == 1


def _consumer(bootstrap: str, rack: str, isolation: str, read_at: dict[str, Any]) -> Consumer:
    def note(statistics: str) -> None:
        for topic in json.loads(statistics)["topics"].values():
            read_at.update(topic["partitions"].get("0", {}))

    return Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "racks",
            "client.rack": rack,
            "isolation.level": isolation,
            "statistics.interval.ms": 100,
            "stats_cb": note,
        }
    )


@pytest.mark.parametrize("side", ["leader", "follower"])
def test_a_throttled_move_keeps_to_its_rate(
    cluster: ClusterProcesses, admin: AdminClient, unique: Callable[[str], str], side: str
) -> None:
    """As kafka-reassign-partitions --throttle does it, for either side alone."""
    topic = unique("moved")
    total = _filled(cluster, admin, topic)
    for node in RACKS:
        _alter(
            admin, ConfigResource.Type.BROKER, str(node), {f"{side}.replication.throttled.rate": RATE_BYTES}
        )
    _alter(admin, ConfigResource.Type.TOPIC, topic, {f"{side}.replication.throttled.replicas": "*"})
    began = time.monotonic()
    _reassign(cluster, topic, [1, 3])
    _await_move(cluster, topic, total, began)
    for node in RACKS:
        _alter(admin, ConfigResource.Type.BROKER, str(node), {f"{side}.replication.throttled.rate": None})


@pytest.mark.kafka
@pytest.mark.skipif(not has_tools(), reason="needs the jar of Kafka's tools: make test-kafka fetches it")
def test_kafka_reassign_partitions_throttles_a_move(
    cluster: ClusterProcesses, admin: AdminClient, unique: Callable[[str], str], tmp_path: Path
) -> None:
    topic, plan = unique("moved"), tmp_path / "plan.json"
    moves = [{"topic": topic, "partition": 0, "replicas": [1, 3]}]
    plan.write_text(json.dumps({"version": 1, "partitions": moves}))
    total = _filled(cluster, admin, topic)
    connection = ("--bootstrap-server", cluster.bootstrap_servers, "--reassignment-json-file", str(plan))
    execute = java_command(REASSIGN, *connection, "--execute", "--throttle", str(RATE_BYTES))
    with subprocess.Popen(execute, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as tool:
        eventually(lambda: _held_bytes(cluster, 3, topic) or tool.poll(), what="the move begins")
        _await_move(cluster, topic, total, time.monotonic())
        printed = tool.communicate()[0]
    assert "Successfully started partition reassignment" in printed
    # Only --verify removes the throttles, once the move is complete.
    assert _throttled_replicas(admin, topic) == {"leader": "0:1,0:2", "follower": "0:3"}
    verify = java_command(REASSIGN, *connection, "--verify")
    verified = subprocess.run(verify, capture_output=True, text=True, timeout=180, check=True).stdout
    assert f"Reassignment of partition {topic}-0 is completed." in verified
    assert _throttled_replicas(admin, topic) == {"leader": "", "follower": ""}


def _filled(cluster: ClusterProcesses, admin: AdminClient, topic: str) -> int:
    """Returns how many bytes a replica of the new topic holds."""
    create(admin, topic, replicas=[1, 2])
    rows = [Message(value=bytes([number]) * MESSAGE_BYTES) for number in range(60)]
    # A batch is moved as a whole, so small ones show the rate.
    confluent.publish_on(confluent.producer(cluster.bootstrap_servers, batch_num_messages=2), topic, rows)
    total = _held_bytes(cluster, 1, topic)
    assert total >= 60 * MESSAGE_BYTES
    return total


def _await_move(cluster: ClusterProcesses, topic: str, total: int, began: float) -> None:
    """Until node 3 holds and follows the partition; at no moment has more arrived than the rate allows."""
    seen: list[int] = []
    while not seen or seen[-1] < total:
        size = _held_bytes(cluster, 3, topic)
        elapsed_s = time.monotonic() - began
        # A second's worth may have gathered, and the last batch may be more than was left.
        assert size <= RATE_BYTES * (elapsed_s + 1) + 5 * MESSAGE_BYTES, (elapsed_s, seen)
        assert elapsed_s < 60, "it never gets there"
        seen.append(size)
        time.sleep(0.02)
    assert time.monotonic() - began >= (total - RATE_BYTES - 5 * MESSAGE_BYTES) / RATE_BYTES
    eventually(lambda: _described(cluster, topic)[0] == (1, 3), what="node 3 is in sync")


def _throttled_replicas(admin: AdminClient, topic: str) -> dict[str, str]:
    resource = ConfigResource(ConfigResource.Type.TOPIC, topic)
    values = admin.describe_configs([resource])[resource].result(60)
    return {side: values[f"{side}.replication.throttled.replicas"].value for side in ("leader", "follower")}


def _held_bytes(cluster: ClusterProcesses, node: int, topic: str) -> int:
    folder: Path = cluster.nodes[node].data_dir / f"{topic}-0"
    return sum(file.stat().st_size for file in folder.glob("*.log")) if folder.exists() else 0


def _alter(admin: AdminClient, kind: Any, name: str, values: dict[str, object]) -> None:
    entries = [
        ConfigEntry(
            setting,
            None if value is None else str(value),
            incremental_operation=AlterConfigOpType.DELETE if value is None else AlterConfigOpType.SET,
        )
        for setting, value in values.items()
    ]
    resource = ConfigResource(kind, name, incremental_configs=entries)
    admin.incremental_alter_configs([resource])[resource].result(60)


def _reassign(cluster: ClusterProcesses, topic: str, replicas: list[int]) -> None:
    partition = reassignment.ReassignablePartition(partition_index=0, replicas=tuple(replicas))
    request = reassignment.AlterPartitionReassignmentsRequest(
        topics=(reassignment.ReassignableTopic(name=topic, partitions=(partition,)),)
    )
    with connected(cluster.nodes[1].direct_address) as connection:
        answer = connection.call(request)
    assert answer.error_code is ErrorCode.none, answer
    assert answer.responses[0].partitions[0].error_code is ErrorCode.none, answer


def test_a_replica_that_leaves_below_the_minimum_stays_eligible(
    cluster: ClusterProcesses, admin: AdminClient, unique: Callable[[str], str]
) -> None:
    """KIP-966, as kafka-topics --describe shows it: nothing is committed without node 3, so it may still lead."""
    topic = unique("eligible")
    create(admin, topic, replicas=[1, 3])
    eventually(lambda: _described(cluster, topic) == ((1, 3), (), ()))
    cluster.nodes[3].kill()
    eventually(lambda: _described(cluster, topic) == ((1,), (3,), ()), what="node 3 is eligible")
    cluster.nodes[3].start()
    eventually(lambda: _described(cluster, topic) == ((1, 3), (), ()), what="node 3 is in sync again")


def _described(cluster: ClusterProcesses, topic: str) -> tuple[tuple[int, ...], ...]:
    """In sync, eligible, last known eligible."""
    request = describing.DescribeTopicPartitionsRequest(
        topics=(describing.TopicRequest(name=topic),), response_partition_limit=10, cursor=None
    )
    with connected(cluster.nodes[1].direct_address) as connection:
        partitions = connection.call(request).topics[0].partitions
    assert partitions, "this node has not heard of the topic yet"
    (partition,) = partitions
    return (
        tuple(sorted(partition.isr_nodes)),
        tuple(partition.eligible_leader_replicas or ()),
        tuple(partition.last_known_elr or ()),
    )
