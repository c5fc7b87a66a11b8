"""Three nodes in processes of their own: the death of one, a damaged disk, and a duplicate node id."""

import re
import shutil
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, ElectionType, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from kio.schema.offset_fetch.v9 import request as offset_fetch
from tests.brokers import ClusterProcesses, NodeProcess
from tests.compat.raw_client import describe_quorum, send_request
from tests.damage import flip_byte
from tests.topics import create_topics
from tests.waiting import eventually

from penstock.client.errors import ClientError

GROUP = "readers"


@pytest.fixture(scope="module")
def cluster(cluster_with: Callable[..., ClusterProcesses]) -> ClusterProcesses:
    return cluster_with()


@pytest.fixture(scope="module")
def admin(cluster: ClusterProcesses) -> AdminClient:
    return AdminClient({"bootstrap.servers": cluster.bootstrap_servers, "log_level": 0})


def create(admin: AdminClient, name: str, replicas: list[int], **config: str) -> None:
    settings = {key.replace("_", "."): value for key, value in config.items()}
    topic = NewTopic(name, 1, replica_assignment=[replicas], config=settings)
    create_topics(admin, topic)


def publish(cluster: ClusterProcesses, topic: str, *values: str) -> None:
    """Acknowledged by all that are in sync."""
    producer = Producer({"bootstrap.servers": cluster.bootstrap_servers, "log_level": 0})
    errors: list[object] = []
    for value in values:
        producer.produce(topic, value, on_delivery=lambda error, _: error and errors.append(error))
    assert (producer.flush(30), errors) == (0, [])


def consumer(cluster: ClusterProcesses, group: str = GROUP) -> Consumer:
    return Consumer(
        {
            "bootstrap.servers": cluster.bootstrap_servers,
            "group.id": group,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "log_level": 0,
        }
    )


def take(reader: Consumer, count: int) -> list[str]:
    found: list[str] = []

    def arrived() -> bool:
        messages = reader.consume(count - len(found), 0.2)
        found.extend(m.value().decode() for m in messages if not m.error())
        return len(found) >= count

    eventually(arrived, what=f"{count} records")
    return found


def read(cluster: ClusterProcesses, topic: str, count: int) -> list[str]:
    reader = consumer(cluster, "nobody")
    reader.assign([TopicPartition(topic, 0, 0)])
    found = take(reader, count)
    reader.close()
    return found


def commit(reader: Consumer) -> None:
    def committed() -> bool:
        try:
            reader.commit(asynchronous=False)
        except KafkaException as error:
            raise AssertionError(error) from None
        return True

    eventually(committed, what="a commit")


def committed_offset(cluster: ClusterProcesses, topic: str) -> int:
    """Asked of every running node: librdkafka's admin client may wait a minute for a dead coordinator."""
    found = [_committed_at(node, topic) for node in cluster.nodes.values() if node.is_running]
    answers = [answer.topics[0].partitions[0].committed_offset for answer in found if answer.error_code == 0]
    assert answers, f"no coordinator among {[answer.error_code.name for answer in found]}"
    return int(answers[0])


def _committed_at(node: NodeProcess, topic: str) -> Any:
    wanted = offset_fetch.OffsetFetchRequestTopics(name=topic, partition_indexes=(0,))
    group = offset_fetch.OffsetFetchRequestGroup(group_id=GROUP, topics=(wanted,))
    return send_request(node.direct_address, offset_fetch.OffsetFetchRequest(groups=(group,))).groups[0]


def leader_and_isr(admin: AdminClient, topic: str) -> tuple[int, set[int]]:
    partition = admin.list_topics(topic, timeout=60).topics[topic].partitions[0]
    return partition.leader, set(partition.isrs)


def all_in_sync(admin: AdminClient) -> bool:
    topics = admin.list_topics(timeout=60).topics.values()
    return all(len(p.isrs) == len(p.replicas) for topic in topics for p in topic.partitions.values())


def segment(node: NodeProcess, topic: str) -> Path:
    return node.data_dir / f"{topic}-0" / f"{0:020d}.log"


def segments(node: NodeProcess, topic: str) -> list[Path]:
    return sorted(segment(node, topic).parent.glob("*.log"))


def content_of(paths: list[Path]) -> bytes:
    return b"".join(path.read_bytes() for path in paths)


def logged(node: NodeProcess, message: str) -> bool:
    assert node.log is not None
    return message in node.log.read_text()


def test_founders_serve_once_all_of_them_vote(tmp_path: Path) -> None:
    """Or the death of one in the first moments could leave a quorum that the others cannot replace."""
    founders = ClusterProcesses(tmp_path)
    founders.nodes[3].settings["controller.quorum.auto.join.enable"] = "false"
    founders.launch(founders.nodes)
    first = founders.nodes[1]

    def voters() -> int:
        try:
            return len(describe_quorum(first.direct_peer_address, timeout_s=5).voters)
        except ClientError:
            return 0

    try:
        eventually(lambda: voters() == 2, what="the second founder's vote")
        # A client that was let in and cut off might never ask for metadata again.
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(first.direct_address)
        assert not first.is_ready, "the third may not vote yet, and it is waited for"
    finally:
        founders.kill()


def test_a_group_outlives_its_coordinator(cluster: ClusterProcesses, admin: AdminClient) -> None:
    create(admin, "orders", [1, 2, 3])
    publish(cluster, "orders", *(f"before {n}" for n in range(10)))
    reader = consumer(cluster)
    reader.subscribe(["orders"])
    assert take(reader, 5) == [f"before {n}" for n in range(5)]
    commit(reader)
    offsets = admin.list_topics("__consumer_offsets", timeout=10).topics["__consumer_offsets"]
    assert {len(partition.replicas) for partition in offsets.partitions.values()} == {3}
    group = admin.describe_consumer_groups([GROUP])[GROUP].result()

    dead = cluster.nodes[group.coordinator.id]
    dead.kill()
    eventually(lambda: committed_offset(cluster, "orders") == 5, what="the commit at the next coordinator")
    publish(cluster, "orders", "after")
    assert take(reader, 6) == [*(f"before {n}" for n in range(5, 10)), "after"]
    commit(reader)
    assert committed_offset(cluster, "orders") == 11
    reader.close()

    dead.start()
    eventually(lambda: all_in_sync(admin), what="everyone in sync")
    assert committed_offset(cluster, "orders") == 11


def test_damaged_and_missing_files_are_fetched_again(cluster: ClusterProcesses, admin: AdminClient) -> None:
    for topic in (topics := ("flipped", "missing", "hollow")):
        create(admin, topic, [1, 2, 3], segment_bytes="2500")
        for number in range(6):
            publish(cluster, topic, f"{number} {'x' * 1000}")
    eventually(lambda: all_in_sync(admin), what="everyone in sync")
    ailing = cluster.nodes[3]
    ailing.kill_before_checkpoint()
    flipped = segment(ailing, "flipped")
    flip_byte(flipped, flipped.stat().st_size // 2)
    segment(ailing, "missing").unlink()
    segments(ailing, "hollow")[1].unlink()
    ailing.start()

    def is_fetched(topic: str) -> bool:
        # It may not have left the in-sync set yet when the node is ready.
        if not list(ailing.data_dir.glob(f"{topic}-0.*-stray")):
            return False
        sound, copy = (content_of(segments(node, topic)) for node in (cluster.nodes[1], ailing))
        return copy == sound and all_in_sync(admin)

    for topic in topics:
        eventually(partial(is_fetched, topic), what=f"{topic} in sync")
        assert logged(ailing, f"{topic}-0"), "the damage was not logged"


def test_a_leader_whose_disk_has_flipped_a_bit_hands_over_and_fetches_it_again(
    cluster: ClusterProcesses, admin: AdminClient
) -> None:
    """It is noticed when a follower reads it: the one whose replica was removed."""
    create(admin, "rotten", [1, 2, 3])
    values = [f"{number} {'x' * 100}" for number in range(6)]
    for value in values:
        publish(cluster, "rotten", value)
    eventually(lambda: all_in_sync(admin), what="everyone in sync")
    rotten, empty = cluster.nodes[1], cluster.nodes[3]
    assert leader_and_isr(admin, "rotten")[0] == 1
    empty.kill()
    shutil.rmtree(segment(empty, "rotten").parent)
    content = segment(rotten, "rotten").read_bytes()
    with open(segment(rotten, "rotten"), "r+b") as file:
        file.seek(content.index(values[3].encode()))
        file.write(b"4")
    empty.start()
    eventually(lambda: logged(rotten, "damaged at or after offset 3"), what="the report")
    eventually(lambda: all_in_sync(admin), what="everyone in sync")
    assert read(cluster, "rotten", 6) == values
    assert {segment(node, "rotten").read_bytes() for node in cluster.nodes.values()} == {content}


def test_a_node_that_has_lost_its_disk_gets_everything_back(
    cluster: ClusterProcesses, admin: AdminClient
) -> None:
    create(admin, "kept", [2, 1, 3])
    publish(cluster, "kept", "one", "two")
    eventually(lambda: all_in_sync(admin), what="everyone in sync")
    empty = cluster.nodes[2]
    empty.kill()
    shutil.rmtree(empty.data_dir)
    empty.start()
    eventually(lambda: all_in_sync(admin), what="everyone in sync")
    assert read(cluster, "kept", 2) == ["one", "two"]
    assert segment(empty, "kept").read_bytes() == segment(cluster.nodes[1], "kept").read_bytes()


@pytest.mark.parametrize("is_leader", [True, False], ids=["the controller", "a broker"])
def test_a_second_node_with_the_same_id_is_refused(
    cluster: ClusterProcesses, admin: AdminClient, tmp_path: Path, is_leader: bool
) -> None:
    leader_id = describe_quorum(cluster.nodes[1].direct_address, timeout_s=5).leader
    victim = next(node for id, node in cluster.nodes.items() if (id == leader_id) is is_leader)
    others = [id for id in cluster.nodes if id != victim.node_id]
    create(admin, topic := f"mine-{is_leader}", [victim.node_id, *others])
    settings = victim.settings | {"initial.broker.registration.timeout.ms": "2000"}
    impostor = NodeProcess(victim.node_id, tmp_path, settings, None)
    impostor.launch()
    eventually(lambda: impostor.exit_code is not None, what="the end of the second node")
    assert impostor.exit_code not in (0, None)
    said = "".join(impostor.output)
    assert re.search(r"another (broker|node) with this id (is registered and alive|leads the quorum)", said)
    assert "Traceback" not in said
    publish(cluster, topic, "still here")
    assert leader_and_isr(admin, topic) == (victim.node_id, {1, 2, 3})


def test_an_unclean_election_is_made_on_request_only_and_told(
    cluster: ClusterProcesses, admin: AdminClient
) -> None:
    create(admin, "risky", [2, 3], min_insync_replicas="1")
    publish(cluster, "risky", "kept")
    behind, ahead = cluster.nodes[3], cluster.nodes[2]
    behind.kill()
    eventually(lambda: leader_and_isr(admin, "risky") == (2, {2}), what="node 2 alone in sync")
    publish(cluster, "risky", "lost", "lost too")
    ahead.kill()
    behind.start()
    eventually(lambda: leader_and_isr(admin, "risky")[0] == -1, what="a partition without a leader")
    place = TopicPartition("risky", 0)
    admin.elect_leaders(ElectionType.UNCLEAN, [place]).result()
    eventually(lambda: leader_and_isr(admin, "risky")[0] == 3, what="node 3 leading")
    eventually(lambda: logged(behind, "leading after an unclean election"), what="the report")
    publish(cluster, "risky", "instead")
    assert read(cluster, "risky", 2) == ["kept", "instead"]

    ahead.start()
    eventually(lambda: leader_and_isr(admin, "risky")[1] == {2, 3}, what="node 2 in sync again")
    assert logged(ahead, "log truncated")
    assert read(cluster, "risky", 2) == ["kept", "instead"]
