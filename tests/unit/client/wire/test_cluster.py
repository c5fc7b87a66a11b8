"""Finding leaders and coordinators: from any address, again after a change, and within the timeout."""

import re
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from random import Random
from typing import Any

import pytest
from tests.unit.client.wire.scripted_broker import METADATA, ScriptedServer, encoded, frame

from penstock.client.errors import Refused, TopicChanged, Unavailable, broker_error
from penstock.client.wire.cluster import Cluster, CoordinatorType
from penstock.client.wire.connection import Connection
from penstock.client.wire.settings import ConnectionSettings
from penstock.protocol.backoff import ExponentialBackoff
from penstock.protocol.errors import ErrorCode
from penstock.protocol.schemas import schema_class

FIND_COORDINATOR = 10
APIS = {METADATA: (4, 4), FIND_COORDINATOR: (0, 0)}
NOBODY = ("127.0.0.1", 1)


class Nodes:
    """Brokers 1 and 2, who all tell the same; one partition of one topic."""

    def __init__(self, stack: ExitStack) -> None:
        self.leader = 1
        self.coordinator = 1
        self.topic_error = ErrorCode.none
        self.servers = {n: stack.enter_context(ScriptedServer(self._script, APIS)) for n in (1, 2)}

    def _script(self, server: Any, api_key: int, version: int, correlation_id: int, request: bytes) -> bytes:
        answer = self._metadata() if api_key == METADATA else self._coordinator()
        return frame(correlation_id, encoded(answer))

    def _metadata(self) -> Any:
        module = "metadata.v4.response"
        broker, topic, partition = (
            schema_class(f"{module}:MetadataResponse{name}") for name in ("Broker", "Topic", "Partition")
        )
        brokers = [
            broker(node_id=n, host=server.address[0], port=server.address[1], rack=None)
            for n, server in self.servers.items()
        ]
        part = partition(
            error_code=ErrorCode.none,
            partition_index=0,
            leader_id=self.leader,
            replica_nodes=(1, 2),
            isr_nodes=(1, 2),
        )
        topics = (topic(error_code=self.topic_error, name="orders", is_internal=False, partitions=(part,)),)
        return schema_class(f"{module}:MetadataResponse")(
            throttle_time=timedelta(0),
            brokers=tuple(brokers),
            cluster_id="c",
            controller_id=2,
            topics=topics,
        )

    def _coordinator(self) -> Any:
        host, port = self.servers[self.coordinator].address
        return schema_class("find_coordinator.v0.response:FindCoordinatorResponse")(
            error_code=ErrorCode.none, node_id=self.coordinator, host=host, port=port
        )

    def number(self, connection: Connection) -> int:
        return next(n for n, server in self.servers.items() if server.address == connection.address)


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    with ExitStack() as stack:
        yield Nodes(stack)


def cluster(*addresses: tuple[str, int], **more: Any) -> Cluster:
    values = {"retry_deadline_ms": 5000, "unknown_topic_ms_max": 100, **more}
    settings = ConnectionSettings(bootstrap=addresses, **values)
    return Cluster(settings, backoff=ExponentialBackoff(base_ms=5, cap_ms=20), chance=Random(1))


def test_one_address_that_answers_is_enough(nodes: Nodes) -> None:
    with cluster(NOBODY, nodes.servers[1].address, NOBODY) as made:
        assert sorted(made.nodes()) == [1, 2]
        assert made.cluster_id == "c"
        assert made.topics(re.compile("ord.*")).keys() == {"orders"}
        assert made.call_leader("orders", 0, nodes.number) == 1
    assert nodes.servers[1].connections == 1, "the connection to begin with is the one to the node"


def test_a_new_leader_is_found(nodes: Nodes) -> None:
    asked = []

    def ask(connection: Connection) -> str:
        asked.append(nodes.number(connection))
        if asked[-1] == 1:
            nodes.leader = 2
            raise broker_error(ErrorCode.not_leader_or_follower, "orders[0]")
        return "done"

    with cluster(nodes.servers[1].address) as made:
        assert made.call_leader("orders", 0, ask) == "done"
    assert asked == [1, 2]


def test_a_leader_that_hangs_up_is_asked_again_or_left(nodes: Nodes) -> None:
    asked = []

    def ask(connection: Connection) -> int:
        asked.append(nodes.number(connection))
        if len(asked) < 3:
            connection.close()
            nodes.leader = 3 - nodes.leader
            raise Unavailable("gone")
        return asked[-1]

    with cluster(nodes.servers[1].address) as made:
        assert made.call_leader("orders", 0, ask) == 1
    assert asked == [1, 2, 1]


def test_a_coordinator_is_remembered_until_it_says_that_it_is_none(nodes: Nodes) -> None:
    def ask(connection: Connection) -> int:
        number = nodes.number(connection)
        if number != nodes.coordinator:
            raise broker_error(ErrorCode.not_coordinator, "g")
        return number

    with cluster(nodes.servers[1].address) as made:
        for _ in range(3):
            assert made.call_coordinator(CoordinatorType.GROUP, "g", ask) == 1
        looked = sum(server.asked.count(FIND_COORDINATOR) for server in nodes.servers.values())
        assert looked == 1
        nodes.coordinator = 2
        assert made.call_coordinator(CoordinatorType.GROUP, "g", ask) == 2


def test_the_controller_is_asked_where_it_is(nodes: Nodes) -> None:
    with cluster(nodes.servers[1].address) as made:
        assert made.call_controller(nodes.number) == 2
        assert sorted(made.call_every_node(nodes.number)) == [1, 2]


def test_what_does_not_pass_is_raised_at_once(nodes: Nodes) -> None:
    asked = []

    def ask(connection: Connection) -> None:
        asked.append(1)
        raise broker_error(ErrorCode.topic_authorization_failed, "orders")

    with cluster(nodes.servers[1].address) as made, pytest.raises(Refused):
        made.call_leader("orders", 0, ask)
    assert len(asked) == 1


@pytest.mark.parametrize("code", [ErrorCode.not_leader_or_follower, ErrorCode.request_timed_out])
def test_nothing_is_tried_for_longer_than_agreed(nodes: Nodes, code: ErrorCode) -> None:
    def ask(connection: Connection) -> None:
        raise broker_error(code, "orders[0]")

    begun = time.monotonic()
    with (
        cluster(nodes.servers[1].address, retry_deadline_ms=100) as made,
        pytest.raises(Unavailable, match=r"the leader of orders\[0\] was not available within 0\.1 s"),
    ):
        made.call_leader("orders", 0, ask)
    assert time.monotonic() - begun < 10


def test_an_unknown_topic(nodes: Nodes) -> None:
    nodes.topic_error = ErrorCode.unknown_topic_or_partition
    with cluster(nodes.servers[1].address) as made:
        with pytest.raises(Refused, match="topic orders: unknown topic or partition"):
            made.call_leader("orders", 0, nodes.number)
        nodes.topic_error = ErrorCode.none
        assert made.call_leader("orders", 0, nodes.number) == 1


def test_brokers_without_ids_of_topics_have_topics_without_ids(nodes: Nodes) -> None:
    with cluster(nodes.servers[1].address) as made:
        assert made.topic("orders").id is None
        assert made.leader("orders", 0).leader_epoch == -1


def test_another_id_is_another_topic(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace
    from uuid import UUID

    from penstock.client.wire import cluster as module

    view = module.metadata_view

    def with_id(response: Any) -> Any:
        told = view(response)
        return replace(told, topics={n: replace(t, id=UUID(int=2)) for n, t in told.topics.items()})

    monkeypatch.setattr(module, "metadata_view", with_id)
    with cluster(nodes.servers[1].address) as made:
        assert made.call_leader("orders", 0, nodes.number, topic_id=UUID(int=2)) == 1
        with pytest.raises(TopicChanged, match="created again"):
            made.call_leader("orders", 0, nodes.number, topic_id=UUID(int=1))


def test_everyone_has_moved(nodes: Nodes) -> None:
    """When no node can be reached any more, the addresses to begin with are tried again."""
    with cluster(nodes.servers[1].address) as made:
        made.nodes()
        made.close()
        known = made._nodes
        made._nodes = {n: type(node)(id=n, host="127.0.0.1", port=1) for n, node in known.items()}
        assert made.call_any(nodes.number) in (1, 2)
        assert made.nodes() == known


def test_no_broker_answers() -> None:
    other = ("127.0.0.1", 2)
    with (
        cluster(NOBODY, other, retry_deadline_ms=50) as made,
        pytest.raises(Unavailable) as caught,
    ):
        made.topics()
    assert "127.0.0.1:1: Connection refused" in str(caught.value)
    assert "127.0.0.1:2: Connection refused" in str(caught.value)
