"""The API table: which requests this node serves, in which versions, and how each version is decoded and encoded.

An API is listed only if it is implemented. Handlers are imported, and schemas loaded, when the first request of their
kind arrives: one `ApiRoute` per API and version.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.protocol.compression import BytesLike
from penstock.protocol.errors import MalformedFrame
from penstock.protocol.share_failures import SHARE_FAILURES
from penstock.protocol.tenant_usage import TENANT_USAGE
from penstock.protocol.topic_drops import TOPIC_DROPS
from penstock.protocol.wire import skip_tags

if TYPE_CHECKING:
    from penstock.protocol.steps import Steps

PRODUCE: Final = 0
FETCH: Final = 1
SHARE_FETCH: Final = 78
SHARE_ACKNOWLEDGE: Final = 79
API_VERSIONS: Final = 18
#: Higher than any version.
_NO_VERSION: Final = 1 << 15


class Api(NamedTuple):
    key: int
    name: str
    min_version: int
    max_version: int
    #: The active controller handles the request; all other nodes forward it to the controller.
    relay: bool = False
    #: Served before this node has joined the cluster. Until then any other request closes its connection.
    while_starting: bool = False
    #: Has no meaning on a node that is only a controller, and is not advertised there.
    broker_only: bool = False
    #: Waits for other clients; cancelled if its connection ends.
    waits_for_others: bool = False
    #: Reads much data and changes nothing. If the reply comes later, the connection handles no further requests until
    #: then, and the request is cancelled if the connection ends.
    is_costly: bool = False
    #: From this version on only nodes send the request; it is refused on listeners for clients.
    inter_broker_from: int = _NO_VERSION

    @property
    def is_for_controllers(self) -> bool:
        """Whether only nodes send it, and only to controllers, at the listeners in controller.listener.names."""
        return self.while_starting and self.inter_broker_from == 0

    def max_version_on(self, *, is_inter_broker: bool, serves_controller: bool) -> int:
        """Return the newest version served on a listener; below `min_version` if the API is not served there."""
        is_served = is_inter_broker and (serves_controller or not self.is_for_controllers)
        return self.max_version if is_served else min(self.max_version, self.inter_broker_from - 1)

    @property
    def is_local(self) -> Callable[[Any, Any], bool] | None:
        module = import_module(f"penstock.broker.handlers.{self.name}")
        return getattr(module, "is_local", None) if self.relay else None

    @property
    def handler(self) -> Callable[..., Any]:
        return import_module(f"penstock.broker.handlers.{self.name}").handle  # type: ignore[no-any-return]


APIS: Final = {
    api.key: api
    for api in (
        Api(PRODUCE, "produce", 3, 13, broker_only=True),
        Api(FETCH, "fetch", 4, 18, while_starting=True),
        Api(2, "list_offsets", 1, 11, broker_only=True),
        Api(3, "metadata", 0, 13, is_costly=True),
        Api(8, "offset_commit", 2, 10, broker_only=True),
        Api(9, "offset_fetch", 1, 10, broker_only=True),
        Api(10, "find_coordinator", 0, 6),
        Api(11, "join_group", 0, 9, broker_only=True, waits_for_others=True),
        Api(12, "heartbeat", 0, 4, broker_only=True),
        Api(13, "leave_group", 0, 5, broker_only=True),
        Api(14, "sync_group", 0, 5, broker_only=True, waits_for_others=True),
        Api(15, "describe_groups", 0, 6, broker_only=True, is_costly=True),
        Api(16, "list_groups", 0, 5, broker_only=True, is_costly=True),
        Api(17, "sasl_handshake", 0, 1, while_starting=True),
        Api(API_VERSIONS, "api_versions", 0, 4, while_starting=True),
        Api(19, "create_topics", 2, 7, relay=True),
        Api(20, "delete_topics", 1, 6, relay=True),
        Api(21, "delete_records", 0, 2, broker_only=True),
        Api(22, "init_producer_id", 0, 6, broker_only=True),
        Api(23, "offset_for_leader_epoch", 2, 4, broker_only=True),
        Api(24, "add_partitions_to_txn", 0, 5, broker_only=True, inter_broker_from=4),
        Api(25, "add_offsets_to_txn", 0, 4, broker_only=True),
        Api(26, "end_txn", 0, 5, broker_only=True),
        Api(27, "write_txn_markers", 1, 2, broker_only=True, inter_broker_from=0),
        Api(28, "txn_offset_commit", 0, 5, broker_only=True),
        Api(29, "describe_acls", 1, 3),
        Api(30, "create_acls", 1, 3, relay=True),
        Api(31, "delete_acls", 1, 3, relay=True),
        Api(32, "describe_configs", 1, 4, is_costly=True),
        Api(33, "alter_configs", 0, 2, relay=True),
        Api(34, "alter_replica_log_dirs", 1, 2, broker_only=True),
        Api(35, "describe_log_dirs", 1, 5, broker_only=True, is_costly=True),
        Api(36, "sasl_authenticate", 0, 2, while_starting=True, is_costly=True),
        Api(37, "create_partitions", 0, 3, relay=True),
        Api(38, "create_delegation_token", 1, 3, relay=True),
        Api(39, "renew_delegation_token", 1, 2, relay=True),
        Api(40, "expire_delegation_token", 1, 2, relay=True),
        Api(41, "describe_delegation_token", 1, 3, is_costly=True),
        Api(42, "delete_groups", 0, 2, broker_only=True),
        Api(43, "elect_leaders", 0, 2, relay=True),
        Api(44, "incremental_alter_configs", 0, 1, relay=True),
        Api(45, "alter_partition_reassignments", 0, 1, relay=True),
        Api(46, "list_partition_reassignments", 0, 0, relay=True),
        Api(47, "offset_delete", 0, 0, broker_only=True),
        Api(48, "describe_client_quotas", 0, 1),
        Api(49, "alter_client_quotas", 0, 1, relay=True),
        Api(50, "describe_user_scram_credentials", 0, 0, is_costly=True),
        Api(51, "alter_user_scram_credentials", 0, 0, relay=True),
        Api(52, "vote", 0, 2, while_starting=True, inter_broker_from=0),
        Api(53, "begin_quorum_epoch", 0, 1, while_starting=True, inter_broker_from=0),
        Api(54, "end_quorum_epoch", 0, 1, while_starting=True, inter_broker_from=0),
        Api(55, "describe_quorum", 0, 2, relay=True, while_starting=True),
        Api(56, "alter_partition", 3, 3, while_starting=True, inter_broker_from=0),
        Api(57, "update_features", 0, 2, relay=True),
        Api(58, "envelope", 0, 0, while_starting=True, inter_broker_from=0),
        Api(59, "fetch_snapshot", 0, 1, while_starting=True, inter_broker_from=0),
        Api(60, "describe_cluster", 0, 2, while_starting=True),
        Api(61, "describe_producers", 0, 0, broker_only=True, is_costly=True),
        Api(62, "broker_registration", 0, 4, while_starting=True, inter_broker_from=0),
        Api(63, "broker_heartbeat", 0, 1, while_starting=True, inter_broker_from=0),
        Api(64, "unregister_broker", 0, 0, relay=True),
        Api(65, "describe_transactions", 0, 0, broker_only=True, is_costly=True),
        Api(66, "list_transactions", 0, 2, broker_only=True, is_costly=True),
        Api(67, "allocate_producer_ids", 0, 0, while_starting=True, inter_broker_from=0),
        Api(68, "consumer_group_heartbeat", 0, 1, broker_only=True),
        Api(69, "consumer_group_describe", 0, 1, broker_only=True, is_costly=True),
        Api(71, "get_telemetry_subscriptions", 0, 0, broker_only=True),
        Api(72, "push_telemetry", 0, 0, broker_only=True),
        Api(73, "assign_replicas_to_dirs", 0, 0, while_starting=True, inter_broker_from=0),
        Api(74, "list_config_resources", 0, 1, is_costly=True),
        Api(75, "describe_topic_partitions", 0, 0, is_costly=True),
        Api(76, "share_group_heartbeat", 1, 1, broker_only=True),
        Api(77, "share_group_describe", 1, 1, broker_only=True, is_costly=True),
        Api(SHARE_FETCH, "share_fetch", 1, 2, broker_only=True),
        Api(SHARE_ACKNOWLEDGE, "share_acknowledge", 1, 2, broker_only=True),
        Api(80, "add_raft_voter", 0, 1, relay=True, while_starting=True, inter_broker_from=0),
        Api(81, "remove_raft_voter", 0, 0, relay=True, while_starting=True),
        Api(82, "update_raft_voter", 0, 0, relay=True, while_starting=True, inter_broker_from=0),
        Api(83, "initialize_share_group_state", 0, 0, broker_only=True, inter_broker_from=0),
        Api(84, "read_share_group_state", 0, 0, broker_only=True, inter_broker_from=0),
        Api(85, "write_share_group_state", 0, 1, broker_only=True, inter_broker_from=0),
        Api(86, "delete_share_group_state", 0, 0, broker_only=True, inter_broker_from=0),
        Api(87, "read_share_group_state_summary", 0, 1, broker_only=True, inter_broker_from=0),
        Api(88, "streams_group_heartbeat", 0, 0, broker_only=True),
        Api(89, "streams_group_describe", 0, 0, broker_only=True),
        Api(90, "describe_share_group_offsets", 0, 1, broker_only=True, is_costly=True),
        Api(91, "alter_share_group_offsets", 0, 0, broker_only=True),
        Api(92, "delete_share_group_offsets", 0, 0, broker_only=True),
    )
}

#: APIs of our own, which are hand packed and not listed by ApiVersions. Only nodes send SCHEDULE. Our client sends
#: SHARE_FAILURES; it recognizes our brokers by the settings of a share group. Nodes and `penstock tenant` send
#: TENANT_USAGE; only our brokers have tenants. Nodes and `penstock topic describe` send TOPIC_DROPS.
SCHEDULE_API: Final = 30_000
PRIVATE_APIS: Final = {
    SCHEDULE_API: Api(SCHEDULE_API, "schedule", 0, 0, broker_only=True, inter_broker_from=0),
    SHARE_FAILURES: Api(SHARE_FAILURES, "share_failures", 0, 0, broker_only=True),
    TENANT_USAGE: Api(TENANT_USAGE, "tenant_usage", 0, 0, broker_only=True),
    TOPIC_DROPS: Api(TOPIC_DROPS, "topic_drops", 0, 0, broker_only=True),
}

#: librdkafka before 2.0 disables compression unless Produce v0 is advertised. As in Apache Kafka, v0 is advertised and
#: then refused.
ADVERTISED_MIN_VERSIONS: Final = {PRODUCE: 0}


_HEADER = struct.Struct(">hhih")  # api key, version, correlation id, length of the client id
REQUEST_HEADER_BYTES: Final = _HEADER.size
_INT32 = struct.Struct(">i")
#: A body up to this size is copied behind its header, so that it can be sent together with other replies.
_COPIED_BYTES_MAX: Final = 4096


class RequestHeader(NamedTuple):
    """`client_id` is not decoded; `position` is where it ends and the tagged fields of the header begin, if any."""

    api_key: int
    version: int
    correlation_id: int
    client_id: bytes | None
    position: int


class ApiRoute(NamedTuple):
    """How to decode, handle and encode one API in one version; built when it is first used."""

    is_flexible: bool
    is_forwarded: bool
    decode: Callable[[memoryview, int], Any]
    #: The third argument is how many elements the arrays may have in all.
    decode_in_steps: Callable[[memoryview, int, int], Steps[Any]]
    encode: Callable[[io.BytesIO, Any], None]
    handle: Callable[..., Any]
    #: For an API that is forwarded: whether this node must handle the given request, with its context, itself.
    is_local: Callable[[Any, Any], bool] | None = None


class EncodedResponse(NamedTuple):
    """A response that is already encoded, without its header; many requests may share it."""

    body: bytes


def parse_request_header(frame: memoryview) -> RequestHeader:
    """Raises MalformedFrame."""
    try:
        api_key, version, correlation_id, client_id_size = _HEADER.unpack_from(frame)
    except struct.error:
        raise MalformedFrame("request header is cut short") from None
    position = REQUEST_HEADER_BYTES + max(client_id_size, 0)
    if position > len(frame):
        raise MalformedFrame("client id is cut short")
    client_id = bytes(frame[REQUEST_HEADER_BYTES:position]) if client_id_size >= 0 else None
    return RequestHeader(api_key, version, correlation_id, client_id, position)


@cache
def route(api_key: int, version: int) -> ApiRoute:
    # Imported here, because they load schemas.
    from penstock.broker.network.access import guarded
    from penstock.protocol.schemas import (
        request_decoder,
        request_is_flexible,
        response_encoder,
        stepwise_request_decoder,
    )

    api = APIS[api_key]
    return ApiRoute(
        request_is_flexible(api_key, version),
        api.relay,
        request_decoder(api_key, version),
        lambda *given: stepwise_request_decoder(api_key, version)(*given),
        response_encoder(api_key, version),
        guarded(api_key, api.handler),
        api.is_local,
    )


def decode_request(header: RequestHeader, frame: memoryview) -> Any:
    """Return the request as an object of the newest version's class. Raises MalformedFrame."""
    found = route(header.api_key, header.version)
    position = skip_header_tags(frame, header.position) if found.is_flexible else header.position
    return found.decode(frame, position)


def encode_response(api_key: int, version: int, correlation_id: int, response: Any) -> bytes:
    """Return the reply with its size field and header."""
    out = io.BytesIO()
    out.write(_response_header(api_key, version, correlation_id))
    route(api_key, version).encode(out, response)
    with out.getbuffer() as view:
        _INT32.pack_into(view, 0, len(view) - 4)
    return out.getvalue()


def encode_response_in_steps(api_key: int, version: int, correlation_id: int, response: Any) -> Steps[bytes]:
    """Like `encode_response`, in steps."""
    from penstock.protocol.schemas import stepwise_response_encoder

    write = stepwise_response_encoder(api_key, version)
    if write is None:
        return encode_response(api_key, version, correlation_id, response)
    out = io.BytesIO()
    out.write(_response_header(api_key, version, correlation_id))
    yield from write(out, response)
    with out.getbuffer() as view:
        _INT32.pack_into(view, 0, len(view) - 4)
    return out.getvalue()


def encode_response_body(api_key: int, version: int, response: Any) -> bytes:
    """Return the reply without size field and header, for an `EncodedResponse`."""
    out = io.BytesIO()
    route(api_key, version).encode(out, response)
    return out.getvalue()


def frame_response(api_key: int, version: int, correlation_id: int, body: bytes) -> bytes | list[BytesLike]:
    """Put size field and header in front of a body; a large body is not copied."""
    header = bytearray(_response_header(api_key, version, correlation_id))
    _INT32.pack_into(header, 0, len(header) - 4 + len(body))
    return bytes(header) + body if len(body) <= _COPIED_BYTES_MAX else [bytes(header), body]


def _response_header(api_key: int, version: int, correlation_id: int) -> bytes:
    """Return the header, preceded by four bytes for the size field."""
    header = b"\x00\x00\x00\x00" + _INT32.pack(correlation_id)
    # Clients parse an ApiVersions reply before they know which versions we support, so its header never changes.
    return header + b"\x00" if route(api_key, version).is_flexible and api_key != API_VERSIONS else header


def skip_header_tags(frame: memoryview, position: int) -> int:
    """Raises MalformedFrame."""
    try:
        return skip_tags(frame, position, len(frame))
    except IndexError:
        raise MalformedFrame("request header is cut short") from None
