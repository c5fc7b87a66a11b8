"""Every API x {no rule, allowed, denied, prefix, wrong host, wrong type}: the requests, and what counts in the answers.

`acl_matrix.json` has the answers of Apache Kafka with its StandardAuthorizer (`python -m tests.access.kafka`).
Only authorization counts: which parts are refused, which names the reply shows, and which operations it lists.

The client is alice. There are three delegation tokens, which the matrix knows by names of its own (`TOKENS`), because a
broker chooses their ids; and a transaction that has begun.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin
from uuid import UUID

from kio.index import load_request_schema
from tests.compat.raw import Unreadable

from penstock.broker.network.apis import APIS
from penstock.protocol.acls import (
    CLUSTER_NAME,
    AclBinding,
    Operation,
    PatternType,
    Permission,
    ResourceType,
)
from penstock.protocol.errors import ErrorCode
from penstock.protocol.record_batch import TRANSACTIONAL, Record, encode_batch

OF_FOLLOWER = "of a follower"
TABLE = Path(__file__).with_name("acl_matrix.json")
CLIENT = "User:alice"
TOPIC, HIDDEN, NEW, GROUP, TRANSACTION = "m-topic", "m-hidden", "m-new", "m-group", "m-transaction"
#: A topic that a look-up of its metadata creates; it is deleted before the next case.
MADE = "m-made"
#: A transaction that has begun, on TOPIC, and does not end.
BEGUN = "m-begun"
OWNER = "User:m-owner"
MINE, THEIRS, RENEWED = "m-mine", "m-theirs", "m-renewed"
#: The delegation tokens: the owner, and who may renew it.
TOKENS: Mapping[str, tuple[str, str | None]] = {
    MINE: (CLIENT, None),
    THEIRS: (OWNER, None),
    RENEWED: (OWNER, CLIENT),
}
NAMES = frozenset({TOPIC, HIDDEN, GROUP, TRANSACTION, BEGUN, *TOKENS})
WRONG_HOST = "10.9.9.9"
MILLISECOND = timedelta(milliseconds=1)
#: No transaction and no token of the matrix ends before the matrix does.
LONG = timedelta(minutes=15)

Need = tuple[Operation, ResourceType, str]
#: Sends a request and returns the response; None if the connection was closed instead, and Unreadable where kio cannot
#: read a time in it.
Ask = Callable[[Any], Awaitable[Any]]

OP, R = Operation, ResourceType
READ_GROUP: Need = (OP.READ, R.GROUP, GROUP)
DESCRIBE_GROUP: Need = (OP.DESCRIBE, R.GROUP, GROUP)
DELETE_GROUP: Need = (OP.DELETE, R.GROUP, GROUP)
READ_TOPIC: Need = (OP.READ, R.TOPIC, TOPIC)
WRITE_TOPIC: Need = (OP.WRITE, R.TOPIC, TOPIC)
DESCRIBE_TOPIC: Need = (OP.DESCRIBE, R.TOPIC, TOPIC)
DELETE_TOPIC: Need = (OP.DELETE, R.TOPIC, TOPIC)
WRITE_TRANSACTION: Need = (OP.WRITE, R.TRANSACTIONAL_ID, TRANSACTION)
DESCRIBE_TRANSACTION: Need = (OP.DESCRIBE, R.TRANSACTIONAL_ID, TRANSACTION)
DESCRIBE_TOKEN: Need = (OP.DESCRIBE, R.DELEGATION_TOKEN, THEIRS)


def cluster(operation: Operation) -> Need:
    return operation, R.CLUSTER, CLUSTER_NAME


class Token(NamedTuple):
    id: str
    hmac: bytes


class World(NamedTuple):
    """What the requests are about, as the broker has named it."""

    topic_id: UUID
    tokens: Mapping[str, Token]

    def named(self, acl: AclBinding) -> AclBinding:
        """Return the rule with the id of a token, or the beginning of it, instead of its name in the matrix."""
        if acl.resource_type != R.DELEGATION_TOKEN:
            return acl
        if acl.pattern_type == PatternType.PREFIXED:
            return acl._replace(resource_name=self.tokens[THEIRS].id[: len(acl.resource_name)])
        return acl._replace(resource_name=self.tokens[acl.resource_name].id)


class Variant(NamedTuple):
    """One request, and what its client needs. `fields` replace what the builder would put into it."""

    api_key: int
    needs: tuple[Need, ...] = ()
    name: str = ""
    fields: dict[str, Any] = {}  # noqa: RUF012
    version: int | None = None

    @property
    def label(self) -> str:
        return f"{APIS[self.api_key].name}{f' ({self.name})' if self.name else ''}"

    @property
    def is_between_nodes(self) -> bool:
        """Whether Penstock serves the request on the listener for nodes only."""
        return self.name == OF_FOLLOWER or self._version >= APIS[self.api_key].inter_broker_from

    @property
    def _version(self) -> int:
        return APIS[self.api_key].max_version if self.version is None else self.version

    def request(self, world: World) -> Any:
        built = _built(load_request_schema(self.api_key, self._version), world.topic_id, self.fields)
        if "hmac" in self.fields:
            return replace(built, hmac=world.tokens[self.fields["hmac"]].hmac)
        if self.label == "delete_topics (by id)":
            return replace(built, topics=(element(20, "topics", name=None, topic_id=world.topic_id),))
        return built


def request_of(api_key: int, version: int | None = None, **values: Any) -> Any:
    """Build a request; what `values` leave out is as harmless as can be."""
    chosen = APIS[api_key].max_version if version is None else version
    return _built(load_request_schema(api_key, chosen), None, values)


def element(api_key: int, *path: str, version: int | None = None, **values: Any) -> Any:
    """Build an element of an array in a request; `path` leads to it."""
    schema: Any = load_request_schema(api_key, APIS[api_key].max_version if version is None else version)
    for name in path:
        (field,) = (field for field in fields(schema) if field.name == name)
        schema = _element_type(field.type)
    return _built(schema, None, values)


def commit_request() -> Any:
    """Build a commit of an offset, after which the group exists."""
    plain = {"generation_id_or_member_epoch": -1, "member_id": "", "group_instance_id": None}
    return request_of(8, 9, **plain)


def deletion_request() -> Any:
    return request_of(20, 5, topic_names=(MADE,))


def coordinator_request(key_type: int) -> Any:
    """Build a look-up of a coordinator, after which its topic exists."""
    keys = {"key_type": key_type, "coordinator_keys": (GROUP if key_type == 0 else TRANSACTION,)}
    return request_of(10, 4, **keys)


def transaction_request() -> Any:
    plain = {"transactional_id": BEGUN, "transaction_timeout": LONG, "producer_id": -1, "producer_epoch": -1}
    return request_of(22, 4, **plain)


def begin_request(producer_id: int, producer_epoch: int) -> Any:
    """Build a request after which the transaction has begun."""
    producer = {
        "v3_and_below_transactional_id": BEGUN,
        "v3_and_below_producer_id": producer_id,
        "v3_and_below_producer_epoch": producer_epoch,
    }
    return request_of(24, 3, **producer)


def token_request(owner: str | None, renewer: str | None = None) -> Any:
    return request_of(38, 3, **_token(owner, renewer))


def tokens_request() -> Any:
    return request_of(41, 3, owners=None)


def _token(owner: str | None, renewer: str | None = None) -> dict[str, Any]:
    kind, _, name = (None, "", None) if owner is None else owner.partition(":")
    renewers = () if renewer is None else (element(38, "renewers", **_principal(renewer)),)
    return {
        "owner_principal_type": kind,
        "owner_principal_name": name,
        "renewers": renewers,
        "max_lifetime": -MILLISECOND,
    }


def _principal(principal: str) -> dict[str, Any]:
    kind, _, name = principal.partition(":")
    return {"principal_type": kind, "principal_name": name}


def topology(*topics: str) -> Any:
    part = element(
        88, "topology", "subtopologies", source_topics=topics, repartition_sink_topics=(),
        source_topic_regex=(), state_changelog_topics=(), repartition_source_topics=(), copartition_groups=(),
    )  # fmt: skip
    return element(88, "topology", subtopologies=(part,))


def _resources(api_key: int, kind: int, name: str) -> dict[str, Any]:
    resource = element(api_key, "resources", resource_type=kind, resource_name=name)
    emptied = {f.name: () for f in fields(resource) if f.name in ("configs", "configuration_keys")}
    return {"resources": (replace(resource, **emptied),)}


def _records(attributes: int) -> bytes:
    record = Record(0, 1_700_000_000_000, None, b"x")
    if attributes:
        return bytes(
            encode_batch([record], attributes=attributes, producer_id=1, producer_epoch=0, base_sequence=0)
        )
    return bytes(encode_batch([record]))


def _produce(attributes: int) -> dict[str, Any]:
    part = element(0, "topic_data", "partition_data", index=0, records=_records(attributes), version=12)
    topic = element(0, "topic_data", name=TOPIC, partition_data=(part,), version=12)
    return {"acks": 1, "topic_data": (topic,), "transactional_id": TRANSACTION if attributes else None}


_CONFIGS = ((2, TOPIC, R.TOPIC, TOPIC), (32, GROUP, R.GROUP, GROUP), (4, "1", R.CLUSTER, CLUSTER_NAME))


def _variants() -> Iterator[Variant]:
    yield Variant(0, (WRITE_TOPIC,), "", _produce(0), version=12)
    yield Variant(0, (WRITE_TRANSACTION, WRITE_TOPIC), "transactional", _produce(TRANSACTIONAL), version=12)
    yield Variant(1, (READ_TOPIC,), "", {"forgotten_topics_data": (), "session_epoch": -1})
    yield Variant(1, (READ_TOPIC,), "by name", {"forgotten_topics_data": (), "session_epoch": -1}, version=12)
    follower = element(1, "replica_state", replica_id=99, replica_epoch=-1)
    followed = {"forgotten_topics_data": (), "session_epoch": -1, "replica_state": follower}
    yield Variant(1, (cluster(OP.CLUSTER_ACTION),), OF_FOLLOWER, followed)
    yield Variant(2, (DESCRIBE_TOPIC,), "", {"replica_id": -1})
    yield Variant(
        3, (DESCRIBE_TOPIC,), "by name", {"topics": (element(3, "topics", name=TOPIC, topic_id=None),)}
    )
    yield Variant(3, (DESCRIBE_TOPIC,), "by id")
    yield Variant(3, (DESCRIBE_TOPIC,), "all", {"topics": None, "include_topic_authorized_operations": True})
    missing = {"topics": (element(3, "topics", name=MADE, topic_id=None),), "allow_auto_topic_creation": True}
    yield Variant(3, ((OP.DESCRIBE, R.TOPIC, MADE), (OP.CREATE, R.TOPIC, MADE)), "missing", missing)
    yield Variant(8, (READ_GROUP, READ_TOPIC))
    yield Variant(8, (READ_GROUP, READ_TOPIC), "by name", version=9)
    yield Variant(9, (DESCRIBE_GROUP, DESCRIBE_TOPIC))
    yield Variant(
        9, (DESCRIBE_GROUP, DESCRIBE_TOPIC), "all", {"groups": (element(9, "groups", topics=None),)}
    )
    yield Variant(9, (DESCRIBE_GROUP,), "one group", version=7)
    yield Variant(10, (DESCRIBE_GROUP,), "group", {"key_type": 0, "coordinator_keys": (GROUP,)})
    yield Variant(
        10, (DESCRIBE_TRANSACTION,), "transaction", {"key_type": 1, "coordinator_keys": (TRANSACTION,)}
    )
    for key in (11, 12, 13):
        yield Variant(key, (READ_GROUP,))
    yield Variant(14, (READ_GROUP,), "", {"protocol_type": "consumer", "protocol_name": "range"})
    yield Variant(15, (DESCRIBE_GROUP,), "", {"include_authorized_operations": True})
    yield Variant(16, (DESCRIBE_GROUP,), "", {"states_filter": (), "types_filter": ()})
    yield Variant(16, (cluster(OP.DESCRIBE),), "of the cluster", {"states_filter": (), "types_filter": ()})
    yield Variant(18)
    new = element(19, "topics", name=NEW, num_partitions=1, replication_factor=1, assignments=(), configs=())
    creation = {"topics": (new,), "validate_only": True}
    yield Variant(19, ((OP.CREATE, R.TOPIC, NEW), (OP.DESCRIBE_CONFIGS, R.TOPIC, NEW)), "", creation)
    yield Variant(19, (cluster(OP.CREATE),), "on the cluster", creation)
    yield Variant(
        20,
        (DESCRIBE_TOPIC, DELETE_TOPIC),
        "by name",
        {"topics": (element(20, "topics", name=TOPIC, topic_id=None),)},
    )
    yield Variant(20, (DESCRIBE_TOPIC, DELETE_TOPIC), "by id", {"topics": ()})
    yield Variant(21, (DELETE_TOPIC,))
    yield Variant(22, (WRITE_TRANSACTION,), "transactional", {"producer_id": -1, "producer_epoch": -1}, 5)
    plain = {"transactional_id": None, "producer_id": -1, "producer_epoch": -1}
    yield Variant(22, (cluster(OP.IDEMPOTENT_WRITE),), "idempotent", plain, 5)
    yield Variant(22, (WRITE_TOPIC,), "of any topic", plain, 5)
    yield Variant(23, (DESCRIBE_TOPIC,))
    yield Variant(24, (WRITE_TRANSACTION, WRITE_TOPIC), "of a producer", version=3)
    yield Variant(24, (cluster(OP.CLUSTER_ACTION),))
    yield Variant(25, (WRITE_TRANSACTION, READ_GROUP))
    yield Variant(26, (WRITE_TRANSACTION,))
    yield Variant(27, (cluster(OP.ALTER),), "of an operator")
    yield Variant(27, (cluster(OP.CLUSTER_ACTION),))
    yield Variant(28, (WRITE_TRANSACTION, READ_GROUP, READ_TOPIC))
    anything = {
        "resource_type_filter": 1, "pattern_type_filter": 1, "resource_name_filter": None, "host_filter": None,
        "operation": 1, "permission_type": 1, "principal_filter": "User:nobody",
    }  # fmt: skip
    yield Variant(29, (cluster(OP.DESCRIBE),), "", anything)
    yield Variant(
        30,
        (cluster(OP.ALTER),),
        "",
        {
            "creations": (
                element(
                    30,
                    "creations",
                    resource_type=2,
                    principal="nobody",
                    operation=3,
                    permission_type=3,
                    resource_pattern_type=3,
                ),
            )
        },
    )
    yield Variant(31, (cluster(OP.ALTER),), "", {"filters": (element(31, "filters", **anything),)})
    for kind, name, resource_type, resource in _CONFIGS:
        what = resource_type.name.lower()
        yield Variant(32, ((OP.DESCRIBE_CONFIGS, resource_type, resource),), what, _resources(32, kind, name))
        for key in (33, 44):
            needs = ((OP.ALTER_CONFIGS, resource_type, resource),)
            yield Variant(key, needs, what, _resources(key, kind, name) | {"validate_only": True})
    yield Variant(34, (cluster(OP.ALTER),))
    yield Variant(35, (cluster(OP.DESCRIBE),))
    more = element(37, "topics", name=TOPIC, count=2, assignments=None)
    yield Variant(37, ((OP.ALTER, R.TOPIC, TOPIC),), "", {"validate_only": True, "topics": (more,)})
    yield Variant(38, (), "own", _token(None))
    yield Variant(38, ((OP.CREATE_TOKENS, R.USER, OWNER),), "of another", _token(OWNER))
    # No rule lets a client change a token: only its owner and those who may renew it do.
    for key, period in ((39, "renew_period"), (40, "expiry_time_period")):
        for name, token, needs in (
            ("own", MINE, ()),
            ("as renewer", RENEWED, ()),
            ("of another", THEIRS, (DESCRIBE_TOKEN,)),
        ):
            yield Variant(key, needs, name, {"hmac": token, period: LONG})
    owner = element(41, "owners", **_principal(OWNER))
    yield Variant(41, (), "own", {"owners": (element(41, "owners", **_principal(CLIENT)),)})
    yield Variant(41, (DESCRIBE_TOKEN,), "all", {"owners": None})
    yield Variant(41, (DESCRIBE_TOKEN,), "of another", {"owners": (owner,)})
    yield Variant(41, ((OP.DESCRIBE_TOKENS, R.USER, OWNER),), "of an owner", {"owners": (owner,)})
    yield Variant(42, (DELETE_GROUP,))
    yield Variant(43, (cluster(OP.ALTER),))
    unmoved = element(
        45, "topics", name=TOPIC, partitions=(element(45, "topics", "partitions", replicas=None),)
    )
    yield Variant(45, (cluster(OP.ALTER),), "", {"topics": (unmoved,)})
    yield Variant(46, (cluster(OP.DESCRIBE),))
    yield Variant(47, (DELETE_GROUP, READ_TOPIC))
    yield Variant(
        55, (cluster(OP.DESCRIBE),), "", {"topics": (element(55, "topics", topic_name="__cluster_metadata"),)}
    )
    yield Variant(57, (cluster(OP.ALTER),), "", {"validate_only": True})
    yield Variant(
        60, (cluster(OP.DESCRIBE),), "", {"include_cluster_authorized_operations": True, "endpoint_type": 1}
    )
    yield Variant(48, (cluster(OP.DESCRIBE_CONFIGS),), "", {"components": ()})
    user = element(49, "entries", "entity", entity_type="user", entity_name="nobody")
    quota = element(49, "entries", entity=(user,), ops=())
    yield Variant(49, (cluster(OP.ALTER_CONFIGS),), "", {"entries": (quota,), "validate_only": True})
    yield Variant(50, (cluster(OP.DESCRIBE),), "", {"users": ()})
    yield Variant(51, (cluster(OP.ALTER),), "", {"upsertions": ()})
    yield Variant(61, (READ_TOPIC,))
    yield Variant(64, (cluster(OP.ALTER),), "", {"broker_id": 99})
    begun = (OP.DESCRIBE, R.TRANSACTIONAL_ID, BEGUN)
    yield Variant(65, (begun, DESCRIBE_TOPIC), "", {"transactional_ids": (BEGUN,)})
    yield Variant(
        66,
        (DESCRIBE_TRANSACTION,),
        "",
        {"state_filters": (), "producer_id_filters": (), "duration_filter": -1},
    )
    # No member joins: what a group has would show in later answers.
    yield Variant(68, (READ_GROUP, DESCRIBE_TOPIC), "", {"member_epoch": 5})
    yield Variant(69, (DESCRIBE_GROUP,), "", {"include_authorized_operations": True})
    yield Variant(71)
    yield Variant(72)
    yield Variant(74, (cluster(OP.DESCRIBE_CONFIGS),), "", {"resource_types": ()})
    yield Variant(75, (DESCRIBE_TOPIC,), "by name", {"response_partition_limit": 10})
    yield Variant(75, (DESCRIBE_TOPIC,), "all", {"topics": (), "response_partition_limit": 1000})
    yield Variant(76, (READ_GROUP, DESCRIBE_TOPIC), "", {"member_epoch": 5})
    yield Variant(77, (DESCRIBE_GROUP,), "", {"include_authorized_operations": True})
    member: dict[str, Any] = {"member_id": "AAAAAAAAAAAAAAAAAAAAAQ", "forgotten_topics_data": ()}
    unread = element(
        78, "topics", partitions=(element(78, "topics", "partitions", acknowledgement_batches=()),)
    )
    member["topics"] = (unread,)
    yield Variant(78, (READ_GROUP, READ_TOPIC), "", {**member, "max_records": 1, "max_bytes": 1000})
    yield Variant(79, (READ_GROUP,), "", {"member_id": member["member_id"]})
    yield Variant(80, (cluster(OP.ALTER),), "", {"voter_id": 99})
    yield Variant(81, (cluster(OP.ALTER),), "", {"voter_id": 99})
    for key in (83, 84, 85, 86, 87):
        yield Variant(key, (cluster(OP.CLUSTER_ACTION),))
    yield Variant(88, (READ_GROUP, DESCRIBE_TOPIC), "", {"topology": topology(TOPIC), "member_epoch": 5})
    yield Variant(89, (DESCRIBE_GROUP,), "", {"include_authorized_operations": True})
    yield Variant(90, (DESCRIBE_GROUP, DESCRIBE_TOPIC))
    yield Variant(91, (READ_GROUP, READ_TOPIC))
    yield Variant(92, (DELETE_GROUP, READ_TOPIC))
    for key in sorted(BETWEEN_NODES):
        yield Variant(key, (cluster(OP.CLUSTER_ACTION),))


#: Sent to controllers. With CLUSTER_ACTION they are not sent, because a node would act on them.
BETWEEN_NODES = frozenset({52, 53, 54, 56, 58, 59, 62, 63, 67, 73, 82})
#: SaslHandshake and SaslAuthenticate: no rule can be about a client that has not said yet who it is.
NOT_PLAYED = frozenset({17, 36})


class Case(NamedTuple):
    variant: Variant
    name: str
    rules: tuple[AclBinding, ...]

    @property
    def label(self) -> str:
        return f"{self.variant.label}: {self.name}"

    @property
    def makes_topic(self) -> bool:
        """Whether MADE is created, some time after the answer."""
        return self.variant.name == "missing" and self.name.endswith(("allowed", "prefix"))


def cases_without_rules() -> Iterator[Case]:
    """For allow.everyone.if.no.acl.found, which lets everybody do what no rule is about."""
    return (
        Case(variant, "everyone allowed", ()) for variant in VARIANTS if variant.api_key not in BETWEEN_NODES
    )


def cases() -> Iterator[Case]:
    for variant in VARIANTS:
        yield Case(variant, "no rule", ())
        if variant.api_key not in BETWEEN_NODES:
            yield Case(variant, "allowed", tuple(map(rule, variant.needs)))
        for number, need in enumerate(variant.needs):
            others = [rule(each) for each in variant.needs if each != need]
            what = f"{need[0].name} on {need[1].name}"
            for name, rules in _modes(need):
                if name != "prefix" or variant.api_key not in BETWEEN_NODES:
                    yield Case(variant, f"{what} {name}", (*others, *rules))
            assert number < 4


def _modes(need: Need) -> Iterator[tuple[str, tuple[AclBinding, ...]]]:
    allowed = rule(need)
    yield "denied", (allowed, allowed._replace(permission=Permission.DENY))
    # There is only one name for the cluster, also in a prefix.
    prefix = need[2] if need[1] is R.CLUSTER else need[2][:3]
    yield "prefix", (allowed._replace(pattern_type=PatternType.PREFIXED, resource_name=prefix),)
    yield "wrong host", (allowed._replace(host=WRONG_HOST),)
    other = R.GROUP if need[1] is R.TOPIC else R.TOPIC
    yield "wrong type", (allowed._replace(resource_type=other),)


def rule(need: Need) -> AclBinding:
    operation, resource_type, name = need
    return AclBinding(resource_type, name, PatternType.LITERAL, CLIENT, "*", operation, Permission.ALLOW)


# -- answers ---------------------------------------------------------------------------------------------


def answer_of(response: Any, tokens: Mapping[str, Token]) -> dict[str, Any]:
    """Return what counts in a response; None stands for a closed connection."""
    names = {token.id: name for name, token in tokens.items()}
    if response is None:
        return {"closed": True}
    if isinstance(response, Unreadable):
        return {"refused": [f"error_code={response.error_code.name}"], "shown": []}
    refused: set[str] = set()
    shown: set[str] = set()
    operations: set[int] = set()
    for path, value in _walk(response):
        name = path.rpartition(".")[2]
        if name.endswith("error_code"):
            code = value if isinstance(value, ErrorCode) else ErrorCode(value)
            if code.name.endswith(("authorization_failed", "owner_mismatch")):
                refused.add(f"{path}={code.name}")
        elif name.endswith("authorized_operations"):
            operations.add(value)
        elif isinstance(value, str) and names.get(value, value) in NAMES:
            shown.add(names.get(value, value))
    found: dict[str, Any] = {"refused": sorted(refused), "shown": sorted(shown)}
    if operations - {-(1 << 31)}:
        found["operations"] = sorted(operations)
    return found


def _walk(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if is_dataclass(value):
        for field in fields(value):
            yield from _walk(getattr(value, field.name), f"{path}.{field.name}" if path else field.name)
    elif isinstance(value, tuple):
        for each in value:
            yield from _walk(each, path)
    else:
        yield path, value


def recorded() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(TABLE.read_text())
    return table


# -- requests --------------------------------------------------------------------------------------------

_TEXTS = {
    "group_id": GROUP,
    "transactional_id": TRANSACTION,
    "v3_and_below_transactional_id": TRANSACTION,
    "name": TOPIC,
    "topic": TOPIC,
    "topic_name": TOPIC,
    "resource_name": TOPIC,
    "principal": "User:nobody",
    "client_software_name": "matrix",
    "client_software_version": "1",
}
_LISTS = {
    "groups": GROUP,
    "group_ids": GROUP,
    "groups_names": GROUP,
    "transactional_ids": TRANSACTION,
    "subscribed_topic_names": TOPIC,
}


def _built(schema: Any, topic_id: UUID | None, given: dict[str, Any]) -> Any:
    values = {f.name: _value(f, topic_id) for f in fields(schema) if f.name not in given}
    known = {f.name for f in fields(schema)}
    built = schema(**values, **{name: value for name, value in given.items() if name in known})
    return _with_topic_id(built, topic_id) if topic_id is not None else built


def _with_topic_id(value: Any, topic_id: UUID) -> Any:
    """Put the topic's id where a part that was built before has none, and no name either."""
    changed: dict[str, Any] = {}
    for field in fields(value):
        inner = getattr(value, field.name)
        if field.name == "topic_id" and inner is None and getattr(value, "name", None) is None:
            changed[field.name] = topic_id
        elif isinstance(inner, tuple) and inner and is_dataclass(inner[0]):
            changed[field.name] = tuple(_with_topic_id(each, topic_id) for each in inner)
    return replace(value, **changed) if changed else value


def _value(field: Any, topic_id: UUID | None) -> Any:
    kind = field.metadata.get("kafka_type")
    is_optional = get_origin(field.type) in (UnionType, Union)
    found = _element_type(field.type)
    if found is not None and found is not _entity_type(field.type):
        if is_dataclass(found):
            return (_built(found, topic_id, {}),)
        if kind == "string":
            return (_LISTS[field.name],) if field.name in _LISTS else ()
        return (0,) if field.name in ("partitions", "partition_indexes") else ()
    if kind == "string":
        return _TEXTS.get(field.name, None if is_optional else "x")
    if kind == "uuid":
        return topic_id if field.name == "topic_id" else UUID(int=7)
    if field.default is not MISSING:
        return field.default
    if is_optional:
        return None
    if is_dataclass(field.type):
        return _built(field.type, topic_id, {})
    return _EMPTY.get(kind, 0)


_EMPTY: dict[str, Any] = {
    "bytes": b"",
    "records": None,
    "bool": False,
    "float64": 0.0,
    "timedelta_i32": 100 * MILLISECOND,
    "timedelta_i64": 100 * MILLISECOND,
    "datetime_i64": datetime(2023, 1, 1, tzinfo=UTC),
}


def _element_type(annotation: Any) -> Any:
    """Return the type of an array's elements, or an entity's own type; None for anything else."""
    annotation = _without_none(annotation)
    return get_args(annotation)[0] if get_origin(annotation) is tuple else _entity_type(annotation)


def _entity_type(annotation: Any) -> Any:
    annotation = _without_none(annotation)
    return annotation if is_dataclass(annotation) else None


def _without_none(annotation: Any) -> Any:
    if get_origin(annotation) not in (UnionType, Union):
        return annotation
    (annotation,) = (each for each in get_args(annotation) if each is not type(None))
    return annotation


async def play(
    ask: Callable[[Variant, Any], Awaitable[Any]],
    prepare: Callable[[Case], Awaitable[World]],
    wanted: Iterable[Case],
) -> dict[str, Any]:
    """Play the cases; `prepare` sets the rules and sees to it that what they are about exists."""
    answers: dict[str, Any] = {}
    for case in wanted:
        world = await prepare(case)
        response = await ask(case.variant, case.variant.request(world))
        answers[case.label] = answer_of(response, world.tokens)
    return answers


# -- what the requests are about -------------------------------------------------------------------------


async def set_up(admin: Ask) -> None:
    """See to it that there are coordinators, and a group with a committed offset."""
    while True:
        answer = await admin(commit_request())
        if answer.topics[0].partitions[0].error_code is ErrorCode.none:
            return
        for key_type in (0, 1):
            await admin(coordinator_request(key_type))
        await asyncio.sleep(0.05)


async def begin_transaction(admin: Ask) -> None:
    while True:
        producer = await admin(transaction_request())
        if producer.error_code is ErrorCode.none:
            answer = await admin(begin_request(producer.producer_id, producer.producer_epoch))
            (topic,) = answer.results_by_topic_v3_and_below
            if topic.results_by_partition[0].partition_error_code is ErrorCode.none:
                return
        await asyncio.sleep(0.05)


async def make_tokens(admin: Ask) -> dict[str, Token]:
    """The admin has logged in: without a name nobody may ask about tokens."""
    made = {}
    for name, (owner, renewer) in TOKENS.items():
        answer = await admin(token_request(owner, renewer))
        assert answer.error_code is ErrorCode.none, answer
        made[name] = Token(answer.token_id, answer.hmac)
    ids = {token.id for token in made.values()}
    while True:
        known = await admin(tokens_request())
        if ids <= {token.token_id for token in known.tokens}:
            return made
        await asyncio.sleep(0.05)


VARIANTS = tuple(_variants())
