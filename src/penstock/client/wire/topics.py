"""Topics made, grown, set and deleted; settings of topics and brokers read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from enum import IntEnum
from typing import Any, Final

from penstock.client.cluster import Cluster
from penstock.client.connection import Connection
from penstock.client.errors import Refused, Unavailable, check
from penstock.client.metadata import NO_LEADER, TopicInfo
from penstock.client.retrying import Deadline
from penstock.protocol.errors import ErrorCode
from penstock.protocol.schemas import schema_class

_DELETE_TOPICS: Final = 20
_STATES_FROM: Final = 6
#: Leaves the choice to the broker.
BROKER_DEFAULT: Final = -1


class Resource(IntEnum):
    """Whose settings, numbered as on the wire."""

    TOPIC = 2
    BROKER = 4


class _Change(IntEnum):
    SET = 0
    DELETE = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class NewTopic:
    name: str
    partitions: int = BROKER_DEFAULT
    replicas: int = BROKER_DEFAULT
    settings: Mapping[str, str] = field(default_factory=dict)
    #: Nodes of each partition, the first of which is to lead; instead of the two numbers.
    assignment: tuple[tuple[int, ...], ...] = ()


def create_topics(cluster: Cluster, topics: Iterable[NewTopic]) -> dict[str, TopicInfo]:
    """Returns when all of their partitions have leaders. Raises Refused (TOPIC_ALREADY_EXISTS), Unavailable."""
    wanted = tuple(topics)
    request = _create_request(cluster, wanted)

    def ask(connection: Connection) -> None:
        for each in connection.call(request).topics:
            check(each.error_code, f"topic {each.name}", getattr(each, "error_message", None))

    cluster.call_controller(ask)
    return _led(cluster, [topic.name for topic in wanted])


def ensure_topic(cluster: Cluster, topic: NewTopic) -> TopicInfo:
    """Make it where there is none; one that is there stays as it is. Raises Refused, Unavailable."""
    found = cluster.topics([topic.name]).get(topic.name)
    if found is not None:
        return found
    try:
        return create_topics(cluster, [topic])[topic.name]
    except Refused as error:
        if error.code is not ErrorCode.topic_already_exists:
            raise
        return cluster.await_topic(topic.name)


def _create_request(cluster: Cluster, topics: tuple[NewTopic, ...]) -> Any:
    module = "create_topics.v7.request"
    return schema_class(f"{module}:CreateTopicsRequest")(
        topics=tuple(_creatable(module, topic) for topic in topics),
        timeout=_timeout(cluster),
        validate_only=False,
    )


def _creatable(module: str, topic: NewTopic) -> Any:
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


def _led(cluster: Cluster, names: list[str]) -> dict[str, TopicInfo]:
    """Wait until these can be used."""
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

    def ask(connection: Connection) -> None:
        for each in connection.call(_delete_request(cluster, connection, wanted)).responses:
            check(each.error_code, f"topic {each.name}", getattr(each, "error_message", None))

    cluster.call_controller(ask)
    for name in wanted:
        cluster.forget_topic(name)


def _delete_request(cluster: Cluster, connection: Connection, names: tuple[str, ...]) -> Any:
    if connection.version(_DELETE_TOPICS, _STATES_FROM) < _STATES_FROM:
        request = schema_class("delete_topics.v5.request:DeleteTopicsRequest")
        return request(topic_names=names, timeout=_timeout(cluster))
    module = "delete_topics.v6.request"
    state = schema_class(f"{module}:DeleteTopicState")
    return schema_class(f"{module}:DeleteTopicsRequest")(
        topics=tuple(state(name=name, topic_id=None) for name in names), timeout=_timeout(cluster)
    )


def create_partitions(cluster: Cluster, topic: str, count: int) -> TopicInfo:
    """Grow a topic to `count` partitions. Raises Refused (INVALID_PARTITIONS), Unavailable."""
    module = "create_partitions.v3.request"
    wanted = schema_class(f"{module}:CreatePartitionsTopic")(name=topic, count=count, assignments=None)
    request = schema_class(f"{module}:CreatePartitionsRequest")(
        topics=(wanted,), timeout=_timeout(cluster), validate_only=False
    )

    def ask(connection: Connection) -> None:
        for each in connection.call(request).results:
            check(each.error_code, f"topic {topic}", each.error_message)

    cluster.call_controller(ask)
    deadline = Deadline(cluster.settings.retry_deadline_ms)
    for _ in cluster.attempts(deadline):
        found = _led(cluster, [topic])[topic]
        if len(found.partitions) >= count:
            return found
    raise Unavailable(f"{topic}: not {count} partitions within {deadline.timeout_ms / 1000:g} s")


# Settings


def topic_settings(cluster: Cluster, topic: str) -> dict[str, str | None]:
    """All of them, defaults included. Raises Refused, Unavailable."""
    return cluster.call_any(lambda connection: _settings(connection, Resource.TOPIC, topic, None))


def broker_settings(
    cluster: Cluster, node_id: int, names: Iterable[str] | None = None
) -> dict[str, str | None]:
    """Of one broker: these, or all. Raises Refused, Unavailable."""
    wanted = None if names is None else tuple(names)
    return cluster.call_node(
        node_id, lambda connection: _settings(connection, Resource.BROKER, str(node_id), wanted)
    )


def _settings(
    connection: Connection, kind: Resource, name: str, names: tuple[str, ...] | None
) -> dict[str, str | None]:
    module = "describe_configs.v4.request"
    resource = schema_class(f"{module}:DescribeConfigsResource")(
        resource_type=int(kind), resource_name=name, configuration_keys=names
    )
    request = schema_class(f"{module}:DescribeConfigsRequest")(
        resources=(resource,), include_synonyms=False, include_documentation=False
    )
    (answer,) = connection.call(request).results
    check(answer.error_code, f"settings of {kind.name.lower()} {name}", answer.error_message)
    return {str(each.name): each.value for each in answer.configs}


def alter_topic_settings(cluster: Cluster, topic: str, changes: Mapping[str, str | None]) -> None:
    """Set those with a value, and return those with None to their defaults. Raises Refused, Unavailable."""
    module = "incremental_alter_configs.v1.request"
    setting = schema_class(f"{module}:AlterableConfig")
    configs = tuple(
        setting(
            name=name, config_operation=int(_Change.DELETE if value is None else _Change.SET), value=value
        )
        for name, value in changes.items()
    )
    resource = schema_class(f"{module}:AlterConfigsResource")(
        resource_type=int(Resource.TOPIC), resource_name=topic, configs=configs
    )
    request = schema_class(f"{module}:IncrementalAlterConfigsRequest")(
        resources=(resource,), validate_only=False
    )

    def ask(connection: Connection) -> None:
        (answer,) = connection.call(request).responses
        check(answer.error_code, f"settings of topic {topic}", answer.error_message)

    cluster.call_controller(ask)


def _timeout(cluster: Cluster) -> timedelta:
    return timedelta(milliseconds=cluster.settings.request_timeout_ms)
