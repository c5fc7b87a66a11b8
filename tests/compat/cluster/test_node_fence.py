"""What any client could once do to a cluster with one request between nodes, and can no longer.

Each attack comes from an ordinary connection to the clients' listener. A well-behaved client must get its work done
after all of them, and again after a restart. The last tests knock at the listener for nodes itself.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import AdminClient, NewTopic
from kio.index import load_request_schema
from kio.schema.add_raft_voter.v1 import request as add_voter
from kio.schema.alter_partition.v3 import request as alter
from kio.schema.begin_quorum_epoch.v1 import request as begins
from kio.schema.broker_heartbeat.v1 import request as heartbeat
from kio.schema.broker_registration.v4 import request as register
from kio.schema.describe_producers.v0 import request as producers
from kio.schema.end_quorum_epoch.v1 import request as ends
from kio.schema.envelope.v0 import request as envelope
from kio.schema.fetch.v18 import request as fetch
from kio.schema.metadata.v13 import request as metadata
from kio.schema.vote.v2 import request as votes
from kio.schema.write_share_group_state.v1 import request as share_state
from kio.schema.write_txn_markers.v2 import request as markers
from tests.brokers import BrokerProcess, ClusterProcesses, external_bootstrap
from tests.compat.raw import connected, framed, response
from tests.compat.raw_client import describe_cluster, describe_quorum
from tests.fuzz.messages import Requests
from tests.topics import create_topics
from tests.waiting import eventually

from penstock.broker.config.listeners import parse_address
from penstock.broker.network.apis import APIS
from penstock.client.admin.cluster import QuorumInfo

EPOCH_MAX = 2**31 - 1
METADATA = "__cluster_metadata"
METADATA_ID = UUID(int=1)
TOPIC = "orders"
REFUSED = 31  # CLUSTER_AUTHORIZATION_FAILED
INVALID_REQUEST, INCONSISTENT_VOTER_SET, INCONSISTENT_CLUSTER_ID = 42, 94, 104

pytestmark = pytest.mark.skipif(bool(external_bootstrap()), reason="starts clusters of its own")


# -- requests that only nodes send -------------------------------------------------------------------------


def vote(epoch: int, *, candidate: int = 9, cluster: str | None = None) -> Any:
    partition = votes.PartitionData(
        partition_index=0,
        replica_epoch=epoch,
        replica_id=candidate,
        replica_directory_id=uuid4(),
        voter_directory_id=None,
        last_offset_epoch=epoch,
        last_offset=2**40,
        pre_vote=False,
    )
    topic = votes.TopicData(topic_name=METADATA, partitions=(partition,))
    return votes.VoteRequest(cluster_id=cluster, voter_id=-1, topics=(topic,))


def begin(epoch: int, *, leader: int = 9, cluster: str | None = None) -> Any:
    partition = begins.PartitionData(
        partition_index=0, voter_directory_id=None, leader_id=leader, leader_epoch=epoch
    )
    topic = begins.TopicData(topic_name=METADATA, partitions=(partition,))
    return begins.BeginQuorumEpochRequest(
        cluster_id=cluster, voter_id=-1, topics=(topic,), leader_endpoints=()
    )


def end(epoch: int, *, leader: int = 9, cluster: str | None = None) -> Any:
    partition = ends.PartitionData(
        partition_index=0, leader_id=leader, leader_epoch=epoch, preferred_candidates=()
    )
    topic = ends.TopicData(topic_name=METADATA, partitions=(partition,))
    return ends.EndQuorumEpochRequest(cluster_id=cluster, topics=(topic,), leader_endpoints=())


def follower_fetch(topic_id: UUID, replica: int, offset: int = 0) -> Any:
    partition = fetch.FetchPartition(
        partition=0, fetch_offset=offset, partition_max_bytes=1 << 20, replica_directory_id=uuid4()
    )
    return fetch.FetchRequest(
        replica_state=fetch.ReplicaState(replica_id=replica),
        max_wait=timedelta(0),
        min_bytes=0,
        topics=(fetch.FetchTopic(topic_id=topic_id, partitions=(partition,)),),
        forgotten_topics_data=(),
    )


def new_voter(cluster: str) -> Any:
    at = add_voter.Listener(name="NODES", host="127.0.0.1", port=9)
    return add_voter.AddRaftVoterRequest(
        cluster_id=cluster,
        timeout=timedelta(seconds=1),
        voter_id=9,
        voter_directory_id=uuid4(),
        listeners=(at,),
    )


def registration(cluster: str, broker: int) -> Any:
    at = register.Listener(name="PLAINTEXT", host="127.0.0.1", port=9, security_protocol=0)
    return register.BrokerRegistrationRequest(
        broker_id=broker,
        cluster_id=cluster,
        incarnation_id=uuid4(),
        listeners=(at,),
        features=(
            register.Feature(name="metadata.version", min_supported_version=1, max_supported_version=99),
        ),
        rack=None,
        log_dirs=(uuid4(),),
    )


def beat(broker_epoch: int) -> Any:
    return heartbeat.BrokerHeartbeatRequest(
        broker_id=1,
        broker_epoch=broker_epoch,
        current_metadata_offset=0,
        want_fence=True,
        want_shut_down=True,
    )


def shrink(topic_id: UUID) -> Any:
    partition = alter.PartitionData(
        partition_index=0,
        leader_epoch=0,
        new_isr_with_epochs=(alter.BrokerState(broker_id=9, broker_epoch=1),),
        partition_epoch=0,
    )
    return alter.AlterPartitionRequest(
        broker_id=1, broker_epoch=1, topics=(alter.TopicData(topic_id=topic_id, partitions=(partition,)),)
    )


def share_write(topic_id: UUID) -> Any:
    partition = share_state.PartitionData(
        partition=0, state_epoch=0, leader_epoch=EPOCH_MAX, start_offset=0, state_batches=()
    )
    topic = share_state.WriteStateData(topic_id=topic_id, partitions=(partition,))
    return share_state.WriteShareGroupStateRequest(group_id="sharers", topics=(topic,))


def marker(producer_id: int, producer_epoch: int, *, coordinator_epoch: int = 0) -> Any:
    topic = markers.WritableTxnMarkerTopic(name=TOPIC, partition_indexes=(0,))
    one = markers.WritableTxnMarker(
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        transaction_result=True,
        topics=(topic,),
        coordinator_epoch=coordinator_epoch,
    )
    return markers.WriteTxnMarkersRequest(markers=(one,))


# -- those who ask -----------------------------------------------------------------------------------------


def call(address: tuple[str, int], request: Any) -> Any:
    with connected(address) as connection:
        return connection.call(request)


def topic_id(address: tuple[str, int]) -> UUID:
    asked = metadata.MetadataRequestTopic(topic_id=None, name=TOPIC)
    request = metadata.MetadataRequest(
        topics=(asked,), allow_auto_topic_creation=False, include_topic_authorized_operations=False
    )
    found: UUID = call(address, request).topics[0].topic_id
    return found


def error_codes(answer: Any) -> Iterator[int]:
    """All that an answer says, wherever it says them."""
    for field in fields(answer):
        value = getattr(answer, field.name)
        if field.metadata.get("kafka_type") == "error_code":
            yield int(value.value)
        for item in value if isinstance(value, tuple) else (value,):
            if is_dataclass(item):
                yield from error_codes(item)


def refuse_all_attacks(address: tuple[str, int]) -> None:
    cluster, topic = describe_cluster(address).cluster_id, topic_id(address)
    before = describe_quorum(address, timeout_s=10)
    leader, epoch = before.leader, before.epoch
    attacks = [
        *(vote(number, cluster=known) for number in (EPOCH_MAX, EPOCH_MAX - 1, epoch + 1) for known in (None, cluster)),
        *(begin(number, cluster=known) for number in (EPOCH_MAX, epoch + 1) for known in (None, cluster)),
        end(epoch, leader=leader, cluster=cluster),
        follower_fetch(METADATA_ID, 9),
        new_voter(cluster),
        registration(cluster, 9),
        registration(cluster, 1),
        *(beat(number) for number in range(12)),
        shrink(topic),
        share_write(topic),
        follower_fetch(topic, 1, offset=1 << 40),
        envelope.EnvelopeRequest(
            request_data=framed(new_voter(cluster))[4:], request_principal=None, client_host_address=b""
        ),
    ]  # fmt: skip
    for attack in attacks:
        answer = call(address, attack)
        assert set(error_codes(answer)) == {REFUSED}, (attack, answer)
    refuse_every_node_request(address)
    assert_unchanged(address, before)


def refuse_every_node_request(address: tuple[str, int]) -> None:
    """Whatever it says: an answer that says only that, or a closed connection where there is no place for it."""
    for api in APIS.values():
        first = max(api.min_version, api.inter_broker_from)
        for version in {first, api.max_version} if first <= api.max_version else ():
            request = Requests(version)._entity(load_request_schema(api.key, version))
            with connected(address) as connection:
                connection.send(framed(request))
                reply = connection.receive_frame()
            codes = set(error_codes(response(request, reply))) if reply else set()
            assert codes <= {REFUSED}, (api.name, version, codes)


def assert_unchanged(address: tuple[str, int], before: QuorumInfo) -> None:
    """A busy machine may have cost an election, but no voter has been added, and no epoch skipped."""
    after = describe_quorum(address, timeout_s=30)
    assert {voter.id for voter in after.voters} == {voter.id for voter in before.voters}
    assert {broker.id for broker in describe_cluster(address).brokers} == {
        voter.id for voter in before.voters
    }
    assert before.epoch <= after.epoch < before.epoch + 100


def refuse_forged_marker(servers: str, addresses: list[tuple[str, int]]) -> None:
    """Half a transaction stays invisible, and its producer can still commit all of it."""
    producer = Producer({"bootstrap.servers": servers, "transactional.id": "mover", "log_level": 0})
    producer.init_transactions(30)
    producer.begin_transaction()
    producer.produce(TOPIC, b"half", partition=0)
    assert producer.flush(30) == 0
    asked = producers.TopicRequest(name=TOPIC, partition_indexes=(0,))
    request = producers.DescribeProducersRequest(topics=(asked,))
    answers = (call(address, request).topics[0].partitions[0] for address in addresses)
    leader, found = next(
        (address, answer)
        for address, answer in zip(addresses, answers, strict=True)
        if not answer.error_code.value
    )
    (open_one,) = [each for each in found.active_producers if each.current_txn_start_offset >= 0]
    forged = call(leader, marker(open_one.producer_id, open_one.producer_epoch))
    assert forged.markers[0].topics[0].partitions[0].error_code.value == REFUSED
    again = call(leader, request).topics[0].partitions[0].active_producers
    assert [each.current_txn_start_offset for each in again] == [
        each.current_txn_start_offset for each in found.active_producers
    ]
    producer.commit_transaction(30)


def work_as_usual(servers: str) -> None:
    """Create a topic, write, read in a group, commit."""
    admin = AdminClient({"bootstrap.servers": servers, "log_level": 0})
    name = f"t-{uuid4().hex[:8]}"
    create_topics(admin, NewTopic(name, 1))
    producer = Producer({"bootstrap.servers": servers, "log_level": 0})
    errors: list[object] = []
    for value in ("a", "b"):
        producer.produce(name, value, on_delivery=lambda error, _: error and errors.append(error))
    assert (producer.flush(30), errors) == (0, [])
    consumer = Consumer(
        {"bootstrap.servers": servers, "group.id": name, "auto.offset.reset": "earliest", "log_level": 0}
    )
    try:
        consumer.subscribe([name])
        read = eventually(lambda: consumer.poll(1), what="the first record")
        assert (read.error(), read.value()) == (None, b"a")
        assert consumer.commit(read, asynchronous=False)[0].error is None
    finally:
        consumer.close()


def make_topic(servers: str, replicas: int) -> None:
    admin = AdminClient({"bootstrap.servers": servers, "log_level": 0})
    create_topics(admin, NewTopic(TOPIC, 1, replicas))


# -- one node ----------------------------------------------------------------------------------------------


def test_one_node_is_not_taken_by_a_client(tmp_path: Path) -> None:
    node = BrokerProcess(tmp_path / "data").start()
    try:
        make_topic(node.bootstrap_servers, 1)
        refuse_all_attacks(node.address)
        refuse_forged_marker(node.bootstrap_servers, [node.address])
        work_as_usual(node.bootstrap_servers)
        node.restart()
        work_as_usual(node.bootstrap_servers)
    finally:
        node.kill()


def test_a_node_starts_with_an_epoch_on_disk_that_cannot_be(tmp_path: Path) -> None:
    """The one that a sole voter was left with: it had stood once more after the last epoch."""
    node = BrokerProcess(tmp_path / "data").start()
    try:
        work_as_usual(node.bootstrap_servers)
        node.stop()
        poison(node.data_dir, EPOCH_MAX + 1)
        node.start()
        assert any("elections cannot have reached" in line for line in node.output)
        work_as_usual(node.bootstrap_servers)
        node.restart()
        assert describe_quorum(node.address, timeout_s=10).epoch < 2_000_000
    finally:
        node.kill()


def poison(data_dir: Path, epoch: int) -> None:
    """As a release that believed everyone has written it."""
    path = data_dir / f"{METADATA}-0" / "quorum-state"
    path.write_text(json.dumps({**json.loads(path.read_text()), "leaderEpoch": epoch, "votedId": -1}))


# -- three nodes -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster(cluster_with: Callable[..., ClusterProcesses]) -> ClusterProcesses:
    return cluster_with()


def test_the_listener_for_nodes_refuses_requests_of_others_than_voters(cluster: ClusterProcesses) -> None:
    """Without authentication any client that reaches it may pose as a node; one request must not end the cluster."""
    first = next(iter(cluster.nodes.values()))
    peer, client = parse_address(first.peer_address), first.direct_address
    named, before = describe_cluster(client).cluster_id, describe_quorum(client, timeout_s=10)
    soon = before.epoch + 50  # an election may come between on a busy machine

    def refusal(request: Any) -> int:
        answer = call(peer, request)
        if answer.error_code.value:
            return int(answer.error_code.value)
        return int(answer.topics[0].partitions[0].error_code.value)

    for known in (None, "another"):
        for request in (vote(soon, cluster=known), begin(EPOCH_MAX, cluster=known)):
            assert refusal(request) == INCONSISTENT_CLUSTER_ID
    for epoch in (EPOCH_MAX, EPOCH_MAX - 1, before.epoch + 100_000):
        assert refusal(vote(epoch, candidate=2, cluster=named)) == INVALID_REQUEST
        assert refusal(begin(epoch, leader=2, cluster=named)) == INVALID_REQUEST
        assert refusal(end(epoch, leader=2, cluster=named)) == INVALID_REQUEST
    assert refusal(vote(soon, cluster=named)) == INCONSISTENT_VOTER_SET
    assert refusal(begin(soon, cluster=named)) == INCONSISTENT_VOTER_SET
    assert refusal(end(soon, cluster=named)) == INCONSISTENT_VOTER_SET
    forged = call(peer, marker(1, 0, coordinator_epoch=EPOCH_MAX))
    assert forged.markers[0].topics[0].partitions[0].error_code.value == INVALID_REQUEST
    assert call(peer, beat(10**6)).error_code.value != 0
    assert call(peer, registration(named, 1)).error_code.value != 0
    assert_unchanged(client, before)
    work_as_usual(cluster.bootstrap_servers)


def test_three_nodes_are_not_taken_by_a_client(cluster: ClusterProcesses) -> None:
    make_topic(cluster.bootstrap_servers, 3)
    addresses = [node.direct_address for node in cluster.nodes.values()]
    for address in addresses:
        refuse_all_attacks(address)
    refuse_forged_marker(cluster.bootstrap_servers, addresses)
    work_as_usual(cluster.bootstrap_servers)
    # Two of them are killed with what such attacks once left on their disks.
    for node in cluster.nodes.values():
        node.kill()
    for number in (1, 2):
        poison(cluster.nodes[number].data_dir, EPOCH_MAX)
    cluster.start()
    work_as_usual(cluster.bootstrap_servers)
    assert describe_quorum(addresses[0], timeout_s=10).epoch < 2_000_000
