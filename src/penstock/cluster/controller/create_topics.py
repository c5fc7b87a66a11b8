"""CreateTopics: checks names, counts, replicas and settings one topic at a time, and builds the records."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple
from uuid import UUID

from penstock.cluster.controller.decision import Decision
from penstock.cluster.controller.placement import (
    REPLICAS_UNLIMITED,
    Draw,
    ReplicaLimit,
    Replicas,
    assign_replicas,
    partition_records,
    refuse_bad_replicas,
)
from penstock.cluster.image import ClusterImage, ResourceType
from penstock.cluster.metadata_records import ConfigRecord, MetadataRecord, TopicRecord
from penstock.cluster.tenants import PartitionBudgets
from penstock.cluster.topic_names import CLUSTER_METADATA, collision_key, topic_name_error
from penstock.cluster.topic_settings import (
    ConfigLayer,
    EffectiveSetting,
    TopicSettingsCache,
    validate_topic_settings,
)
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.steps import Steps


class NewTopic(NamedTuple):
    """-1 partitions or replicas stands for the cluster's default; `assignments` are (partition, replicas)."""

    name: str
    partitions: int = -1
    replication_factor: int = -1
    assignments: tuple[tuple[int, Replicas], ...] = ()
    configs: tuple[tuple[str, str | None], ...] = ()


class TopicDefaults(NamedTuple):
    """The cluster's defaults for what a request leaves out, and the limits of one request."""

    partitions: int
    replication_factor: int
    partitions_max: int
    node: tuple[ConfigLayer, ...] = ()
    #: How many replicas one broker may have.
    broker_replicas_max: int = REPLICAS_UNLIMITED


class Randomness(NamedTuple):
    """The random choices, passed in so that a test can make them repeatable."""

    draw: Draw
    fresh_id: Callable[[], UUID]


class CreateTopicResult(NamedTuple):
    name: str
    error: ErrorCode = ErrorCode.none
    message: str | None = None
    topic_id: UUID | None = None
    partitions: int = -1
    replication_factor: int = -1
    settings: Mapping[str, EffectiveSetting] = MappingProxyType({})


def create_topics(
    image: ClusterImage,
    topics: Sequence[NewTopic],
    *,
    rules: TopicDefaults,
    chance: Randomness,
    validate_only: bool = False,
) -> Steps[Decision[tuple[CreateTopicResult, ...]]]:
    """One result per name, in request order. A topic that fails does not affect the others."""
    asked = Counter(topic.name for topic in topics)
    maker = _TopicBuilder(image, rules, chance)
    results: list[CreateTopicResult] = []
    for topic in {topic.name: topic for topic in topics}.values():
        if asked[topic.name] == 1:
            results.append((yield from maker.make(topic)))
        else:
            duplicate = ErrorCode.invalid_request
            results.append(
                CreateTopicResult(name=topic.name, error=duplicate, message="Duplicate topic name.")
            )
        yield
    return Decision(() if validate_only else tuple(maker.records), tuple(results))


class _TopicBuilder:
    """Collects the records of one request, and counts its partitions and replicas against the limits."""

    def __init__(self, image: ClusterImage, rules: TopicDefaults, chance: Randomness) -> None:
        self.records: list[MetadataRecord] = []
        self._image = image
        self._rules = rules
        self._chance = chance
        self._partitions = 0
        self._load = ReplicaLimit(image, rules.broker_replicas_max)
        self._budgets = PartitionBudgets(image)
        self._settings = TopicSettingsCache(rules.node)
        self._collisions: dict[str, str] = {}

    def make(self, topic: NewTopic) -> Steps[CreateTopicResult]:
        try:
            return (yield from self._make(topic))
        except ApiError as error:
            return CreateTopicResult(name=topic.name, error=error.code, message=error.message)

    def _make(self, topic: NewTopic) -> Steps[CreateTopicResult]:
        self._refuse_bad_name(topic.name)
        configs = _given_configs(topic.configs)
        validate_topic_settings(configs, self._rules.node)
        assignments = yield from self._assignments(topic)
        self._budgets.check(topic.name, len(assignments))
        self._load.add(assignments)
        self._budgets.take(topic.name, len(assignments))
        topic_id = self._chance.fresh_id()
        partitions = yield from partition_records(self._image, topic_id, assignments)
        # Partition records come last, so that a broker that opens the partitions knows their settings.
        self.records += (
            TopicRecord(name=topic.name, topic_id=topic_id),
            *(
                ConfigRecord(
                    resource_type=ResourceType.TOPIC, resource_name=topic.name, name=name, value=value
                )
                for name, value in configs.items()
            ),
            *partitions,
        )
        self._partitions += len(assignments)
        self._collisions[collision_key(topic.name)] = topic.name
        return CreateTopicResult(
            name=topic.name,
            topic_id=topic_id,
            partitions=len(assignments),
            replication_factor=len(assignments[0]),
            settings=self._settings.of(configs),
        )

    def _refuse_bad_name(self, name: str) -> None:
        if (flaw := topic_name_error(name)) is not None:
            raise ApiError(ErrorCode.invalid_topic_exception, flaw)
        if name == CLUSTER_METADATA:
            raise ApiError(ErrorCode.invalid_request, f"Creation of internal topic {name} is prohibited.")
        if name in self._image.topics:
            raise ApiError(ErrorCode.topic_already_exists, f"Topic '{name}' already exists.")
        alike = self._image.colliding_topic(name) or self._collisions.get(collision_key(name))
        if alike is not None:
            raise ApiError(
                ErrorCode.invalid_topic_exception, f"Topic '{name}' collides with existing topic: {alike}"
            )

    def _assignments(self, topic: NewTopic) -> Steps[list[Replicas]]:
        if topic.assignments:
            return (yield from self._manual_assignments(topic))
        if topic.replication_factor < -1 or topic.replication_factor == 0:
            raise ApiError(
                ErrorCode.invalid_replication_factor,
                "Replication factor must be larger than 0, or -1 to use the default value.",
            )
        if topic.partitions < -1 or topic.partitions == 0:
            raise ApiError(
                ErrorCode.invalid_partitions, "Number of partitions was set to an invalid non-positive value."
            )
        partitions = self._rules.partitions if topic.partitions == -1 else topic.partitions
        self._refuse_too_many(partitions)
        replication_factor = topic.replication_factor
        if replication_factor == -1:
            replication_factor = self._rules.replication_factor
        return (
            yield from assign_replicas(
                self._image,
                partitions=partitions,
                replication_factor=replication_factor,
                draw=self._chance.draw,
            )
        )

    def _manual_assignments(self, topic: NewTopic) -> Steps[list[Replicas]]:
        for given, what in (
            (topic.replication_factor, "replication factor"),
            (topic.partitions, "numPartitions"),
        ):
            if given != -1:
                raise ApiError(
                    ErrorCode.invalid_request,
                    f"A manual partition assignment was specified, but {what} was not set to -1.",
                )
        self._refuse_too_many(len(topic.assignments))
        by_partition: dict[int, Replicas] = {}
        for partition, replicas in topic.assignments:
            yield
            if partition in by_partition:
                raise ApiError(
                    ErrorCode.invalid_replica_assignment,
                    f"Found multiple manual partition assignments for partition {partition}",
                )
            first = next(iter(by_partition.values()), None)
            refuse_bad_replicas(self._image, replicas, None if first is None else len(first))
            by_partition[partition] = replicas
        if sorted(by_partition) != list(range(len(by_partition))):
            raise ApiError(
                ErrorCode.invalid_replica_assignment,
                "partitions should be a consecutive 0-based integer sequence",
            )
        return [by_partition[partition] for partition in range(len(by_partition))]

    def _refuse_too_many(self, partitions: int) -> None:
        if self._partitions + partitions > self._rules.partitions_max:
            raise ApiError(
                ErrorCode.policy_violation,
                f"One request may create at most {self._rules.partitions_max} partitions.",
            )


def _given_configs(configs: Iterable[tuple[str, str | None]]) -> dict[str, str]:
    given = dict(configs)
    nulls = [name for name, value in given.items() if value is None]
    if nulls:
        raise ApiError(
            ErrorCode.invalid_config, f"Null value not supported for topic configs: {','.join(nulls)}"
        )
    return {name: value for name, value in given.items() if value is not None}
