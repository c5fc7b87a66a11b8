"""Transactions on three nodes whose coordinator dies with open and with prepared transactions."""

import random
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka.admin import AdminClient, NewTopic
from kio.schema.describe_transactions.v0 import request as describe
from kio.schema.end_txn.v5 import request as end_txn
from kio.schema.find_coordinator.v4 import request as find
from kio.schema.init_producer_id.v5 import request as init
from kio.schema.produce.v12 import request as produce
from tests.brokers import ClusterProcesses, NodeProcess
from tests.compat import confluent
from tests.compat.clients.test_transactions_confluent import end, send
from tests.compat.message import values
from tests.compat.raw_client import send_request
from tests.topics import create_topics
from tests.waiting import eventually

from penstock.protocol.errors import ErrorCode
from penstock.protocol.record_batch import TRANSACTIONAL, Record, encode_batch

SETTINGS = {
    "offsets.topic.num.partitions": "1",
    "transaction.state.log.num.partitions": "3",
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "100",
}
TIMEOUT_S = 60.0
_TRANSACTION = 1
#: On a busy machine a node may lose its session, and with it its role for a while.
COORDINATOR_MOVES = (
    ErrorCode.not_coordinator,
    ErrorCode.coordinator_not_available,
    ErrorCode.coordinator_load_in_progress,
    ErrorCode.concurrent_transactions,
)
LEADER_IS_BUSY = (ErrorCode.concurrent_transactions, ErrorCode.not_leader_or_follower)


@pytest.fixture(scope="module")
def cluster(cluster_with: Callable[..., ClusterProcesses]) -> ClusterProcesses:
    return cluster_with(SETTINGS)


@pytest.fixture(scope="module")
def admin(cluster: ClusterProcesses) -> AdminClient:
    return AdminClient({"bootstrap.servers": cluster.bootstrap_servers, "log_level": 0})


@pytest.fixture
def name(unique: Callable[[str], str]) -> str:
    return unique("tx")


@pytest.fixture
def transactional(cluster: ClusterProcesses, name: str) -> Callable[..., Producer]:
    def make(**settings: Any) -> Producer:
        producer = confluent.producer(cluster.bootstrap_servers, transactional_id=name, **settings)
        producer.init_transactions(TIMEOUT_S)
        return producer

    return make


def create(admin: AdminClient, name: str, *replicas: list[int]) -> str:
    topic = NewTopic(name, len(replicas), replica_assignment=list(replicas))
    create_topics(admin, topic)
    return name


def coordinator(cluster: ClusterProcesses, name: str) -> NodeProcess:
    """A running node that all running nodes take for it."""
    request = find.FindCoordinatorRequest(key_type=_TRANSACTION, coordinator_keys=(name,))

    def known() -> int:
        told = {
            found.node_id
            for node in cluster.nodes.values()
            if node.is_running
            for found in send_request(node.direct_address, request).coordinators
        }
        (node_id,) = told if len(told) == 1 else (0,)
        return int(node_id) if node_id > 0 and cluster.nodes[node_id].is_running else 0

    return cluster.nodes[eventually(known, what="one coordinator")]


def state(cluster: ClusterProcesses, name: str) -> str:
    request = describe.DescribeTransactionsRequest(transactional_ids=(name,))
    return str(
        send_request(coordinator(cluster, name).direct_address, request)
        .transaction_states[0]
        .transaction_state
    )


def committed(cluster: ClusterProcesses, topic: str, count: int, partitions: int = 1) -> list[bytes | None]:
    servers = cluster.bootstrap_servers
    return values(
        confluent.read(servers, topic, count, partitions=partitions, isolation_level="read_committed")
    )


def all_in_sync(admin: AdminClient) -> bool:
    topics = admin.list_topics(timeout=60).topics.values()
    return all(len(p.isrs) == len(p.replicas) for topic in topics for p in topic.partitions.values())


def test_a_prepared_transaction_is_completed_by_the_next_coordinator(
    cluster: ClusterProcesses,
    admin: AdminClient,
    name: str,
    unique: Callable[[str], str],
    transactional: Callable[..., Producer],
) -> None:
    """One partition has its only replica on a node that is down, so that its marker cannot be written at first."""
    producer = transactional()
    first = coordinator(cluster, name)
    holder = next(node for node in cluster.nodes.values() if node is not first)
    safe, lone = create(admin, unique("safe"), [1, 2, 3]), create(admin, unique("lone"), [holder.node_id])
    send(producer, safe, b"a", b"b")
    producer.produce(lone, b"c")
    assert producer.flush(TIMEOUT_S) == 0
    eventually(lambda: all_in_sync(admin), what="everyone in sync")

    holder.kill()
    end(producer, commits=True)
    assert state(cluster, name) == "PrepareCommit"
    first.kill()
    holder.start()
    assert coordinator(cluster, name) is not first
    eventually(lambda: state(cluster, name) == "CompleteCommit", what="the end")
    assert committed(cluster, safe, 2) == [b"a", b"b"]
    assert committed(cluster, lone, 1) == [b"c"]

    first.start()
    eventually(lambda: all_in_sync(admin), what="everyone in sync")
    send(producer, safe, b"next")
    end(producer, commits=True)
    assert committed(cluster, safe, 3) == [b"a", b"b", b"next"]


@pytest.mark.parametrize("commits", [True, False])
def test_an_open_transaction_outlives_its_coordinator(
    cluster: ClusterProcesses,
    admin: AdminClient,
    name: str,
    unique: Callable[[str], str],
    transactional: Callable[..., Producer],
    commits: bool,
) -> None:
    topic = create(admin, unique("orders"), [1, 2, 3], [2, 3, 1], [3, 1, 2])
    producer = transactional()
    producer.begin_transaction()
    for number in range(30):
        producer.produce(topic, b"%d" % number, partition=number % 3)
    assert producer.flush(TIMEOUT_S) == 0
    eventually(lambda: all_in_sync(admin), what="everyone in sync")
    dead = coordinator(cluster, name)
    dead.kill()
    end(producer, commits)
    send(producer, topic, b"30")
    end(producer, commits=True)
    expected = list(range(31)) if commits else [30]
    found = committed(cluster, topic, len(expected), partitions=3)
    assert sorted(int(value or b"") for value in found) == expected
    dead.start()
    eventually(lambda: all_in_sync(admin), what="everyone in sync")


def test_a_transaction_whose_producer_is_gone_is_aborted_by_the_next_coordinator(
    cluster: ClusterProcesses,
    admin: AdminClient,
    name: str,
    unique: Callable[[str], str],
    transactional: Callable[..., Producer],
) -> None:
    topic = create(admin, unique("orders"), [1, 2, 3])
    producer = transactional(transaction_timeout_ms=3000)
    send(producer, topic, b"forgotten")
    assert producer.flush(TIMEOUT_S) == 0
    eventually(lambda: all_in_sync(admin), what="everyone in sync")
    dead = coordinator(cluster, name)
    dead.kill()
    plain = confluent.producer(cluster.bootstrap_servers)
    plain.produce(topic, b"plain")
    assert plain.flush(TIMEOUT_S) == 0
    assert committed(cluster, topic, 1) == [b"plain"], "nothing hangs"
    with pytest.raises(KafkaException):
        producer.commit_transaction(TIMEOUT_S)
    dead.start()
    eventually(lambda: all_in_sync(admin), what="everyone in sync")


def test_transactions_go_on_while_nodes_die(
    cluster: ClusterProcesses,
    admin: AdminClient,
    unique: Callable[[str], str],
    transactional: Callable[..., Producer],
) -> None:
    """Each message of a committed transaction is there once; none of an aborted one is."""
    topic = create(admin, unique("orders"), [1, 2, 3], [2, 3, 1], [3, 1, 2])
    chance = random.Random(7)
    producer = transactional()
    kept: list[int] = []
    for turn in range(6):
        eventually(lambda: all_in_sync(admin), what="everyone in sync")
        victim = cluster.nodes[turn % 3 + 1]
        producer.begin_transaction()
        for number in range(turn * 10, turn * 10 + 10):
            producer.produce(topic, b"%d" % number, partition=number % 3)
            if number % 10 == turn % 10:
                victim.kill()
        if chance.random() < 0.6:
            end(producer, commits=True)
            kept += range(turn * 10, turn * 10 + 10)
        else:
            producer = aborted(producer, transactional)
        victim.start()
    found = committed(cluster, topic, len(kept), partitions=3)
    assert sorted(int(value or b"") for value in found) == kept


def aborted(producer: Producer, transactional: Callable[..., Producer]) -> Producer:
    """Where no partition was added before the coordinator died, no broker can tell this abort from one that comes
    after a commit; librdkafka takes the answer as final, and its application starts again."""
    try:
        end(producer, commits=False)
    except KafkaException as error:
        if error.args[0].code() != KafkaError.INVALID_TXN_STATE:
            raise
        return transactional()
    return producer


def test_leaders_add_their_partitions_for_producers_of_the_newer_protocol(
    cluster: ClusterProcesses, admin: AdminClient, name: str, unique: Callable[[str], str]
) -> None:
    """No Python client speaks it (Produce v12, EndTxn v5; KIP-890): request by request, with three leaders."""
    eventually(lambda: all_in_sync(admin), what="everyone in sync")
    topic = create(admin, unique("orders"), [1, 2, 3], [2, 3, 1], [3, 1, 2])

    def ask(request: Any) -> Any:
        """As a client does it: again while the coordinator moves, or still loads its log."""

        def answer() -> Any:
            reply = send_request(coordinator(cluster, name).direct_address, request)
            return None if reply.error_code in COORDINATOR_MOVES else reply

        return eventually(answer, what=f"an answer to {type(request).__name__}")

    begun = ask(init.InitProducerIdRequest(transactional_id=name, transaction_timeout=timedelta(minutes=1)))
    producer_id, epoch = begun.producer_id, begun.producer_epoch
    for commits in (True, False, True):
        for index in range(3):
            eventually(lambda: leads(admin, topic, index) == index + 1, what="the leaders")  # noqa: B023
            batch = encode_batch(
                [Record(0, int(time.time() * 1000), None, b"%d" % epoch)],
                attributes=TRANSACTIONAL,
                producer_id=producer_id,
                producer_epoch=epoch,
                base_sequence=0,
            )
            request = produce_request(name, topic, index, bytes(batch))
            append_in_transaction(cluster.nodes[index + 1].direct_address, request)
        ended = ask(
            end_txn.EndTxnRequest(
                transactional_id=name, producer_id=producer_id, producer_epoch=epoch, committed=commits
            )
        )
        assert (ended.error_code, ended.producer_epoch) == (ErrorCode.none, epoch + 1)
        producer_id, epoch = ended.producer_id, ended.producer_epoch
    found = committed(cluster, topic, 6, partitions=3)
    assert sorted(int(value or b"") for value in found) == [epoch - 3] * 3 + [epoch - 1] * 3


def append_in_transaction(leader: tuple[str, int], request: Any) -> None:
    """As a client does it: again while the end of the transaction before it is still being written.

    Leadership that the node has lost comes back to it, as its preferred leader.
    """

    def is_appended() -> bool:
        error = send_request(leader, request).responses[0].partition_responses[0].error_code
        assert error in (ErrorCode.none, *LEADER_IS_BUSY), error
        return bool(error is ErrorCode.none)

    eventually(is_appended, what="a batch of the next transaction")


def produce_request(name: str, topic: str, index: int, batch: bytes) -> Any:
    data = produce.PartitionProduceData(index=index, records=batch)
    return produce.ProduceRequest(
        transactional_id=name,
        acks=-1,
        timeout=timedelta(seconds=30),
        topic_data=(produce.TopicProduceData(name=topic, partition_data=(data,)),),
    )


def leads(admin: AdminClient, topic: str, index: int) -> int:
    return int(admin.list_topics(topic, timeout=60).topics[topic].partitions[index].leader)
