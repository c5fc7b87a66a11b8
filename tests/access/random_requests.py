"""Random requests, and what the model of the rules says to them: one entry for each API.

An entry draws a request and returns it with what the reply must show: for each part of the reply by its path of names
(the empty path is the reply as a whole) the refusals in it. What may be hidden must not be in the reply at all, and
what may be seen must be. Requests change nothing that later requests would see; where one may be allowed to delete
something, the caller makes it again (`Drawn.deletes`).
"""

from base64 import urlsafe_b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from datetime import timedelta
from random import Random
from typing import Any, NamedTuple
from uuid import UUID

from tests.access.matrix import LONG, Token, element, request_of, topology
from tests.access.model import Model

from penstock.protocol.acls import SUPPORTED_OPERATIONS, Operation, ResourceType
from penstock.protocol.errors import ErrorCode
from penstock.protocol.record_batch import TRANSACTIONAL, Record, encode_batch

OP, R = Operation, ResourceType
TOPICS = ("a", "ab", "abc", "b", "x.y")
#: Without committed offsets, which nodes delete some time after the topic.
DELETABLE = ("abcd", "x.yz")
MISSING = ("abd", "x.z")
GROUPS = ("a", "ab", "b", "x.y")
#: Those that have begun, and on which topics.
TRANSACTIONS = ("a", "ab", "x.y")
TRANSACTION_TOPICS = ("a", "x.y")
OTHER_TRANSACTIONS = ("abc", "abd", "b", "x.z")
#: The delegation tokens: the owner, and who may renew it.
TOKENS = (("User:alice", None), ("User:bob", None), ("User:carol", None), ("User:carol", "User:alice"))
NODE_ID = "1"

Refusals = Mapping[str, frozenset[str]]
_NONE: frozenset[str] = frozenset()
_NO_TIME = timedelta(0)
_NOT_ASKED = -(1 << 31)
_TOPIC = frozenset({"topic_authorization_failed"})
_GROUP = frozenset({"group_authorization_failed"})
_CLUSTER = frozenset({"cluster_authorization_failed"})
_TRANSACTION = frozenset({"transactional_id_authorization_failed"})
_TOKEN = frozenset({"delegation_token_authorization_failed"})
_MISMATCH = frozenset({"delegation_token_owner_mismatch"})


class World(NamedTuple):
    topic_ids: Mapping[str, UUID]
    tokens: Sequence[Token]


class Drawn(NamedTuple):
    request: Any
    expected: Refusals
    by_node: bool = False
    #: Whether parts without a refusal count. Not where the reply has other reasons to show or omit them.
    is_exact: bool = True
    deletes: bool = False


@dataclass
class Draw:
    random: Random
    model: Model
    world: World

    def names(self, pool: Sequence[str]) -> list[str]:
        return self.random.sample(pool, self.random.randint(1, len(pool)))

    def chance(self) -> bool:
        return self.random.random() < 0.5

    def may(self, operation: Operation, resource_type: ResourceType, *name: str) -> bool:
        return self.model.may(operation, resource_type, *name)

    def producer_id(self) -> int:
        """Return the id of a producer that does not exist."""
        return self.random.randrange(1 << 40, 1 << 41)

    def each(
        self, names: Iterable[str], operation: Operation, kind: ResourceType, error: frozenset[str]
    ) -> dict[str, frozenset[str]]:
        return {name: _NONE if self.may(operation, kind, name) else error for name in names}

    def shown(
        self, names: Iterable[str], operation: Operation, kind: ResourceType
    ) -> dict[str, frozenset[str]]:
        return {name: _NONE for name in names if self.may(operation, kind, name)}

    def operations(self, kind: ResourceType, *name: str) -> frozenset[str]:
        bits = sum(1 << each for each in SUPPORTED_OPERATIONS[kind] if self.may(each, kind, *name))
        return frozenset({f"operations {bits}"})


# -- replies ---------------------------------------------------------------------------------------------

_NAMES = ("name", "topic", "topic_name", "group_id", "transactional_id", "key", "resource_name", "token_id")
#: They have names that are no resources.
_SKIPPED = frozenset({"brokers", "configs", "nodes", "node_endpoints", "api_keys", "supported_features"})


def refusals_in(reply: Any, topic_names: Mapping[UUID, str]) -> Refusals:
    """Return the same for a reply. A topic that is known by its id alone has a `#` before its name."""
    found: dict[str, set[str]] = {"": set()}
    _walk(reply, "", topic_names, found)
    return {path: frozenset(codes) for path, codes in found.items()}


def _walk(entity: Any, path: str, topic_names: Mapping[UUID, str], found: dict[str, set[str]]) -> None:
    values = {field.name: getattr(entity, field.name) for field in fields(entity)}
    own = next((values[name] for name in _NAMES if values.get(name)), None)
    if own is None and values.get("topic_id") is not None:
        own = f"#{topic_names[values['topic_id']]}"
    if own is not None and "resource_type" in values:
        own = f"{values['resource_type']}:{own}"
    if own is not None:
        path = f"{path}/{own}" if path else own
        found.setdefault(path, set())
    for name, value in values.items():
        if name in _SKIPPED:
            continue
        if name.endswith("error_code"):
            code = ErrorCode(value).name
            if code.endswith(("authorization_failed", "owner_mismatch")):
                found[path].add(f"configs {code}" if "config" in name else code)
        elif name.endswith("authorized_operations") and value != _NOT_ASKED:
            found[path].add(f"operations {value}")
        elif isinstance(value, tuple):
            for each in value:
                if is_dataclass(each):
                    _walk(each, path, topic_names, found)


# -- the table -------------------------------------------------------------------------------------------

TABLE: dict[int, list[Callable[[Draw], Drawn | None]]] = {}
Entry = Callable[[Draw], Drawn | None]


def entry(*api_keys: int) -> Callable[[Entry], Entry]:
    def register(draw: Entry) -> Entry:
        for api_key in api_keys:
            TABLE.setdefault(api_key, []).append(draw)
        return draw

    return register


def share_key(group: str, topic_id: UUID) -> str:
    """Return the name by which the share coordinator of a partition is looked up."""
    return f"{group}:{urlsafe_b64encode(topic_id.bytes).decode().rstrip('=')}:0"


def of_cluster(api_key: int, *operations: Operation, by_node: bool = False, **values: Any) -> None:
    """The whole request needs one of the operations on the cluster."""

    def draw(d: Draw) -> Drawn:
        refused = _NONE if any(d.may(each, R.CLUSTER) for each in operations) else _CLUSTER
        return Drawn(request_of(api_key, **values), {"": refused}, by_node, is_exact=False)

    entry(api_key)(draw)


def of_topics(api_key: int, operation: Operation, array: str = "topics", **values: Any) -> None:
    """Each topic needs the operation; they are named."""

    def draw(d: Draw) -> Drawn:
        names = d.names(TOPICS + MISSING)
        label = "topic" if api_key == 23 else "name"
        topics = tuple(element(api_key, array, **{label: name}) for name in names)
        expected = d.each(names, operation, R.TOPIC, _TOPIC)
        if api_key == 23 and d.may(OP.CLUSTER_ACTION, R.CLUSTER):
            expected = dict.fromkeys(names, _NONE)
        return Drawn(request_of(api_key, **{array: topics}, **values), {"": _NONE, **expected})

    entry(api_key)(draw)


def of_group(api_key: int, **values: Any) -> None:
    """A request of a member."""

    def draw(d: Draw) -> Drawn:
        name = d.random.choice(GROUPS)
        refused = _NONE if d.may(OP.READ, R.GROUP, name) else _GROUP
        return Drawn(request_of(api_key, group_id=name, **values), {"": refused}, is_exact=False)

    entry(api_key)(draw)


def of_groups(api_key: int, array: str, operation: Operation, **values: Any) -> None:
    def draw(d: Draw) -> Drawn:
        names = d.names(GROUPS)
        expected = d.each(names, operation, R.GROUP, _GROUP)
        request = request_of(api_key, **{array: tuple(names)}, **values)
        return Drawn(request, {"": _NONE, **expected}, deletes=api_key == 42)

    entry(api_key)(draw)


def of_configs(api_key: int, operation: Operation) -> None:
    def draw(d: Draw) -> Drawn:
        expected: dict[str, frozenset[str]] = {"": _NONE}
        resources = []
        for kind, name in d.random.sample(_CONFIGS, 4):
            if kind == 2:
                refused = _NONE if d.may(operation, R.TOPIC, name) else _TOPIC
            elif kind == 32:
                refused = _NONE if d.may(operation, R.GROUP, name) else _GROUP
            else:
                refused = _NONE if d.may(operation, R.CLUSTER) else _CLUSTER
            expected[f"{kind}:{name}"] = refused
            nothing = {"configuration_keys": ()} if api_key == 32 else {"configs": ()}
            resources.append(element(api_key, "resources", resource_type=kind, resource_name=name, **nothing))
        options = {} if api_key == 32 else {"validate_only": True}
        return Drawn(request_of(api_key, resources=tuple(resources), **options), expected)

    entry(api_key)(draw)


_CONFIGS = (
    *((2, name) for name in TOPICS),
    *((32, name) for name in GROUPS),
    (4, NODE_ID),
    (16, "metrics"),
)


def _records(producer_id: int | None) -> bytes:
    record = Record(0, 1_700_000_000_000, None, b"x")
    if producer_id is None:
        return bytes(encode_batch([record]))
    producer = {"producer_id": producer_id, "producer_epoch": 0, "base_sequence": 0}
    return bytes(encode_batch([record], attributes=TRANSACTIONAL, **producer))


@entry(0)
def _produce(d: Draw) -> Drawn:
    transaction = d.random.choice((None, None, *TRANSACTIONS))
    by_id = d.chance()
    version, names = (13, d.names(TOPICS)) if by_id else (12, d.names(TOPICS + MISSING))
    topics = []
    for name in names:
        known = {"topic_id": d.world.topic_ids[name]} if by_id else {"name": name}
        records = _records(None if transaction is None else d.producer_id())
        part = element(0, "topic_data", "partition_data", version=version, index=0, records=records)
        topics.append(element(0, "topic_data", version=version, partition_data=(part,), **known))
    expected = d.each(names, OP.WRITE, R.TOPIC, _TOPIC)
    if transaction is not None and not d.may(OP.WRITE, R.TRANSACTIONAL_ID, transaction):
        expected = dict.fromkeys(names, _TRANSACTION)
    if by_id:
        expected = {f"#{name}": refused for name, refused in expected.items()}
    request = request_of(0, version, acks=1, transactional_id=transaction, topic_data=tuple(topics))
    return Drawn(request, {"": _NONE, **expected})


@entry(1)
def _fetch(d: Draw) -> Drawn:
    is_follower, by_id = d.random.random() < 0.2, d.chance()
    version, names = (17, d.names(TOPICS)) if by_id else (12, d.names(TOPICS + MISSING))
    key = "topic_id" if by_id else "topic"
    topics = tuple(
        element(1, "topics", version=version, **{key: d.world.topic_ids[name] if by_id else name})
        for name in names
    )
    values: dict[str, Any] = {}
    if is_follower and by_id:
        values["replica_state"] = element(
            1, "replica_state", version=version, replica_id=99, replica_epoch=-1
        )
    elif not by_id:
        values["replica_id"] = 99 if is_follower else -1
    request = request_of(
        1, version, topics=topics, session_epoch=-1, forgotten_topics_data=(), max_wait=_NO_TIME, **values
    )
    expected = d.each(names, OP.READ, R.TOPIC, _TOPIC)
    if is_follower:
        expected = dict.fromkeys(names, _NONE if d.may(OP.CLUSTER_ACTION, R.CLUSTER) else _TOPIC)
    if by_id:
        expected = {f"#{name}": refused for name, refused in expected.items()}
    return Drawn(request, {"": _NONE, **expected}, by_node=is_follower)


of_topics(2, OP.DESCRIBE, replica_id=-1)
of_topics(21, OP.DELETE)
of_topics(23, OP.DESCRIBE)
of_topics(37, OP.ALTER, validate_only=True)
of_topics(61, OP.READ)


@entry(3)
def _metadata(d: Draw) -> Drawn:
    names = d.names(TOPICS + MISSING)
    topics = tuple(element(3, "topics", name=name, topic_id=None) for name in names)
    request = request_of(
        3,
        topics=topics,
        allow_auto_topic_creation=False,
        include_topic_authorized_operations=False,
    )
    return Drawn(request, {"": _NONE, **d.each(names, OP.DESCRIBE, R.TOPIC, _TOPIC)})


@entry(3)
def _metadata_of_all(d: Draw) -> Drawn:
    with_operations = d.chance()
    shown = d.shown(d.world.topic_ids, OP.DESCRIBE, R.TOPIC)
    if with_operations:
        shown = {name: d.operations(R.TOPIC, name) for name in shown}
    request = request_of(3, topics=None, include_topic_authorized_operations=with_operations)
    return Drawn(request, {"": _NONE, **shown})


@entry(3)
def _metadata_of_missing(d: Draw) -> Drawn | None:
    """It would create the topic, so it is sent only if it must not."""
    name = d.random.choice(MISSING)
    if d.may(OP.CREATE, R.CLUSTER) or d.may(OP.CREATE, R.TOPIC, name):
        return None
    topics = (element(3, "topics", name=name, topic_id=None),)
    return Drawn(request_of(3, topics=topics, allow_auto_topic_creation=True), {"": _NONE, name: _TOPIC})


@entry(8)
def _offset_commit(d: Draw) -> Drawn:
    group, names = d.random.choice(GROUPS), d.names(TOPICS + MISSING)
    topics = tuple(element(8, "topics", version=9, name=name) for name in names)
    request = request_of(8, 9, group_id=group, topics=topics, generation_id_or_member_epoch=-1, member_id="")
    expected = d.each(names, OP.READ, R.TOPIC, _TOPIC)
    if not d.may(OP.READ, R.GROUP, group):
        expected = dict.fromkeys(names, _GROUP)
    return Drawn(request, {"": _NONE, **expected})


@entry(9)
def _offset_fetch(d: Draw) -> Drawn:
    expected: dict[str, frozenset[str]] = {"": _NONE}
    groups = []
    for group in d.names(GROUPS):
        is_all, names = d.chance(), d.names(TOPICS + MISSING)
        topics = tuple(
            element(9, "groups", "topics", version=9, name=name, partition_indexes=(0,)) for name in names
        )
        groups.append(element(9, "groups", version=9, group_id=group, topics=None if is_all else topics))
        expected[group] = _NONE if d.may(OP.DESCRIBE, R.GROUP, group) else _GROUP
        if expected[group] is _NONE:
            of_topics = d.shown(TOPICS, OP.DESCRIBE, R.TOPIC)
            if not is_all:
                of_topics = d.each(names, OP.DESCRIBE, R.TOPIC, _TOPIC)
            expected |= {f"{group}/{name}": refused for name, refused in of_topics.items()}
    return Drawn(request_of(9, 9, groups=tuple(groups)), expected)


@entry(10)
def _find_coordinator(d: Draw) -> Drawn:
    kind = d.random.randrange(3)
    names = d.names(GROUPS if kind != 1 else (*TRANSACTIONS, *OTHER_TRANSACTIONS))
    if kind == 0:
        expected = d.each(names, OP.DESCRIBE, R.GROUP, _GROUP)
    elif kind == 1:
        expected = d.each(names, OP.DESCRIBE, R.TRANSACTIONAL_ID, _TRANSACTION)
    else:
        names = [share_key(name, d.world.topic_ids["a"]) for name in names]
        expected = dict.fromkeys(names, _NONE if d.may(OP.CLUSTER_ACTION, R.CLUSTER) else _CLUSTER)
    return Drawn(request_of(10, key_type=kind, coordinator_keys=tuple(names)), expected, is_exact=False)


of_group(11)
of_group(12)
of_group(13)
of_group(14, protocol_type="consumer", protocol_name="range")
of_group(78, member_id="AAAAAAAAAAAAAAAAAAAAAQ", topics=(), forgotten_topics_data=())
of_group(79, member_id="AAAAAAAAAAAAAAAAAAAAAQ", topics=())
of_groups(42, "groups_names", OP.DELETE)
of_groups(69, "group_ids", OP.DESCRIBE)
of_groups(77, "group_ids", OP.DESCRIBE)
of_groups(89, "group_ids", OP.DESCRIBE)


@entry(15)
def _describe_groups(d: Draw) -> Drawn:
    names, with_operations = d.names(GROUPS), d.chance()
    expected = d.each(names, OP.DESCRIBE, R.GROUP, _GROUP)
    if with_operations:
        expected = {name: refused or d.operations(R.GROUP, name) for name, refused in expected.items()}
    request = request_of(15, groups=tuple(names), include_authorized_operations=with_operations)
    return Drawn(request, {"": _NONE, **expected})


@entry(16)
def _list_groups(d: Draw) -> Drawn:
    shown = d.shown(GROUPS, OP.DESCRIBE, R.GROUP)
    if d.may(OP.DESCRIBE, R.CLUSTER):
        shown = dict.fromkeys(GROUPS, _NONE)
    return Drawn(request_of(16, states_filter=(), types_filter=()), {"": _NONE, **shown})


@entry(19)
def _create_topics(d: Draw) -> Drawn:
    names = d.names(TOPICS + MISSING)
    topics = tuple(
        element(19, "topics", name=name, num_partitions=1, replication_factor=1, assignments=(), configs=())
        for name in names
    )
    expected = d.each(names, OP.CREATE, R.TOPIC, _TOPIC)
    if d.may(OP.CREATE, R.CLUSTER):
        expected = dict.fromkeys(names, _NONE)
    for name in MISSING:
        if expected.get(name) is _NONE and not d.may(OP.DESCRIBE_CONFIGS, R.TOPIC, name):
            expected[name] = frozenset({"configs topic_authorization_failed"})
    return Drawn(request_of(19, topics=topics, validate_only=True), {"": _NONE, **expected})


@entry(20)
def _delete_topics(d: Draw) -> Drawn:
    by_id = d.chance()

    def is_refused(name: str) -> bool:
        """By name DESCRIBE is needed too, and enough to be told that a topic does not exist."""
        if d.may(OP.DELETE, R.CLUSTER):
            return False
        if not by_id and not d.may(OP.DESCRIBE, R.TOPIC, name):
            return True
        return name not in MISSING and not d.may(OP.DELETE, R.TOPIC, name)

    names = [name for name in d.names(TOPICS) if is_refused(name)] + d.names(DELETABLE)
    expected: dict[str, frozenset[str]] = {"": _NONE}
    topics = []
    for name in names if by_id else (*names, *d.names(MISSING)):
        topic_id = d.world.topic_ids[name] if by_id else None
        topics.append(element(20, "topics", name=None if by_id else name, topic_id=topic_id))
        is_hidden = by_id and is_refused(name) and not d.may(OP.DESCRIBE, R.TOPIC, name)
        expected[f"#{name}" if is_hidden else name] = _TOPIC if is_refused(name) else _NONE
    return Drawn(request_of(20, topics=tuple(topics)), expected, deletes=True)


@entry(22)
def _init_producer_id(d: Draw) -> Drawn:
    name = d.random.choice((None, *TRANSACTIONS))
    if name is None:
        is_allowed = d.may(OP.IDEMPOTENT_WRITE, R.CLUSTER) or d.model.may_to_any(OP.WRITE, R.TOPIC)
        refused, producer = _NONE if is_allowed else _CLUSTER, {"producer_id": -1, "producer_epoch": -1}
    else:
        # Of another producer, so that it does not end the transaction.
        refused = _NONE if d.may(OP.WRITE, R.TRANSACTIONAL_ID, name) else _TRANSACTION
        producer = {"producer_id": d.producer_id(), "producer_epoch": 0}
    return Drawn(request_of(22, 5, transactional_id=name, **producer), {"": refused})


@entry(24)
def _add_partitions(d: Draw) -> Drawn:
    transaction, names = d.random.choice(OTHER_TRANSACTIONS), d.names(TOPICS + MISSING)
    expected = d.each(names, OP.WRITE, R.TOPIC, _TOPIC)
    if not d.may(OP.WRITE, R.TRANSACTIONAL_ID, transaction):
        expected = dict.fromkeys(names, _TRANSACTION)
    path = ("v3_and_below_topics",)
    request = request_of(
        24,
        3,
        v3_and_below_transactional_id=transaction,
        v3_and_below_producer_id=d.producer_id(),
        v3_and_below_topics=tuple(
            element(24, *path, version=3, name=name, partitions=(0,)) for name in names
        ),
    )
    return Drawn(request, {"": _NONE, **expected})


@entry(25)
def _add_offsets(d: Draw) -> Drawn:
    transaction, group = d.random.choice(OTHER_TRANSACTIONS), d.random.choice(GROUPS)
    refused = _NONE if d.may(OP.READ, R.GROUP, group) else _GROUP
    if not d.may(OP.WRITE, R.TRANSACTIONAL_ID, transaction):
        refused = _TRANSACTION
    request = request_of(25, transactional_id=transaction, group_id=group, producer_id=d.producer_id())
    return Drawn(request, {"": refused})


@entry(26)
def _end_transaction(d: Draw) -> Drawn:
    transaction = d.random.choice(OTHER_TRANSACTIONS)
    refused = _NONE if d.may(OP.WRITE, R.TRANSACTIONAL_ID, transaction) else _TRANSACTION
    return Drawn(request_of(26, transactional_id=transaction, producer_id=d.producer_id()), {"": refused})


@entry(28)
def _txn_offset_commit(d: Draw) -> Drawn:
    transaction, group, names = d.random.choice(OTHER_TRANSACTIONS), d.random.choice(GROUPS), d.names(TOPICS)
    expected = d.each(names, OP.READ, R.TOPIC, _TOPIC)
    if not d.may(OP.READ, R.GROUP, group):
        expected = dict.fromkeys(names, _GROUP)
    if not d.may(OP.WRITE, R.TRANSACTIONAL_ID, transaction):
        expected = dict.fromkeys(names, _TRANSACTION)
    request = request_of(
        28,
        transactional_id=transaction,
        group_id=group,
        producer_id=d.producer_id(),
        generation_id=5,
        topics=tuple(element(28, "topics", name=name) for name in names),
    )
    return Drawn(request, {"": _NONE, **expected})


@entry(27)
def _write_markers(d: Draw) -> Drawn:
    names = d.names(TOPICS)
    topics = tuple(element(27, "markers", "topics", name=name, partition_indexes=(99,)) for name in names)
    is_allowed = d.may(OP.ALTER, R.CLUSTER) or d.may(OP.CLUSTER_ACTION, R.CLUSTER)
    expected = dict.fromkeys(names, _NONE if is_allowed else _CLUSTER)
    request = request_of(27, markers=(element(27, "markers", topics=topics),))
    return Drawn(request, {"": _NONE, **expected}, by_node=True)


_NO_RULES = {
    "resource_type_filter": 1, "pattern_type_filter": 1, "resource_name_filter": None, "host_filter": None,
    "operation": 1, "permission_type": 1, "principal_filter": "User:nobody",
}  # fmt: skip
_RULE_OF_NOBODY = element(
    30, "creations", resource_type=R.USER, resource_name="User:nobody", principal="User:nobody", host="*",
    operation=OP.DESCRIBE_TOKENS, permission_type=3, resource_pattern_type=3,
)  # fmt: skip
_QUOTA = element(
    49,
    "entries",
    entity=(element(49, "entries", "entity", entity_type="user", entity_name="nobody"),),
    ops=(),
)
of_cluster(29, OP.DESCRIBE, **_NO_RULES)
of_cluster(30, OP.ALTER, creations=(_RULE_OF_NOBODY,))
of_cluster(31, OP.ALTER, filters=(element(31, "filters", **_NO_RULES | {"principal_filter": "User:none"}),))
of_configs(32, OP.DESCRIBE_CONFIGS)
of_configs(33, OP.ALTER_CONFIGS)
of_configs(44, OP.ALTER_CONFIGS)
of_cluster(35, OP.DESCRIBE)
of_cluster(43, OP.ALTER, topic_partitions=None)
of_cluster(45, OP.ALTER, topics=())
of_cluster(46, OP.DESCRIBE)
of_cluster(48, OP.DESCRIBE_CONFIGS, components=())
of_cluster(49, OP.ALTER_CONFIGS, entries=(_QUOTA,), validate_only=True)
of_cluster(50, OP.DESCRIBE, users=())
of_cluster(51, OP.ALTER, upsertions=(), deletions=(element(51, "deletions", name="nobody", mechanism=1),))
of_cluster(55, OP.DESCRIBE, topics=(element(55, "topics", topic_name="__cluster_metadata"),))
of_cluster(57, OP.ALTER, validate_only=True)
of_cluster(64, OP.ALTER, broker_id=99)
of_cluster(74, OP.DESCRIBE_CONFIGS, resource_types=())
of_cluster(81, OP.ALTER, voter_id=99)


@entry(34)
def _alter_log_dirs(d: Draw) -> Drawn:
    names = d.names(TOPICS)
    expected = dict.fromkeys(names, _NONE if d.may(OP.ALTER, R.CLUSTER) else _CLUSTER)
    topics = tuple(element(34, "dirs", "topics", name=name, partitions=(0,)) for name in names)
    return Drawn(request_of(34, dirs=(element(34, "dirs", topics=topics),)), {"": _NONE, **expected})


@entry(38)
def _create_token(d: Draw) -> Drawn:
    """Its renewer has a type that is refused, after the client's right."""
    owner = d.random.choice(("alice", "bob", "carol"))
    is_own = d.model.principal == f"User:{owner}"
    is_allowed = is_own or d.may(OP.CREATE_TOKENS, R.USER, f"User:{owner}")
    renewer = element(38, "renewers", principal_type="Group", principal_name="x")
    request = request_of(
        38, owner_principal_type="User", owner_principal_name=owner, renewers=(renewer,), max_lifetime=LONG
    )
    return Drawn(request, {"": _NONE if is_allowed else _TOKEN})


@entry(39, 40)
def _change_token(d: Draw) -> Drawn:
    number = d.random.randrange(len(TOKENS))
    refused = _NONE if d.model.principal in TOKENS[number] else _MISMATCH
    hmac = d.world.tokens[number].hmac
    if d.chance():
        return Drawn(request_of(39, hmac=hmac, renew_period=LONG), {"": refused})
    return Drawn(request_of(40, hmac=hmac, expiry_time_period=100 * LONG), {"": refused})


@entry(41)
def _describe_tokens(d: Draw) -> Drawn:
    asked = d.random.choice((None, "alice", "bob", "carol"))
    owners = asked and (element(41, "owners", principal_type="User", principal_name=asked),)
    shown = {
        token.id: _NONE
        for token, (owner, renewer) in zip(d.world.tokens, TOKENS, strict=True)
        if asked is None or f"User:{asked}" in (owner, renewer)
        if d.model.principal in (owner, renewer)
        or d.may(OP.DESCRIBE, R.DELEGATION_TOKEN, token.id)
        or d.may(OP.DESCRIBE_TOKENS, R.USER, owner)
    }
    return Drawn(request_of(41, owners=owners), {"": _NONE, **shown})


@entry(47)
def _offset_delete(d: Draw) -> Drawn:
    group, names = d.random.choice(GROUPS), d.names(TOPICS)
    topics = tuple(
        element(47, "topics", name=name, partitions=(element(47, "topics", "partitions"),)) for name in names
    )
    expected: dict[str, frozenset[str]] = {"": _NONE, **d.each(names, OP.READ, R.TOPIC, _TOPIC)}
    if not d.may(OP.DELETE, R.GROUP, group):
        expected = {"": _GROUP}
    return Drawn(request_of(47, group_id=group, topics=topics), expected, deletes=True)


@entry(60)
def _describe_cluster(d: Draw) -> Drawn:
    operations = d.operations(R.CLUSTER) if d.may(OP.DESCRIBE, R.CLUSTER) else frozenset({"operations 0"})
    request = request_of(60, include_cluster_authorized_operations=True, endpoint_type=1)
    return Drawn(request, {"": operations})


@entry(65)
def _describe_transactions(d: Draw) -> Drawn:
    names = d.names((*TRANSACTIONS, *OTHER_TRANSACTIONS))
    expected = d.each(names, OP.DESCRIBE, R.TRANSACTIONAL_ID, _TRANSACTION)
    for name in names:
        if name in TRANSACTIONS and expected[name] is _NONE:
            shown = d.shown(TRANSACTION_TOPICS, OP.DESCRIBE, R.TOPIC)
            expected |= {f"{name}/{topic}": _NONE for topic in shown}
    return Drawn(request_of(65, transactional_ids=tuple(names)), {"": _NONE, **expected})


@entry(66)
def _list_transactions(d: Draw) -> Drawn:
    shown = d.shown(TRANSACTIONS, OP.DESCRIBE, R.TRANSACTIONAL_ID)
    values = {"state_filters": (), "producer_id_filters": (), "duration_filter": -1}
    return Drawn(request_of(66, **values), {"": _NONE, **shown})


@entry(68, 76, 88)
def _heartbeat_with_topics(d: Draw) -> Drawn:
    api_key, group, names = d.random.choice((68, 76, 88)), d.random.choice(GROUPS), d.names(TOPICS + MISSING)
    refused = _NONE
    if not d.may(OP.READ, R.GROUP, group):
        refused = _GROUP
    elif not all(d.may(OP.DESCRIBE, R.TOPIC, name) for name in names):
        refused = _TOPIC
    topics = {"topology": topology(*names)} if api_key == 88 else {"subscribed_topic_names": tuple(names)}
    # No member joins.
    request = request_of(api_key, group_id=group, member_epoch=5, **topics)
    return Drawn(request, {"": refused}, is_exact=False)


@entry(75)
def _describe_topic_partitions(d: Draw) -> Drawn:
    names = d.names(TOPICS)
    expected = d.each(names, OP.DESCRIBE, R.TOPIC, _TOPIC)
    if is_all := d.chance():
        expected = d.shown(d.world.topic_ids, OP.DESCRIBE, R.TOPIC)
    expected = {name: refused or d.operations(R.TOPIC, name) for name, refused in expected.items()}
    topics = () if is_all else tuple(element(75, "topics", name=name) for name in names)
    return Drawn(request_of(75, topics=topics, response_partition_limit=2000), {"": _NONE, **expected})


@entry(83, 84, 85, 86, 87)
def _share_state(d: Draw) -> Drawn | None:
    """What writes is sent only if it must be refused."""
    names, api_key = d.names(TOPICS), d.random.choice((83, 84, 85, 86, 87))
    is_allowed = d.may(OP.CLUSTER_ACTION, R.CLUSTER)
    if is_allowed and api_key not in (84, 87):
        return None
    topics = tuple(element(api_key, "topics", topic_id=d.world.topic_ids[name]) for name in names)
    expected = dict.fromkeys((f"#{name}" for name in names), _NONE if is_allowed else _CLUSTER)
    request = request_of(api_key, group_id="a", topics=topics)
    return Drawn(request, expected, by_node=True, is_exact=False)


@entry(90)
def _describe_share_offsets(d: Draw) -> Drawn:
    names = d.names(GROUPS)
    groups = tuple(element(90, "groups", group_id=name, topics=None) for name in names)
    return Drawn(request_of(90, groups=groups), {"": _NONE, **d.each(names, OP.DESCRIBE, R.GROUP, _GROUP)})


@entry(91, 92)
def _change_share_offsets(d: Draw) -> Drawn:
    """Topics that it may read are not in the reply, because the groups are no share groups."""
    api_key, group, names = d.random.choice((91, 92)), d.random.choice(GROUPS), d.names(TOPICS)
    topics = tuple(element(api_key, "topics", topic_name=name) for name in names)
    expected: dict[str, frozenset[str]] = {"": _NONE, **d.each(names, OP.READ, R.TOPIC, _TOPIC)}
    if not d.may(OP.READ if api_key == 91 else OP.DELETE, R.GROUP, group):
        expected = {"": _GROUP}
    return Drawn(request_of(api_key, group_id=group, topics=topics), expected, is_exact=False)


def _between_nodes(api_key: int) -> None:
    """A node would act on it, so it is sent only if it must be refused."""

    def draw(d: Draw) -> Drawn | None:
        if d.may(OP.CLUSTER_ACTION, R.CLUSTER):
            return None
        request = request_of(api_key)
        expected = {"": _CLUSTER}
        return Drawn(request, expected, by_node=True, is_exact=False)

    entry(api_key)(draw)


for _key in (52, 53, 54, 56, 58, 59, 62, 63, 67, 73, 82):
    _between_nodes(_key)
for _key in (18, 71, 72):
    entry(_key)(lambda _, key=_key: Drawn(request_of(key), {}, is_exact=False))  # type: ignore[misc]
