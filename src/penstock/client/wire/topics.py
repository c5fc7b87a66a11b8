"""Creates, grows, configures and deletes topics; reads settings; checks the delivery contracts of topics.

The topic setting `penstock.delivery.contract` names the contract that a topic requires of its subscribers. Applications
and pipelines check it when they start. Brokers without this setting, such as Apache Kafka's, accept every contract.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from enum import IntEnum
from typing import Any, Final

from penstock.client.errors import ClientError, Refused, Unavailable, UnsupportedVersion, raise_for_error
from penstock.client.retry import Deadline
from penstock.client.wire.cluster import Cluster
from penstock.client.wire.connection import Connection
from penstock.client.wire.metadata import NO_LEADER, TopicInfo
from penstock.protocol.errors import ErrorCode
from penstock.protocol.schemas import schema_class

__all__ = (
    "CONTRACT_SETTING",
    "InsufficientContract",
    "check_topic_contracts",
    "satisfies_contract",
)


_DELETE_TOPICS: Final = 20
_TOPIC_STATES_VERSION: Final = 6
#: The broker uses its own default.
BROKER_DEFAULT: Final = -1


class ConfigResourceType(IntEnum):
    """Types of resources that have settings, numbered as on the wire."""

    TOPIC = 2
    BROKER = 4
    GROUP = 32
    TENANT = 64  # Penstock's own


class _ConfigOperation(IntEnum):
    SET = 0
    DELETE = 1


class ConfigSource(IntEnum):
    """Where the value of a setting comes from, numbered as on the wire; other numbers exist."""

    DYNAMIC_TOPIC = 1
    DYNAMIC_GROUP = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigEntry:
    value: str | None
    source: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NewTopic:
    name: str
    partitions: int = BROKER_DEFAULT
    replicas: int = BROKER_DEFAULT
    settings: Mapping[str, str] = field(default_factory=dict)
    #: The replicas of each partition, preferred leader first; replaces `partitions` and `replicas`.
    assignment: tuple[tuple[int, ...], ...] = ()


def create_topics(
    cluster: Cluster, topics: Iterable[NewTopic], *, validate_only: bool = False
) -> dict[str, TopicInfo]:
    """Returns when all of their partitions have leaders. Raises Refused (TOPIC_ALREADY_EXISTS), Unavailable.

    With `validate_only` the broker checks the request and creates nothing, and the result is empty.
    """
    wanted = tuple(topics)
    request = _create_request(cluster, wanted, validate_only)

    def call(connection: Connection) -> None:
        for each in connection.call(request).topics:
            raise_for_error(each.error_code, f"topic {each.name}", getattr(each, "error_message", None))

    cluster.call_controller(call)
    return {} if validate_only else _wait_for_leaders(cluster, [topic.name for topic in wanted])


def ensure_topic(cluster: Cluster, topic: NewTopic) -> TopicInfo:
    """Creates the topic if it is missing. Raises Refused, Unavailable."""
    found = cluster.topics([topic.name]).get(topic.name)
    if found is not None:
        return found
    try:
        return create_topics(cluster, [topic])[topic.name]
    except Refused as error:
        if error.code is not ErrorCode.topic_already_exists:
            raise
        return cluster.await_topic(topic.name)


def _create_request(cluster: Cluster, topics: tuple[NewTopic, ...], validate_only: bool) -> Any:
    module = "create_topics.v7.request"
    return schema_class(f"{module}:CreateTopicsRequest")(
        topics=tuple(_creatable_topic(module, topic) for topic in topics),
        timeout=_request_timeout(cluster),
        validate_only=validate_only,
    )


def _creatable_topic(module: str, topic: NewTopic) -> Any:
    assignment = schema_class(f"{module}:CreatableReplicaAssignment")
    setting = schema_class(f"{module}:CreatableTopicConfig")
    is_assigned = bool(topic.assignment)
    return schema_class(f"{module}:CreatableTopic")(
        name=topic.name,
        num_partitions=BROKER_DEFAULT if is_assigned else topic.partitions,
        replication_factor=BROKER_DEFAULT if is_assigned else topic.replicas,
        assignments=tuple(
            assignment(partition_index=index, broker_ids=nodes)
            for index, nodes in enumerate(topic.assignment)
        ),
        configs=tuple(setting(name=name, value=value) for name, value in topic.settings.items()),
    )


def _wait_for_leaders(cluster: Cluster, names: list[str]) -> dict[str, TopicInfo]:
    """Waits until all partitions have leaders."""
    deadline = Deadline(cluster.settings.retry_deadline_ms)
    for _ in cluster.attempts(deadline):
        found = cluster.topics(names)
        is_led = all(part.leader_id != NO_LEADER for topic in found.values() for part in topic.partitions)
        if len(found) == len(names) and is_led:
            return found
    raise Unavailable(f"{', '.join(names)}: no leaders within {deadline.timeout_ms / 1000:g} s")


def delete_topics(cluster: Cluster, names: Iterable[str]) -> None:
    """Raises Refused (UNKNOWN_TOPIC_OR_PARTITION), Unavailable."""
    wanted = tuple(names)

    def call(connection: Connection) -> None:
        for each in connection.call(_delete_request(cluster, connection, wanted)).responses:
            raise_for_error(each.error_code, f"topic {each.name}", getattr(each, "error_message", None))

    cluster.call_controller(call)
    for name in wanted:
        cluster.forget_topic(name)


def _delete_request(cluster: Cluster, connection: Connection, names: tuple[str, ...]) -> Any:
    if connection.version(_DELETE_TOPICS, _TOPIC_STATES_VERSION) < _TOPIC_STATES_VERSION:
        request = schema_class("delete_topics.v5.request:DeleteTopicsRequest")
        return request(topic_names=names, timeout=_request_timeout(cluster))
    module = "delete_topics.v6.request"
    state = schema_class(f"{module}:DeleteTopicState")
    return schema_class(f"{module}:DeleteTopicsRequest")(
        topics=tuple(state(name=name, topic_id=None) for name in names), timeout=_request_timeout(cluster)
    )


def create_partitions(cluster: Cluster, topic: str, count: int) -> TopicInfo:
    """Grows a topic to `count` partitions. Raises Refused (INVALID_PARTITIONS), Unavailable."""
    module = "create_partitions.v3.request"
    wanted = schema_class(f"{module}:CreatePartitionsTopic")(name=topic, count=count, assignments=None)
    request = schema_class(f"{module}:CreatePartitionsRequest")(
        topics=(wanted,), timeout=_request_timeout(cluster), validate_only=False
    )

    def call(connection: Connection) -> None:
        for each in connection.call(request).results:
            raise_for_error(each.error_code, f"topic {topic}", each.error_message)

    cluster.call_controller(call)
    deadline = Deadline(cluster.settings.retry_deadline_ms)
    for _ in cluster.attempts(deadline):
        found = _wait_for_leaders(cluster, [topic])[topic]
        if len(found.partitions) >= count:
            return found
    raise Unavailable(f"{topic}: fewer than {count} partitions after {deadline.timeout_ms / 1000:g} s")


# Settings


def topic_settings(cluster: Cluster, topic: str) -> dict[str, str | None]:
    """Returns all settings of a topic, with defaults. Raises Refused, Unavailable."""
    found = cluster.call_any(lambda connection: describe_configs(connection, ConfigResourceType.TOPIC, topic))
    return {name: entry.value for name, entry in found.items()}


def broker_settings(
    cluster: Cluster, node_id: int, names: Iterable[str] | None = None
) -> dict[str, str | None]:
    """Returns these settings of a broker, or all. Raises Refused, Unavailable."""
    wanted = None if names is None else tuple(names)
    found = cluster.call_node(
        node_id,
        lambda connection: describe_configs(connection, ConfigResourceType.BROKER, str(node_id), wanted),
    )
    return {name: entry.value for name, entry in found.items()}


def describe_configs(
    connection: Connection, kind: ConfigResourceType, name: str, names: tuple[str, ...] | None = None
) -> dict[str, ConfigEntry]:
    """Returns these settings of a resource, or all. Raises Refused, Unavailable."""
    (response,) = connection.call(_describe_configs_request(kind, (name,), names)).results
    raise_for_error(response.error_code, f"settings of {kind.name.lower()} {name}", response.error_message)
    return {
        str(each.name): ConfigEntry(value=each.value, source=int(getattr(each, "config_source", -1)))
        for each in response.configs
    }


def describe_config(
    connection: Connection, kind: ConfigResourceType, resources: Iterable[str], name: str
) -> dict[str, str | None]:
    """Returns one setting of many resources; skips those that the broker refuses to describe. Raises Unavailable."""
    response = connection.call(_describe_configs_request(kind, tuple(resources), (name,)))
    return {
        str(found.resource_name): each.value
        for found in response.results
        if found.error_code is ErrorCode.none
        for each in found.configs
        if each.name == name
    }


def _describe_configs_request(
    kind: ConfigResourceType, resources: tuple[str, ...], names: tuple[str, ...] | None
) -> Any:
    module = "describe_configs.v4.request"
    resource = schema_class(f"{module}:DescribeConfigsResource")
    return schema_class(f"{module}:DescribeConfigsRequest")(
        resources=tuple(
            resource(resource_type=int(kind), resource_name=each, configuration_keys=names)
            for each in resources
        ),
        include_synonyms=False,
        include_documentation=False,
    )


def alter_topic_settings(cluster: Cluster, topic: str, changes: Mapping[str, str | None]) -> None:
    """Sets settings; None resets a setting to its default. Raises Refused, Unavailable."""
    alter_configs(cluster, ConfigResourceType.TOPIC, topic, changes)


def alter_configs(
    cluster: Cluster,
    kind: ConfigResourceType,
    name: str,
    changes: Mapping[str, str | None],
    *,
    deadline: Deadline | None = None,
    dry_run: bool = False,
) -> None:
    """Sets settings of any resource, or only checks them; the empty name stands for all brokers.

    Raises Refused, Unavailable.
    """
    module = "incremental_alter_configs.v1.request"
    setting = schema_class(f"{module}:AlterableConfig")
    configs = tuple(
        setting(
            name=each,
            config_operation=int(_ConfigOperation.DELETE if value is None else _ConfigOperation.SET),
            value=value,
        )
        for each, value in changes.items()
    )
    resource = schema_class(f"{module}:AlterConfigsResource")(
        resource_type=int(kind), resource_name=name, configs=configs
    )
    request = schema_class(f"{module}:IncrementalAlterConfigsRequest")(
        resources=(resource,), validate_only=dry_run
    )

    def call(connection: Connection) -> None:
        (response,) = connection.call(request).responses
        raise_for_error(
            response.error_code, f"settings of {kind.name.lower()} {name}".rstrip(), response.error_message
        )

    cluster.call_controller(call, deadline=deadline)


def _request_timeout(cluster: Cluster) -> timedelta:
    return timedelta(milliseconds=cluster.settings.request_timeout_ms)


CONTRACT_SETTING: Final = "penstock.delivery.contract"
_NO_CONTRACT: Final = "none"
_AT_MOST_ONCE, _AT_LEAST_ONCE, _EFFECTIVELY_ONCE, _EXACTLY_ONCE = (
    "at-most-once",
    "at-least-once",
    "effectively-once",
    "exactly-once",
)
#: Which contracts satisfy each requirement. At-most-once loses and at-least-once repeats messages, so neither satisfies
#: the other.
_SATISFIED_BY: Final = {
    _AT_MOST_ONCE: (_AT_MOST_ONCE, _EFFECTIVELY_ONCE, _EXACTLY_ONCE),
    _AT_LEAST_ONCE: (_AT_LEAST_ONCE, _EFFECTIVELY_ONCE, _EXACTLY_ONCE),
    _EFFECTIVELY_ONCE: (_EFFECTIVELY_ONCE, _EXACTLY_ONCE),
    _EXACTLY_ONCE: (_EXACTLY_ONCE,),
}


class InsufficientContract(ClientError):
    """A subscription's contract does not satisfy the contract that its topic requires."""


def satisfies_contract(promised: str, required: str) -> bool:
    """Whether the promised contract satisfies the required one. Pure."""
    return required not in _SATISFIED_BY or promised in _SATISFIED_BY[required]


def check_topic_contracts(cluster: Cluster, topics: Iterable[str], promised: str, *, who: str) -> None:
    """Raises InsufficientContract, or Unavailable if no broker answers."""
    for topic in topics:
        try:
            required = topic_settings(cluster, topic).get(CONTRACT_SETTING) or _NO_CONTRACT
        except (Refused, UnsupportedVersion):
            continue  # the user may not have the right to describe configs
        if not satisfies_contract(promised, required):
            raise InsufficientContract(
                f"{who}: topic {topic} requires {required} ({CONTRACT_SETTING}), which {promised} does not satisfy; "
                f"subscribe with delivery={' or '.join(repr(each) for each in _SATISFIED_BY[required])}"
            )
