"""Any node forwards requests for the active controller; a node that is starting serves only other nodes."""

import asyncio
import io
import struct
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kio.index import load_request_schema, load_response_schema
from kio.schema.alter_partition_reassignments.v1 import request as reassign
from kio.schema.api_versions.v4.request import ApiVersionsRequest
from kio.schema.create_topics.v7 import request as create
from kio.schema.delete_topics.v6 import request as delete
from kio.schema.elect_leaders.v2 import request as elect
from kio.schema.envelope.v0.request import EnvelopeRequest
from kio.schema.list_partition_reassignments.v0 import request as listing
from kio.schema.unregister_broker.v0.request import UnregisterBrokerRequest
from kio.serial import entity_reader, entity_writer
from tests.unit.broker.controller.small_cluster import Cluster, SmallNode
from tests.unit.broker.controller.test_broker_lifecycle import create as create_topic
from tests.unit.broker.controller.test_broker_lifecycle import now, three, until
from tests.unit.broker.virtual_time import in_virtual_time

from penstock.broker.controller.forwarding import decode_principal, encode_principal
from penstock.broker.network.apis import APIS, Api
from penstock.broker.network.connection import CLOSE_CONNECTION, PendingReply
from penstock.broker.network.dispatch import Dispatcher
from penstock.broker.network.requests import RequestContext
from penstock.broker.network.slices import TimeSlices
from penstock.protocol.errors import ApiError, ErrorCode, MalformedFrame
from penstock.security.principal import ANONYMOUS, Principal

ENVELOPE = 58
RELAYED = [api for api in APIS.values() if api.relay]


class Client:
    """Stands for a connection: frames go into a node's dispatcher, replies are kept."""

    def __init__(self, node: SmallNode) -> None:
        self.client_host, self.listener = "192.0.2.7", "PLAINTEXT"
        self.is_inter_broker = True
        self.nodes = SimpleNamespace(serves_controller=True)
        self.principal, self.authentication, self.account = ANONYMOUS, None, None
        self.replies: asyncio.Queue[Any] = asyncio.Queue()
        self.is_closed = False
        self._number = 100
        node.server = self.server = SimpleNamespace(
            failed=self._failed, slices=TimeSlices(1.0), is_from_node=lambda _: True
        )
        self._dispatcher = Dispatcher(node, is_starting=lambda: node.state == "starting")  # type: ignore[arg-type]

    def may_send(self, api: Api) -> bool:
        return True

    def send(self, reply: Any) -> None:
        self.replies.put_nowait(reply)

    def defer(self, api_key: int) -> PendingReply:
        return PendingReply(api_key)

    def fulfil(self, slot: PendingReply, reply: Any) -> None:
        self.send(reply)

    def close(self) -> None:
        self.is_closed = True

    def _failed(self, connection: Any) -> None:
        raise AssertionError("a handler failed")

    def tell(self, request: Any, *, api_key: int | None = None, version: int | None = None) -> Any:
        self._number += 1
        schema = load_request_schema(
            request.__api_key__ if api_key is None else api_key,
            request.__version__ if version is None else version,
        )
        frame = _frame(schema, self._number, request)
        self._dispatcher.dispatch(self, memoryview(frame))  # type: ignore[arg-type]
        return schema

    async def ask(self, request: Any, *, api_key: int | None = None, version: int | None = None) -> Any:
        schema = self.tell(request, api_key=api_key, version=version)
        reply = await self.replies.get()
        if reply is CLOSE_CONNECTION:
            return None
        assert struct.unpack_from(">ii", reply) == (len(reply) - 4, self._number)
        answer = load_response_schema(schema.__api_key__, schema.__version__)
        _, position = entity_reader(answer.__header_schema__)(reply, 4)
        return entity_reader(answer)(reply, 4 + position)[0]


def _frame(schema: Any, correlation_id: int, request: Any) -> bytes:
    out = io.BytesIO()
    header = schema.__header_schema__(
        request_api_key=schema.__api_key__,
        request_api_version=schema.__version__,
        correlation_id=correlation_id,
        client_id="somebody",
    )
    entity_writer(schema.__header_schema__)(out, header)
    entity_writer(schema)(out, request)
    return out.getvalue()


def topics(*names: str, seconds: float = 30) -> Any:
    return create.CreateTopicsRequest(
        topics=tuple(
            create.CreatableTopic(
                name=name, num_partitions=1, replication_factor=3, assignments=(), configs=()
            )
            for name in names
        ),
        timeout=timedelta(seconds=seconds),
    )


# --- through any node ---


@pytest.mark.parametrize("version", range(2, 8))
def test_a_topic_is_created_through_any_node_in_every_version(tmp_path: Path, version: int) -> None:
    @in_virtual_time
    async def scenario() -> None:
        cluster = await three(tmp_path)
        for node_id in cluster.nodes:
            name = f"t{node_id}"
            (result,) = (await Client(cluster[node_id]).ask(topics(name), version=version)).topics
            assert (result.name, result.error_code) == (name, ErrorCode.none)
            assert name in cluster[node_id].image.topics
        await cluster.stop()

    scenario()


@in_virtual_time
async def test_the_answer_waits_until_the_node_that_was_asked_shows_it(tmp_path: Path) -> None:
    cluster = await three(tmp_path)
    cluster[2].lags = True
    client = Client(cluster[2])
    client.tell(topics("orders"))
    await until(lambda: "orders" in cluster[1].image.topics)
    await asyncio.sleep(3)
    assert client.replies.empty()
    cluster[2].metadata.follow()
    await client.replies.get()
    await cluster.stop()


@in_virtual_time
async def test_a_node_that_cannot_follow_passes_the_answer_on_in_the_end(tmp_path: Path) -> None:
    cluster = await three(tmp_path)
    cluster[2].lags = True
    started = now()
    (result,) = (await Client(cluster[2]).ask(topics("orders", seconds=4))).topics
    assert result.error_code is ErrorCode.none
    assert now() - started == pytest.approx(4, abs=0.1)
    await cluster.stop()


@in_virtual_time
async def test_refusals_of_the_controller_are_passed_on(tmp_path: Path) -> None:
    cluster = await three(tmp_path)
    request = delete.DeleteTopicsRequest(
        topics=(delete.DeleteTopicState(name="nothing", topic_id=None),), timeout=timedelta(seconds=9)
    )
    (result,) = (await Client(cluster[3]).ask(request)).responses
    assert (result.name, result.error_code) == ("nothing", ErrorCode.unknown_topic_or_partition)
    too_many = create.CreatableTopic(
        name="t", num_partitions=1, replication_factor=4, assignments=(), configs=()
    )
    (result,) = (await Client(cluster[3]).ask(create.CreateTopicsRequest(topics=(too_many,)))).topics
    assert result.error_code is ErrorCode.invalid_replication_factor
    await cluster.stop()


@in_virtual_time
async def test_a_failure_to_write_is_told_for_each_topic(tmp_path: Path) -> None:
    cluster = await three(tmp_path)
    cluster[1].metadata.fails = ApiError(ErrorCode.kafka_storage_error, "the disk is full")
    for node_id in (1, 2):
        results = (await Client(cluster[node_id]).ask(topics("a", "b"))).topics
        assert [(r.name, r.error_code, r.error_message) for r in results] == [
            ("a", ErrorCode.kafka_storage_error, "the disk is full"),
            ("b", ErrorCode.kafka_storage_error, "the disk is full"),
        ]
    await cluster.stop()


@in_virtual_time
async def test_a_request_survives_an_election(tmp_path: Path) -> None:
    cluster = await three(tmp_path)
    cluster.elect(-1)
    client = Client(cluster[2])
    client.tell(topics("orders"))
    await asyncio.sleep(3)
    assert client.replies.empty()
    cluster.elect(3)
    await client.replies.get()
    assert "orders" in cluster[2].image.topics
    await cluster.stop()


@in_virtual_time
async def test_clients_never_hear_of_a_controller_that_lost_office_while_it_decided(tmp_path: Path) -> None:
    cluster = await three(tmp_path)
    cluster[1].metadata.fails = ApiError(ErrorCode.not_controller)
    here, there = Client(cluster[1]), Client(cluster[2])
    here.tell(topics("a"))
    there.tell(topics("b"))
    await asyncio.sleep(1)
    assert here.replies.empty()
    assert there.replies.empty()
    cluster.elect(3)
    await here.replies.get()
    await there.replies.get()
    assert {"a", "b"} == set(cluster[2].image.topics)
    await cluster.stop()


@pytest.mark.parametrize("api", RELAYED, ids=lambda api: api.name)
def test_without_a_controller_every_request_is_refused_in_its_own_way(
    tmp_path: Path, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.unit.testing.test_error_responses import _errors, _sample

    # Otherwise the node itself refuses requests about delegation tokens of this client, which has not logged in.
    monkeypatch.setattr(RequestContext, "may_ask_about_tokens", True)

    @in_virtual_time
    async def scenario() -> None:
        cluster = Cluster(tmp_path)
        for version in range(api.min_version, api.max_version + 1):
            request = _sample(load_request_schema(api.key, version))
            response = await Client(cluster[2]).ask(request, api_key=api.key, version=version)
            assert set(_errors(response)) == {ErrorCode.request_timed_out}

    scenario()


@in_virtual_time
async def test_an_impatient_client_is_answered_in_its_time(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    started = now()
    (result,) = (await Client(cluster[2]).ask(topics("orders", seconds=2))).topics
    assert result.error_code is ErrorCode.request_timed_out
    assert now() - started == pytest.approx(2, abs=0.1)


@in_virtual_time
async def test_a_node_without_a_cluster_answers_for_itself(tmp_path: Path) -> None:
    cluster = await three(tmp_path)
    cluster[2].quorum.has_cluster = False
    request = listing.ListPartitionReassignmentsRequest(topics=None)
    assert (await Client(cluster[2]).ask(request)).error_code is ErrorCode.none
    assert (1, ENVELOPE) not in cluster.heard
    await cluster.stop()


# --- envelopes ---


async def _enveloped(cluster: Cluster, node_id: int, data: bytes) -> ErrorCode:
    request = EnvelopeRequest(request_data=data, request_principal=None, client_host_address=b"")
    response = await Client(cluster[node_id]).ask(request)
    error: ErrorCode = response.error_code
    return error


@in_virtual_time
async def test_only_the_active_controller_opens_an_envelope(tmp_path: Path) -> None:
    cluster = await three(tmp_path)
    data = _frame(load_request_schema(19, 7), 5, topics("orders"))
    assert await _enveloped(cluster, 2, data) is ErrorCode.not_controller
    assert await _enveloped(cluster, 1, data) is ErrorCode.none
    await cluster.stop()


@in_virtual_time
async def test_only_what_is_relayed_may_be_in_an_envelope(tmp_path: Path) -> None:
    cluster = await three(tmp_path)
    versions = ApiVersionsRequest(client_software_name="a", client_software_version="1")
    for data in (
        _frame(load_request_schema(18, 4), 5, versions),
        _frame(load_request_schema(19, 7), 5, topics("orders"))[:-3],
        struct.pack(">hhih", 19, 99, 5, -1),
        struct.pack(">hhih", 19, 7, 5, 700),
        b"",
    ):
        assert await _enveloped(cluster, 1, data) is ErrorCode.invalid_request
    await cluster.stop()


# --- what the controller does for others ---


@in_virtual_time
async def test_replicas_are_moved_and_listed_through_any_node(tmp_path: Path) -> None:
    cluster = await three(tmp_path)
    await create_topic(cluster[1], "orders", replicas=1)
    (here,) = cluster[1].image.topics["orders"].partitions[0].replicas
    there = here % 3 + 1
    partition = reassign.ReassignablePartition(partition_index=0, replicas=(there,))
    move = reassign.AlterPartitionReassignmentsRequest(
        topics=(reassign.ReassignableTopic(name="orders", partitions=(partition,)),),
        allow_replication_factor_change=True,
    )
    response = await Client(cluster[2]).ask(move)
    assert response.error_code is response.responses[0].partitions[0].error_code is ErrorCode.none
    listed = await Client(cluster[3]).ask(listing.ListPartitionReassignmentsRequest(topics=None))
    (ongoing,) = listed.topics[0].partitions
    assert (listed.topics[0].name, ongoing.adding_replicas, ongoing.removing_replicas) == (
        "orders",
        (there,),
        (here,),
    )
    named = listing.ListPartitionReassignmentsTopics(name="orders", partition_indexes=(7,))
    none = await Client(cluster[3]).ask(listing.ListPartitionReassignmentsRequest(topics=(named,)))
    assert none.topics == ()
    await cluster.stop()


@in_virtual_time
async def test_leaders_are_elected_through_any_node(tmp_path: Path) -> None:
    cluster = await three(tmp_path)
    await create_topic(cluster[1], "orders")
    partition = elect.TopicPartitions(topic="orders", partitions=(0, 5))
    request = elect.ElectLeadersRequest(election_type=0, topic_partitions=(partition,))
    response = await Client(cluster[2]).ask(request)
    assert [r.error_code for r in response.replica_election_results[0].partition_result] == [
        ErrorCode.election_not_needed,
        ErrorCode.unknown_topic_or_partition,
    ]
    wrong = elect.ElectLeadersRequest(election_type=9, topic_partitions=None)
    assert (await Client(cluster[2]).ask(wrong)).error_code is ErrorCode.invalid_request
    everything = elect.ElectLeadersRequest(election_type=0, topic_partitions=None)
    assert (await Client(cluster[2]).ask(everything)).replica_election_results == ()
    await cluster.stop()


@in_virtual_time
async def test_a_broker_is_forgotten_only_when_it_is_gone(tmp_path: Path) -> None:
    cluster = await three(tmp_path)
    request = UnregisterBrokerRequest(broker_id=3)
    assert (await Client(cluster[2]).ask(request)).error_code is ErrorCode.invalid_request
    await cluster[3].stop()
    await until(lambda: cluster[1].image.brokers[3].fenced)
    assert (await Client(cluster[2]).ask(request)).error_code is ErrorCode.none
    assert 3 not in cluster[2].image.brokers
    assert (await Client(cluster[2]).ask(request)).error_code is ErrorCode.broker_id_not_registered
    await cluster.stop()


@pytest.mark.parametrize("version", range(3))
def test_feature_levels_are_changed_only_to_what_is_known(tmp_path: Path, version: int) -> None:
    def update(name: str, level: int) -> Any:
        key = SimpleNamespace(feature=name, max_version_level=level, allow_downgrade=False, upgrade_type=1)
        return SimpleNamespace(timeout=timedelta(seconds=9), feature_updates=(key,), validate_only=False)

    @in_virtual_time
    async def scenario() -> None:
        cluster = await three(tmp_path)
        client = Client(cluster[2])
        level = cluster[2].image.features["metadata.version"]
        same = await client.ask(update("metadata.version", level), api_key=57, version=version)
        assert same.error_code is ErrorCode.none
        for name, wanted in (("metadata.version", level + 1), ("no.such", 1), ("metadata.version", 1)):
            refused = await client.ask(update(name, wanted), api_key=57, version=version)
            assert refused.error_code is ErrorCode.invalid_update_version
        assert cluster[2].image.features["metadata.version"] == level
        await cluster.stop()

    scenario()


# --- starting, and other roles ---


@in_virtual_time
async def test_a_starting_node_serves_nodes_and_cuts_clients_off(tmp_path: Path) -> None:
    cluster = await three(tmp_path)
    node = cluster[1]
    node.state = "starting"
    client = Client(node)
    client.tell(topics("orders"))
    assert client.is_closed
    assert client.replies.empty()
    versions = ApiVersionsRequest(client_software_name="a", client_software_version="1")
    assert (await client.ask(versions)).error_code is ErrorCode.none
    data = _frame(load_request_schema(19, 7), 5, topics("orders"))
    request = EnvelopeRequest(request_data=data, request_principal=None, client_host_address=b"")
    assert (await client.ask(request)).error_code is ErrorCode.none
    node.state = "serving"
    (result,) = (await client.ask(topics("orders"))).topics
    assert result.error_code is ErrorCode.topic_already_exists
    await cluster.stop()


@pytest.mark.parametrize(("roles", "is_on_offer"), [("broker,controller", True), ("controller", False)])
def test_a_controller_does_not_offer_what_needs_partitions(
    tmp_path: Path, roles: str, is_on_offer: bool
) -> None:
    @in_virtual_time
    async def scenario() -> None:
        node = Cluster(tmp_path, size=1, **{"process.roles": roles})[1]
        versions = ApiVersionsRequest(client_software_name="a", client_software_version="1")
        offered = {api.api_key for api in (await Client(node).ask(versions)).api_keys}
        assert (0 in offered, 22 in offered) == (is_on_offer, is_on_offer)
        assert {1, 3, 18, 19, 52, 60} <= offered

    scenario()


def test_an_envelope_names_the_principal_as_apache_kafka_does() -> None:
    encoded = encode_principal(Principal("User", "alice:é"), is_by_token=False)
    assert encoded == b"\0\0" + b"\x05User" + b"\x09alice:\xc3\xa9" + b"\0\0"
    assert decode_principal(encoded) == (Principal("User", "alice:é"), False)
    by_token = encode_principal(Principal("User", "alice:é"), is_by_token=True)
    assert by_token == encoded[:-2] + b"\1\0"
    assert decode_principal(by_token) == (Principal("User", "alice:é"), True)
    for damaged in (
        encoded[:1],
        encoded[:5],
        encoded[:-1],
        encoded[:-2],
        b"\0\1" + encoded[2:],
        b"\0\0\x03\xff\xff\x01\0\0",
    ):
        with pytest.raises(MalformedFrame):
            decode_principal(damaged)
