"""Who may send what: for every API the operations that Kafka's authorizer asks for, and the gate that enforces them.

`ACCESS` has one entry for each API. Most APIs are checked here, before their handler runs: the whole request is
refused, or the resources that the client may not use are taken out of it and get their error in the reply. A handler
checks itself where what it finds must be hidden, not refused; its entry says so with `in_handler`, and names the
operations. An API without an entry is not served once an authorizer is set.

Without `authorizer.class.name` the gate lets everything pass. Changes go to the audit trail in any case.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import fields, replace
from typing import Any, Final, NamedTuple

from penstock.broker.network.apis import APIS
from penstock.broker.network.audit import audit_request
from penstock.broker.network.error_responses import NoErrorField, error_response_in_steps
from penstock.broker.network.requests import RequestContext
from penstock.cluster.image import ResourceType as ConfigType
from penstock.cluster.topic_names import is_internal
from penstock.protocol.acls import CLUSTER_NAME, Operation, ResourceType
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.steps import Steps, finish

_READ, _WRITE, _CREATE, _DELETE = Operation.READ, Operation.WRITE, Operation.CREATE, Operation.DELETE
_ALTER, _DESCRIBE, _CLUSTER_ACTION = Operation.ALTER, Operation.DESCRIBE, Operation.CLUSTER_ACTION
_ALTER_CONFIGS, _DESCRIBE_CONFIGS = Operation.ALTER_CONFIGS, Operation.DESCRIBE_CONFIGS
_TOPIC, _GROUP, _CLUSTER = ResourceType.TOPIC, ResourceType.GROUP, ResourceType.CLUSTER
_TRANSACTION = ResourceType.TRANSACTIONAL_ID

#: What a client needs on the cluster instead, to alter or describe the settings of a tenant.
_OF_TENANTS: Final = {_ALTER_CONFIGS: _ALTER, _DESCRIBE_CONFIGS: _DESCRIBE}
#: The error that a client gets if it may not use a resource of the type.
REFUSED: Final = {
    ResourceType.TOPIC: ErrorCode.topic_authorization_failed,
    ResourceType.GROUP: ErrorCode.group_authorization_failed,
    ResourceType.CLUSTER: ErrorCode.cluster_authorization_failed,
    ResourceType.TRANSACTIONAL_ID: ErrorCode.transactional_id_authorization_failed,
    ResourceType.DELEGATION_TOKEN: ErrorCode.delegation_token_authorization_failed,
    ResourceType.USER: ErrorCode.delegation_token_authorization_failed,
}

#: In the replies of these APIs a refusal of the whole request is told once, and nothing of the request is repeated:
#: LeaveGroup, AddPartitionsToTxn, OffsetDelete, Vote, BeginQuorumEpoch, EndQuorumEpoch, DescribeQuorum, AlterPartition,
#: FetchSnapshot, AlterShareGroupOffsets and DeleteShareGroupOffsets.
_TOLD_ONCE: Final = frozenset({13, 24, 47, 52, 53, 54, 55, 56, 59, 91, 92})

Handler = Callable[[RequestContext, Any], Any]


class Need(NamedTuple):
    """What a client must be allowed to do."""

    operation: Operation
    resource_type: ResourceType


class Whole(NamedTuple):
    """The request needs one of `needs` on the resource that it names; otherwise all of it is refused.

    `name_of` returns None if this request does not name such a resource, and then nothing is needed.
    """

    needs: tuple[Need, ...]
    name_of: Callable[[RequestContext, Any], str | None]

    def is_refused(self, ctx: RequestContext, request: Any) -> Steps[bool]:
        yield
        name = self.name_of(ctx, request)
        if name is None:
            return False
        *others, last = self.needs
        return not any(ctx.may(*need, name) for need in others) and not ctx.demand(*last, name)


class AllOf(NamedTuple):
    """The request needs `need` on all the resources that it names; otherwise all of it is refused."""

    needs: tuple[Need, ...]
    names_of: Callable[[Any], Iterable[str]]

    def is_refused(self, ctx: RequestContext, request: Any) -> Steps[bool]:
        (need,) = self.needs
        for name in dict.fromkeys(self.names_of(request)):
            if not ctx.demand(*need, name):
                return True
            yield
        return False


class Each(NamedTuple):
    """Each element of an array needs a permission; those without it are refused, the others are handled.

    `unless` is something on the cluster that allows all of it.
    """

    needs: tuple[Need, ...]
    array: str
    #: Return the operation, and the type and name of the resource; None if this element needs no permission.
    need_of: Callable[[RequestContext, Any], tuple[Operation, ResourceType, str] | None]
    unless: Need | None = None

    def split(self, ctx: RequestContext, request: Any) -> Steps[tuple[Any, list[tuple[Any, ErrorCode]]]]:
        """Return the request with what is allowed, and requests with what is not, each with its error."""
        elements = getattr(request, self.array)
        if not elements or (self.unless is not None and ctx.may(*self.unless, CLUSTER_NAME)):
            return request, []
        allowed: list[Any] = []
        refused: dict[ErrorCode, list[Any]] = {}
        for element in elements:
            need = self.need_of(ctx, element)
            if need is None or ctx.demand(*need):
                allowed.append(element)
            else:
                refused.setdefault(REFUSED[need[1]], []).append(element)
            yield
        if not refused:
            return request, []
        return (
            replace(request, **{self.array: tuple(allowed)}),
            [(replace(request, **{self.array: tuple(part)}), code) for code, part in refused.items()],
        )


class InHandler(NamedTuple):
    """The handler checks these itself."""

    needs: tuple[Need, ...]


Check = Whole | AllOf | Each | InHandler


class Access(NamedTuple):
    """`changes`: attributes of the request that name what it changes; the audit trail lists them."""

    checks: tuple[Check, ...]
    #: Why a request needs no permission; empty if it needs some.
    open_because: str = ""
    changes: tuple[str, ...] = ()


# -- how entries are written -----------------------------------------------------------------------------


def _cluster(*operations: Operation) -> Whole:
    needs = tuple(Need(operation, _CLUSTER) for operation in operations)
    return Whole(needs, lambda _ctx, _request: CLUSTER_NAME)


def _whole(operation: Operation, resource_type: ResourceType, attribute: str) -> Whole:
    return Whole((Need(operation, resource_type),), lambda _, request: getattr(request, attribute))


def _each(
    operation: Operation,
    resource_type: ResourceType,
    array: str,
    attribute: str | None = "name",
    *,
    unless: Operation | None = None,
) -> Each:
    """`attribute` names the resource in an element, which may have a topic id instead. None: it is the name itself."""

    def need_of(ctx: RequestContext, element: Any) -> tuple[Operation, ResourceType, str] | None:
        name = element if attribute is None else getattr(element, attribute, None)
        if name is None and (topic_id := getattr(element, "topic_id", None)) is not None:
            topic = ctx.services.image.topics_by_id.get(topic_id)
            name = None if topic is None else topic.name
        return None if name is None else (operation, resource_type, name)

    exception = None if unless is None else Need(unless, _CLUSTER)
    return Each((Need(operation, resource_type),), array, need_of, exception)


def _subscribed_topics(request: Any) -> Iterable[str]:
    return request.subscribed_topic_names or ()


def topology_topics(request: Any) -> Iterable[str]:
    """Return the topics of a Streams topology."""
    if request.topology is None:
        return
    for part in request.topology.subtopologies:
        yield from part.source_topics
        yield from part.repartition_sink_topics
        yield from (topic.name for topic in part.repartition_source_topics)
        yield from (topic.name for topic in part.state_changelog_topics)


def _topology_needs(request: Any) -> Iterable[str]:
    """A topology with internal topics is invalid, which the handler answers."""
    names = list(topology_topics(request))
    return () if any(map(is_internal, names)) else names


def _config_resource(
    operation: Operation,
) -> Callable[[RequestContext, Any], tuple[Operation, ResourceType, str] | None]:
    def need_of(_: RequestContext, resource: Any) -> tuple[Operation, ResourceType, str] | None:
        match resource.resource_type:
            case ConfigType.TOPIC:
                return operation, _TOPIC, resource.resource_name
            case ConfigType.GROUP:
                return operation, _GROUP, resource.resource_name
            case ConfigType.BROKER | ConfigType.BROKER_LOGGER | ConfigType.CLIENT_METRICS:
                return operation, _CLUSTER, CLUSTER_NAME
            case ConfigType.TENANT:
                # Who makes a tenant gives access rules, and who describes it sees rules.
                return _OF_TENANTS[operation], _CLUSTER, CLUSTER_NAME
            case _:
                return None  # there is no such resource, which the handler answers

    return need_of


def _configs(operation: Operation) -> Each:
    needs = tuple(Need(operation, kind) for kind in (_TOPIC, _GROUP, _CLUSTER))
    return Each(needs, "resources", _config_resource(operation))


def _in_handler(*needs: tuple[Operation, ResourceType]) -> InHandler:
    return InHandler(tuple(Need(*need) for need in needs))


def _is_of_client(ctx: RequestContext, request: Any) -> str | None:
    return request.v3_and_below_transactional_id if ctx.version < _BATCHED_FROM else None


def _is_of_leader(ctx: RequestContext, _: Any) -> str | None:
    return None if ctx.version < _BATCHED_FROM else CLUSTER_NAME


_WRITE_TXN_MARKERS: Final = 27
#: AddPartitionsToTxn: from this version on partition leaders send it.
_BATCHED_FROM: Final = 4

_BETWEEN_NODES: Final = Access((_cluster(_CLUSTER_ACTION),))
_GROUP_MEMBER: Final = _whole(_READ, _GROUP, "group_id")
_TRANSACTION_WRITER: Final = _whole(_WRITE, _TRANSACTION, "transactional_id")

#: By API key. tests/unit/broker/network/test_access_table.py fails for an API that is missing here.
ACCESS: Final[dict[int, Access]] = {
    # produce, fetch, list_offsets, metadata
    0: Access((_in_handler((_WRITE, _TRANSACTION), (_WRITE, _TOPIC)),)),
    1: Access((_in_handler((_READ, _TOPIC), (_CLUSTER_ACTION, _CLUSTER)),)),
    2: Access((_each(_DESCRIBE, _TOPIC, "topics"),)),
    3: Access((_in_handler((_DESCRIBE, _TOPIC), (_CREATE, _CLUSTER), (_CREATE, _TOPIC)),)),
    # offset_commit, offset_fetch, find_coordinator
    8: Access((_GROUP_MEMBER, _each(_READ, _TOPIC, "topics"))),
    9: Access((_in_handler((_DESCRIBE, _GROUP), (_DESCRIBE, _TOPIC)),)),
    10: Access((_in_handler((_DESCRIBE, _GROUP), (_DESCRIBE, _TRANSACTION), (_CLUSTER_ACTION, _CLUSTER)),)),
    # join_group, heartbeat, leave_group, sync_group, describe_groups, list_groups
    11: Access((_GROUP_MEMBER,)),
    12: Access((_GROUP_MEMBER,)),
    13: Access((_GROUP_MEMBER,)),
    14: Access((_GROUP_MEMBER,)),
    15: Access((_each(_DESCRIBE, _GROUP, "groups", None),)),
    16: Access((_in_handler((_DESCRIBE, _CLUSTER), (_DESCRIBE, _GROUP)),)),
    # sasl_handshake, api_versions
    17: Access((), open_because="it is how a client says who it is"),
    18: Access((), open_because="clients send it before anything is known about them"),
    # create_topics, delete_topics, delete_records
    19: Access((_each(_CREATE, _TOPIC, "topics", unless=_CREATE),), changes=("topics",)),
    20: Access(
        (_in_handler((_DELETE, _CLUSTER), (_DELETE, _TOPIC), (_DESCRIBE, _TOPIC)),),
        changes=("topics", "topic_names"),
    ),
    21: Access((_each(_DELETE, _TOPIC, "topics"),), changes=("topics",)),
    # init_producer_id, offset_for_leader_epoch
    22: Access(
        (
            _in_handler(
                (_WRITE, _TRANSACTION),
                (Operation.TWO_PHASE_COMMIT, _TRANSACTION),
                (Operation.IDEMPOTENT_WRITE, _CLUSTER),
                (_WRITE, _TOPIC),
            ),
        )
    ),
    23: Access((_each(_DESCRIBE, _TOPIC, "topics", "topic", unless=_CLUSTER_ACTION),)),
    # add_partitions_to_txn, add_offsets_to_txn, end_txn, write_txn_markers, txn_offset_commit
    24: Access(
        (
            Whole((Need(_CLUSTER_ACTION, _CLUSTER),), _is_of_leader),
            Whole((Need(_WRITE, _TRANSACTION),), _is_of_client),
            _in_handler((_WRITE, _TOPIC)),
        )
    ),
    25: Access((_TRANSACTION_WRITER, _GROUP_MEMBER)),
    26: Access((_TRANSACTION_WRITER,)),
    27: Access((_cluster(_ALTER, _CLUSTER_ACTION),), changes=("markers",)),
    28: Access((_TRANSACTION_WRITER, _GROUP_MEMBER, _each(_READ, _TOPIC, "topics"))),
    # describe_acls, create_acls, delete_acls
    29: Access((_cluster(_DESCRIBE),)),
    30: Access((_cluster(_ALTER),), changes=("creations",)),
    31: Access((_cluster(_ALTER),), changes=("filters",)),
    # describe_configs, alter_configs, alter_replica_log_dirs, describe_log_dirs
    32: Access((_configs(_DESCRIBE_CONFIGS),)),
    33: Access((_configs(_ALTER_CONFIGS),), changes=("resources",)),
    34: Access((_cluster(_ALTER),), changes=("dirs",)),
    35: Access((_cluster(_DESCRIBE),)),
    # sasl_authenticate, create_, renew_, expire_, describe_delegation_token
    36: Access((), open_because="it is how a client says who it is"),
    38: Access((_in_handler((Operation.CREATE_TOKENS, ResourceType.USER)),)),
    39: Access((), open_because="the owner and the renewers of a token may renew it, which needs no rule"),
    40: Access((), open_because="the owner and the renewers of a token may end it, which needs no rule"),
    41: Access(
        (
            _in_handler(
                (_DESCRIBE, ResourceType.DELEGATION_TOKEN), (Operation.DESCRIBE_TOKENS, ResourceType.USER)
            ),
        )
    ),
    # create_partitions, delete_groups, elect_leaders, incremental_alter_configs
    37: Access((_each(_ALTER, _TOPIC, "topics"),), changes=("topics",)),
    42: Access((_each(_DELETE, _GROUP, "groups_names", None),), changes=("groups_names",)),
    43: Access((_cluster(_ALTER),), changes=("topic_partitions",)),
    44: Access((_configs(_ALTER_CONFIGS),), changes=("resources",)),
    # alter_partition_reassignments, list_partition_reassignments, offset_delete
    45: Access((_cluster(_ALTER),), changes=("topics",)),
    46: Access((_cluster(_DESCRIBE),)),
    47: Access((_whole(_DELETE, _GROUP, "group_id"), _each(_READ, _TOPIC, "topics")), changes=("group_id",)),
    # describe_client_quotas, alter_client_quotas
    48: Access((_cluster(_DESCRIBE_CONFIGS),)),
    49: Access((_cluster(_ALTER_CONFIGS),), changes=("entries",)),
    # describe_user_scram_credentials, alter_user_scram_credentials
    50: Access((_cluster(_DESCRIBE),)),
    51: Access((_cluster(_ALTER),), changes=("deletions", "upsertions")),
    # vote, begin_quorum_epoch, end_quorum_epoch, describe_quorum, alter_partition
    52: _BETWEEN_NODES,
    53: _BETWEEN_NODES,
    54: _BETWEEN_NODES,
    55: Access((_cluster(_DESCRIBE),)),
    56: _BETWEEN_NODES,
    # update_features, envelope, fetch_snapshot, describe_cluster, describe_producers
    57: Access((_cluster(_ALTER),), changes=("feature_updates",)),
    58: _BETWEEN_NODES,
    59: _BETWEEN_NODES,
    60: Access((), open_because="clients find brokers with it; only the authorized operations are checked"),
    61: Access((_each(_READ, _TOPIC, "topics"),)),
    # broker_registration, broker_heartbeat, unregister_broker
    62: _BETWEEN_NODES,
    63: _BETWEEN_NODES,
    64: Access((_cluster(_ALTER),), changes=("broker_id",)),
    # describe_transactions, list_transactions, allocate_producer_ids
    65: Access((_each(_DESCRIBE, _TRANSACTION, "transactional_ids", None), _in_handler((_DESCRIBE, _TOPIC)))),
    66: Access((_in_handler((_DESCRIBE, _TRANSACTION)),)),
    67: _BETWEEN_NODES,
    # consumer_group_heartbeat, consumer_group_describe
    68: Access((_GROUP_MEMBER, AllOf((Need(_DESCRIBE, _TOPIC),), _subscribed_topics))),
    69: Access((_each(_DESCRIBE, _GROUP, "group_ids", None), _in_handler((_DESCRIBE, _TOPIC)))),
    # get_telemetry_subscriptions, push_telemetry
    71: Access((), open_because="as in Apache Kafka, every client may report its metrics"),
    72: Access((), open_because="as in Apache Kafka, every client may report its metrics"),
    # assign_replicas_to_dirs, list_config_resources, describe_topic_partitions
    73: _BETWEEN_NODES,
    74: Access((_cluster(_DESCRIBE_CONFIGS),)),
    75: Access((_in_handler((_DESCRIBE, _TOPIC)),)),
    # share_group_heartbeat, share_group_describe, share_fetch, share_acknowledge
    76: Access((_GROUP_MEMBER, AllOf((Need(_DESCRIBE, _TOPIC),), _subscribed_topics))),
    77: Access((_each(_DESCRIBE, _GROUP, "group_ids", None), _in_handler((_DESCRIBE, _TOPIC)))),
    78: Access((_in_handler((_READ, _GROUP), (_READ, _TOPIC)),)),
    79: Access((_in_handler((_READ, _GROUP), (_READ, _TOPIC)),)),
    # add_raft_voter, remove_raft_voter, update_raft_voter
    80: Access((_cluster(_ALTER),), changes=("voter_id",)),
    81: Access((_cluster(_ALTER),), changes=("voter_id",)),
    82: _BETWEEN_NODES,
    # initialize_, read_, write_, delete_share_group_state, read_share_group_state_summary
    83: _BETWEEN_NODES,
    84: _BETWEEN_NODES,
    85: _BETWEEN_NODES,
    86: _BETWEEN_NODES,
    87: _BETWEEN_NODES,
    # streams_group_heartbeat, streams_group_describe
    88: Access(
        (
            _GROUP_MEMBER,
            AllOf((Need(_DESCRIBE, _TOPIC),), _topology_needs),
            _in_handler((_CREATE, _CLUSTER), (_CREATE, _TOPIC)),
        )
    ),
    89: Access((_each(_DESCRIBE, _GROUP, "group_ids", None), _in_handler((_DESCRIBE, _TOPIC)))),
    # describe_, alter_, delete_share_group_offsets
    90: Access((_in_handler((_DESCRIBE, _GROUP), (_DESCRIBE, _TOPIC)),)),
    91: Access((_GROUP_MEMBER, _each(_READ, _TOPIC, "topics", "topic_name")), changes=("group_id",)),
    92: Access(
        (_whole(_DELETE, _GROUP, "group_id"), _each(_READ, _TOPIC, "topics", "topic_name")),
        changes=("group_id",),
    ),
    # Our own: schedule, share_failures, tenant_usage, topic_drops
    30_000: Access((_in_handler((_CLUSTER_ACTION, _CLUSTER)),)),
    30_001: Access((_in_handler((_READ, _GROUP), (_READ, _TOPIC), (_CLUSTER_ACTION, _CLUSTER)),)),
    30_002: Access((_in_handler((_DESCRIBE, _CLUSTER), (_CLUSTER_ACTION, _CLUSTER)),)),
    30_003: Access((_in_handler((_DESCRIBE, _TOPIC), (_CLUSTER_ACTION, _CLUSTER)),)),
}


# -- the gate --------------------------------------------------------------------------------------------


def guarded(api_key: int, handle: Handler) -> Handler:
    """Return a handler that refuses what the client may not do, as the table says."""
    access = ACCESS.get(api_key)

    def checked(ctx: RequestContext, request: Any) -> Any:
        if ctx.authorizer is None:
            response = handle(ctx, request)
            return response if access is None else _audited(access, ctx, request, response, ())
        if access is None:
            return refusal(ctx, request, ErrorCode.cluster_authorization_failed)
        return ctx.in_slices(_enforce(access, handle, ctx, request))

    return checked


def _enforce(access: Access, handle: Handler, ctx: RequestContext, request: Any) -> Steps[Any]:
    refused: list[Any] = []
    is_exhausted = False
    for check in access.checks:
        if isinstance(check, Each):
            request, parts = yield from check.split(ctx, request)
            for part in parts:
                response = yield from _partial_refusal(ctx, *part)
                refused.append(response)
            is_exhausted = is_exhausted or (bool(parts) and not getattr(request, check.array))
        elif isinstance(check, InHandler):
            continue
        elif (yield from check.is_refused(ctx, request)):
            code = REFUSED[check.needs[-1].resource_type]
            return _told_once((yield from _refusal_in_steps(ctx, request, code)), ctx.api_key)
    if is_exhausted:
        return _joined(refused[0], refused[1:])
    response = handle(ctx, request)
    return _audited(access, ctx, request, response, refused)


def _audited(access: Access, ctx: RequestContext, request: Any, response: Any, refused: Sequence[Any]) -> Any:
    """Write what was changed to the audit trail; return the reply, or an awaitable of it, with what was refused."""
    if not refused and not access.changes:
        return response
    if inspect.isawaitable(response):
        return _finish_later(access, ctx, request, response, refused)
    return ctx.in_slices(_finish(access, ctx, request, response, refused))


async def _finish_later(
    access: Access, ctx: RequestContext, request: Any, response: Awaitable[Any], refused: Sequence[Any]
) -> Any:
    return await ctx.finish_in_slices(_finish(access, ctx, request, await response, refused))


def _finish(
    access: Access, ctx: RequestContext, request: Any, response: Any, refused: Sequence[Any]
) -> Steps[Any]:
    # Coordinators write markers for every transaction; those of an operator end a transaction by hand.
    if access.changes and not (ctx.api_key == _WRITE_TXN_MARKERS and _is_own_node(ctx)):
        yield from audit_request(ctx, request, access.changes, response)
    return _joined(response, refused)


def _is_own_node(ctx: RequestContext) -> bool:
    nodes = None if ctx.connection is None else ctx.connection.nodes
    return nodes is not None and nodes.names(ctx.principal) and not ctx.is_by_token


def refusal(ctx: RequestContext, request: Any, code: ErrorCode) -> Any:
    """Return the reply that refuses the whole request; close the connection if the reply has no field for errors.

    Raises ApiError for a request that was forwarded: its connection is that of the node that forwards it.
    """
    return finish(_refusal_in_steps(ctx, request, code))


def _refusal_in_steps(ctx: RequestContext, request: Any, code: ErrorCode) -> Steps[Any]:
    ctx.services.metrics.count_error("access", code.name)
    try:
        return (yield from error_response_in_steps(ctx.api_key, ctx.version, request, code))
    except NoErrorField:
        if APIS[ctx.api_key].relay:
            raise ApiError(code) from None
        if ctx.connection is not None:
            ctx.connection.close()
        return None


def _told_once(response: Any, api_key: int) -> Any:
    if api_key not in _TOLD_ONCE or getattr(response, "error_code", None) is None:
        return response
    arrays = {f.name: () for f in fields(response) if isinstance(getattr(response, f.name), tuple)}
    return replace(response, **arrays)


def _partial_refusal(ctx: RequestContext, request: Any, code: ErrorCode) -> Steps[Any]:
    """Return the reply to the refused part of a request, without a top-level error: the other part has none."""
    response = yield from _refusal_in_steps(ctx, request, code)
    top_level = {"error_code": ErrorCode.none, "error_message": None}
    known = {field.name for field in fields(response)}
    return replace(response, **{name: value for name, value in top_level.items() if name in known})


def _joined(response: Any, refused: Sequence[Any]) -> Any:
    """Return the reply with the elements of all replies."""
    if not refused:
        return response
    longer: dict[str, tuple[Any, ...]] = {}
    for part in refused:
        for field in fields(part):
            value = getattr(part, field.name)
            if isinstance(value, tuple) and value:
                longer[field.name] = longer.get(field.name, tuple(getattr(response, field.name))) + value
    return replace(response, **longer)


__all__ = ("ACCESS", "REFUSED", "Access", "Need", "guarded", "refusal", "topology_topics")
