"""Misbehaving connections do not affect others."""

import contextlib
import socket
import ssl
import struct
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.compat import confluent
from tests.compat.message import Message, numbered, values
from tests.compat.raw import RawConnection, connected, schema
from tests.waiting import eventually

FAR_TOO_LARGE_BYTES = 2_000_000_000
API_VERSIONS, METADATA, NO_SUCH_API = 18, 3, 999


@pytest.fixture
def raw(broker: Any) -> Iterator[RawConnection]:
    with connected(broker.address) as connection:
        yield connection


@pytest.fixture(autouse=True)
def _others_are_not_disturbed(bootstrap: str, topic: str) -> Iterator[None]:
    """A well-behaved client works before, during and after each of these tests."""
    assert confluent.publish(bootstrap, topic, [Message(value=b"before")]) == [0]
    yield
    assert confluent.publish(bootstrap, topic, [Message(value=b"after")]) == [1]
    assert values(confluent.read(bootstrap, topic, 2)) == [b"before", b"after"]


def header(api: int, version: int, correlation_id: int = 1) -> bytes:
    return struct.pack(">hhih", api, version, correlation_id, -1)


@pytest.mark.parametrize("size", [FAR_TOO_LARGE_BYTES, -1, -(2**31)])
def test_a_frame_of_impossible_size_closes_the_connection(raw: RawConnection, size: int) -> None:
    raw.send(struct.pack(">i", size) + b"some bytes")
    assert raw.is_closed_by_broker()


@pytest.mark.parametrize(
    "payload",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"\x00\x03", id="half-a-header"),
        pytest.param(header(NO_SUCH_API, 0), id="unknown-api"),
        pytest.param(header(METADATA, 99) + b"\x00", id="unknown-version"),
        pytest.param(header(METADATA, 1) + struct.pack(">i", 2_000_000_000), id="impossible-count"),
        pytest.param(header(METADATA, 1) + struct.pack(">ih", 1, 500) + b"short", id="truncated-string"),
        pytest.param(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", id="http"),
    ],
)
def test_a_frame_that_cannot_be_read_closes_the_connection(raw: RawConnection, payload: bytes) -> None:
    raw.send_frame(payload)
    assert raw.is_closed_by_broker()


def test_plain_http_is_turned_away(broker: Any) -> None:
    with connected(broker.address) as connection:
        connection.send(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" + b"\x00" * 600)
        assert connection.is_closed_by_broker()


def test_clients_with_tls_get_an_alert_from_a_listener_without_it(broker: Any) -> None:
    context = ssl.create_default_context()
    with (
        socket.create_connection(broker.address, timeout=10) as plain,
        pytest.raises(ssl.SSLError, match="HANDSHAKE_FAILURE"),
    ):
        context.wrap_socket(plain, server_hostname="localhost")


def test_an_unknown_version_of_api_versions_is_answered_in_version_zero(raw: RawConnection) -> None:
    """So a client from the future learns what to speak."""
    no_tagged_fields = b"\x00"
    raw.send_frame(header(API_VERSIONS, 77, correlation_id=5) + no_tagged_fields)
    correlation_id, error_code, count = struct.unpack_from(">ihi", raw.receive_frame())
    assert (correlation_id, error_code) == (5, 35)
    assert count >= 1


def test_requests_in_flight_are_answered_in_order(raw: RawConnection) -> None:
    for number in range(50):
        raw.send_frame(
            header(API_VERSIONS, 0, number) if number % 2 else header(METADATA, 1, number) + b"\x00" * 4
        )
    answered = [struct.unpack_from(">i", raw.receive_frame())[0] for _ in range(50)]
    assert answered == list(range(50))


def test_a_frame_may_arrive_byte_by_byte(raw: RawConnection) -> None:
    frame = header(API_VERSIONS, 0, 9)
    for byte in struct.pack(">i", len(frame)) + frame:
        raw.send(bytes([byte]))
    assert struct.unpack_from(">i", raw.receive_frame())[0] == 9


def test_every_version_that_is_advertised_is_known_to_a_client(raw: RawConnection) -> None:
    question = schema("api_versions", 3, "ApiVersionsRequest")
    advertised = raw.call(question(client_software_name="raw", client_software_version="1"))
    spans = {each.api_key: (each.min_version, each.max_version) for each in advertised.api_keys}
    assert all(low <= high for low, high in spans.values())
    assert spans[0][0] == 0, "older librdkafka drops compression unless Produce is offered from version 0"
    wanted = {
        0,
        1,
        2,
        3,
        8,
        9,
        10,
        11,
        12,
        13,
        14,
        15,
        16,
        18,
        19,
        20,
        21,
        22,
        23,
        32,
        33,
        35,
        37,
        42,
        44,
        47,
        60,
        61,
        75,
    }
    assert wanted <= set(spans)
    assert {each.name for each in advertised.finalized_features} >= {"metadata.version"}


@pytest.mark.parametrize("version", [0, 1, 2])
def test_produce_in_the_old_message_format_is_refused(raw: RawConnection, topic: str, version: int) -> None:
    """Offered, so that old clients keep their compression, but never accepted, as in Apache Kafka."""
    name = topic.encode()
    body = struct.pack(">hiih", 1, 1000, 1, len(name)) + name + struct.pack(">iii", 1, 0, 0)
    raw.send_frame(header(0, version) + body)
    assert raw.is_closed_by_broker()


@pytest.fixture
def member(bootstrap: str, topic: str, group: str, closing: contextlib.ExitStack) -> Any:
    client = confluent.consumer(bootstrap, group)
    closing.callback(client.close)
    client.subscribe([topic])
    eventually(lambda: confluent.assigned(client, topic) == {0})
    return client


def commit(group: str, topic: str, member_id: str, generation: int) -> Any:
    partition = schema("offset_commit", 8, "OffsetCommitRequestPartition")(
        partition_index=0, committed_offset=1, committed_leader_epoch=-1, committed_metadata=""
    )
    each = schema("offset_commit", 8, "OffsetCommitRequestTopic")(name=topic, partitions=(partition,))
    return schema("offset_commit", 8, "OffsetCommitRequest")(
        group_id=group,
        generation_id_or_member_epoch=generation,
        member_id=member_id,
        group_instance_id=None,
        topics=(each,),
    )


@pytest.mark.parametrize(
    ("stranger", "generation", "error"),
    [
        pytest.param(False, 1, "none", id="member"),
        pytest.param(False, 0, "illegal_generation", id="old-generation"),
        pytest.param(False, 9, "illegal_generation", id="generation-of-the-future"),
        pytest.param(True, 1, "unknown_member_id", id="stranger"),
        pytest.param(True, -1, "unknown_member_id", id="outside-of-a-group-in-use"),
    ],
)
def test_commits_are_fenced(
    raw: RawConnection, member: Any, group: str, topic: str, stranger: bool, generation: int, error: str
) -> None:
    member_id = "" if generation == -1 else "stranger" if stranger else member.memberid()
    answer = raw.call(commit(group, topic, member_id, generation))
    assert answer.topics[0].partitions[0].error_code.name == error


def test_heartbeats_are_fenced(raw: RawConnection, member: Any, group: str) -> None:
    heartbeat = schema("heartbeat", 4, "HeartbeatRequest")

    def answer(group_id: str, member_id: str, generation: int) -> str:
        request = heartbeat(
            group_id=group_id, generation_id=generation, member_id=member_id, group_instance_id=None
        )
        return str(raw.call(request).error_code.name)

    assert answer(group, member.memberid(), 1) == "none"
    assert answer(group, member.memberid(), 0) == "illegal_generation"
    assert answer(group, "stranger", 1) == "unknown_member_id"
    assert answer(group + "-other", "stranger", 1) == "unknown_member_id"


def test_many_connections_come_and_go(broker: Any) -> None:
    for _ in range(5):
        with contextlib.ExitStack() as stack:
            connections = [stack.enter_context(connected(broker.address)) for _ in range(60)]
            for connection in connections:
                connection.send_frame(header(API_VERSIONS, 0, 3))
            assert all(connection.receive_frame() for connection in connections)


def test_a_connection_may_break_in_the_middle_of_a_request(
    broker: Any, bootstrap: str, new_topic: Callable[..., str]
) -> None:
    topic = new_topic()
    for cut in (1, 4, 9, 40):
        with connected(broker.address) as connection:
            connection.send((struct.pack(">i", 5000) + header(0, 9) + b"\x00" * 4000)[:cut])
    assert confluent.publish(bootstrap, topic, numbered(3)) == [0, 1, 2]
