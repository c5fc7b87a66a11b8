"""Topic creation: any node can request it; the active controller decides, with its defaults and randomness."""

from __future__ import annotations

import logging
import random
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

from penstock.broker.config.effective_settings import effective_node_integer, node_layers
from penstock.cluster.controller.create_topics import (
    CreateTopicResult,
    NewTopic,
    Randomness,
    TopicDefaults,
    create_topics,
)
from penstock.cluster.topic_names import CLUSTER_METADATA, is_internal
from penstock.log.segment_files import open_files_limit
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.steps import finish

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from penstock.broker.config.node_settings import NodeSettings
    from penstock.broker.controller.channel import ControllerChannel
    from penstock.broker.environment import Tasks
    from penstock.broker.network.requests import RequestContext
    from penstock.broker.quorum.metadata_log import MetadataLog
    from penstock.log.checkpoints import TopicPartition

logger = logging.getLogger("penstock.topics")

CREATE_TOPICS: Final = 19
#: Topics that are auto-created at the same time; the creation of further ones starts when a client requests them again.
_AUTO_CREATED_AT_ONCE_MAX: Final = 10_000
#: Topics that could not be created whose reason is remembered.
_FAILURES_MAX: Final = 1_000
_PARTITIONS_PER_OPEN_FILE: Final = 20
_RANDOMNESS = Randomness(draw=random.randrange, fresh_id=uuid4)


class AutoTopicCreationManager:
    """Creates missing topics that clients request, in the background; at most one attempt per topic at a time."""

    def __init__(self, tasks: Tasks, creator: TopicCreator) -> None:
        self._tasks = tasks
        self._creator = creator
        self._in_flight: set[str] = set()
        #: Why the last attempt to create a topic failed, by its name.
        self._failures: OrderedDict[str, str] = OrderedDict()

    def failures(self, names: Iterable[str]) -> dict[str, str]:
        return {name: self._failures[name] for name in names if name in self._failures}

    def begin_for(self, ctx: RequestContext, topics: Iterable[NewTopic]) -> None:
        """Create topics as far as the controller_mutation_rate of the client allows.

        The others are begun when the client, which has to ask until its topic exists, asks again later. As the quota
        counts on the node that is asked, and not on the controller, a client may have this rate on every node.
        """
        wanted = [topic for topic in topics if topic.name not in self._in_flight]
        partitions = ctx.services.settings.integer("num.partitions")
        admitted = finish(
            ctx.services.quotas.admit(
                ctx, wanted, lambda topic: max(topic.partitions, 0) or partitions, strict_from=0
            )
        )
        self.begin(admitted.items)

    def begin_by_name(self, names: Iterable[str]) -> None:
        """Create topics with the cluster's defaults."""
        self.begin(NewTopic(name=name) for name in names)

    def begin(self, topics: Iterable[NewTopic]) -> None:
        room = _AUTO_CREATED_AT_ONCE_MAX - len(self._in_flight)
        wanted = [
            topic
            for topic in topics
            if not (
                topic.name in self._in_flight or is_internal(topic.name) or topic.name == CLUSTER_METADATA
            )
        ][:room]
        if wanted:
            self._in_flight.update(topic.name for topic in wanted)
            self._tasks.spawn(self._create(wanted))

    async def _create(self, topics: list[NewTopic]) -> None:
        names = [topic.name for topic in topics]
        try:
            results = await self._creator.create(topics)
        except ApiError as error:
            logger.info("topics not created", extra={"topics": names, "reason": str(error)})
        else:
            for result in results:
                self._note(result)
        finally:
            self._in_flight.difference_update(names)

    def _note(self, result: CreateTopicResult) -> None:
        self._failures.pop(result.name, None)
        if result.error not in (ErrorCode.none, ErrorCode.topic_already_exists):
            reason = result.message or result.error.name
            logger.warning("topic not created", extra={"topic": result.name, "reason": reason})
            self._failures[result.name] = reason
            if len(self._failures) > _FAILURES_MAX:
                self._failures.popitem(last=False)


class TopicCreator:
    """Creates topics from any node, and knows the bounds of what a broker may hold."""

    def __init__(
        self,
        settings: NodeSettings,
        metadata: MetadataLog,
        channel: ControllerChannel,
        *,
        refused_by_disk: Callable[[], Collection[TopicPartition]],
    ) -> None:
        """`refused_by_disk` returns this node's partitions that the disk has refused to create."""
        self._settings = settings
        self._metadata = metadata
        self._channel = channel
        self._refused_by_disk = refused_by_disk

    async def create(
        self, topics: Sequence[NewTopic], *, validate_only: bool = False
    ) -> tuple[CreateTopicResult, ...]:
        """Return once this node's image has the topics. Raises ApiError if nothing was decided."""
        if self._metadata.is_active:
            try:
                return await self.create_on_controller(topics, validate_only=validate_only)
            except ApiError as error:
                if error.code is not ErrorCode.not_controller:
                    raise
        response = await self._channel.call(CREATE_TOPICS, _create_topics_request(topics, validate_only))
        return tuple(_topic_result(topic) for topic in response.topics)

    async def create_on_controller(
        self, topics: Sequence[NewTopic], *, validate_only: bool = False
    ) -> tuple[CreateTopicResult, ...]:
        """Create topics on the active controller. Raises ApiError: NOT_CONTROLLER if this node is not active."""
        results = await self._metadata.propose(
            lambda image: create_topics(
                image, topics, rules=self._rules(), chance=_RANDOMNESS, validate_only=validate_only
            )
        )
        without_room = self.topics_refused_by_disk()
        return tuple(
            _with_disk_error(result) if result.name in without_room else result for result in results
        )

    def topics_refused_by_disk(self) -> set[str]:
        """Return the topics with a partition whose only replica is on this node, and which the disk refused."""
        image, node_id = self._metadata.image, self._settings.node_id
        refused = ((topic, image.partition(topic, index)) for topic, index in self._refused_by_disk())
        return {topic for topic, state in refused if state is not None and state.replicas == (node_id,)}

    def broker_replicas_max(self) -> int:
        """Return how many partitions a broker may have.

        Many share a descriptor, because an idle partition keeps no file open, and one in use keeps one or two.
        """
        configured = self._settings.integer("penstock.broker.partitions.max")
        return configured or _PARTITIONS_PER_OPEN_FILE * open_files_limit()

    def _rules(self) -> TopicDefaults:
        layers = node_layers(self._settings, self._metadata.image)
        return TopicDefaults(
            partitions=effective_node_integer(layers, "num.partitions"),
            replication_factor=effective_node_integer(layers, "default.replication.factor"),
            partitions_max=effective_node_integer(layers, "penstock.create.topics.partitions.max"),
            node=layers,
            broker_replicas_max=self.broker_replicas_max(),
        )


def _with_disk_error(result: CreateTopicResult) -> CreateTopicResult:
    """Report the disk error to the client, although the topic exists and the node retries to create the partition."""
    if result.error is not ErrorCode.none:
        return result
    message = "the topic was created, but the disk refuses its partitions; they follow once it does not"
    return result._replace(error=ErrorCode.kafka_storage_error, message=message)


def _create_topics_request(topics: Sequence[NewTopic], validate_only: bool) -> Any:
    from kio.schema.create_topics.v7 import request as schema

    return schema.CreateTopicsRequest(
        topics=tuple(
            schema.CreatableTopic(
                name=topic.name,
                num_partitions=topic.partitions,
                replication_factor=topic.replication_factor,
                assignments=tuple(
                    schema.CreatableReplicaAssignment(partition_index=index, broker_ids=replicas)
                    for index, replicas in topic.assignments
                ),
                configs=tuple(
                    schema.CreatableTopicConfig(name=name, value=value) for name, value in topic.configs
                ),
            )
            for topic in topics
        ),
        validate_only=validate_only,
    )


def _topic_result(topic: Any) -> CreateTopicResult:
    return CreateTopicResult(
        name=topic.name,
        error=topic.error_code,
        message=topic.error_message,
        topic_id=topic.topic_id,
        partitions=topic.num_partitions,
        replication_factor=topic.replication_factor,
    )
