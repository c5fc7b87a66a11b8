"""Caches topic descriptions in encoded form, for Metadata and DescribeTopicPartitions.

To describe and encode one topic takes about 20 µs, so a response with thousands of topics would block the event loop
for tens of milliseconds, for each client that refreshes its metadata. The cache encodes a topic once for each version
and listener, and again when the topic or the set of brokers changes. It encodes many topics in chunks and yields to the
event loop in between. A response with all topics is kept whole until the image changes.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Iterable
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar
from uuid import UUID

from penstock.broker.network.apis import EncodedResponse, encode_response_body
from penstock.protocol.schemas import (
    EncodedElements,
    response_element_encoder,
    stepwise_response_element_encoder,
)
from penstock.protocol.steps import Steps

if TYPE_CHECKING:
    from penstock.broker.environment import ImageView, Tasks
    from penstock.cluster.image import ClusterImage, TopicState

#: How many encodings of topics, and how many responses with all topics, are cached: the ones requested last.
ENCODINGS_MAX: Final = 8
RESPONSES_MAX: Final = 8
#: Partitions that are described before the encoding yields to the event loop.
_PIECE_PARTITIONS: Final = 50
#: Deleted topics stay in the cache until there are this many of them.
_DELETED_TOPICS_MAX: Final = 100


class TopicEncoding(NamedTuple):
    """What the encoded form of a topic depends on, besides the topic and the brokers."""

    api_key: int
    version: int
    listener: str
    operations: int


DescribeTopic = Callable[["TopicState"], Any]
BuildResponse = Callable[[EncodedElements], Any]
#: The ids of the brokers, each with whether clients of a listener can reach it.
BrokerReachability = frozenset[tuple[int, bool]]
Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class EncodedTopics:
    """The cached topics of one encoding, valid while the brokers stay the same."""

    def __init__(self, form: TopicEncoding, brokers: BrokerReachability) -> None:
        self.brokers = brokers
        self._encode = response_element_encoder(form.api_key, form.version, "topics")
        self._encode_in_steps = stepwise_response_element_encoder(form.api_key, form.version, "topics")
        self._kept: dict[UUID, tuple[TopicState, bytes]] = {}

    def encoded(self, topic: TopicState, describe: DescribeTopic) -> bytes:
        kept = self._kept.get(topic.id)
        if kept is not None and kept[0] is topic:
            return kept[1]
        data = self._encode(describe(topic))
        self._kept[topic.id] = (topic, data)
        return data

    def encoded_in_steps(
        self, topic: TopicState, describe: Callable[[TopicState], Steps[Any]]
    ) -> Steps[bytes]:
        """The same for a topic that may have many partitions."""
        kept = self._kept.get(topic.id)
        if kept is not None and kept[0] is topic:
            return kept[1]
        data = yield from self.encode_in_steps((yield from describe(topic)))
        self._kept[topic.id] = (topic, data)
        return data

    def encode(self, described: Any) -> bytes:
        return self._encode(described)

    def encode_in_steps(self, described: Any) -> Steps[bytes]:
        return self._encode_in_steps(described)

    def missing_partitions(self, topics: Iterable[TopicState]) -> int:
        """Return how many partitions have to be described before these topics can be sent."""
        kept = self._kept
        return sum(
            len(topic.partitions)
            for topic in topics
            if (found := kept.get(topic.id)) is None or found[0] is not topic
        )

    def forget_deleted(self, image: ClusterImage) -> None:
        if len(self._kept) > len(image.topics) + _DELETED_TOPICS_MAX:
            self._kept = {id: kept for id, kept in self._kept.items() if id in image.topics_by_id}


class TopicResponseCache:
    def __init__(self, metadata: ImageView, tasks: Tasks) -> None:
        self._metadata = metadata
        self._tasks = tasks
        self._forms: OrderedDict[TopicEncoding, EncodedTopics] = OrderedDict()
        self._answers: OrderedDict[Hashable, tuple[ClusterImage, EncodedResponse]] = OrderedDict()
        self._under_way: dict[TopicEncoding, tuple[ClusterImage, asyncio.Task[None]]] = {}

    def topics(self, form: TopicEncoding, image: ClusterImage | None = None) -> EncodedTopics:
        """Return the cached topics for an image, by default the current one.

        The cache outlives an image, because a topic that did not change is the same object in both images.
        """
        image = image or self._metadata.image
        brokers = frozenset(
            (broker.id, not broker.fenced and form.listener in broker.endpoints)
            for broker in image.brokers.values()
        )
        topics = _lookup(self._forms, form)
        if topics is None or topics.brokers != brokers:
            topics = EncodedTopics(form, brokers)
            _store(self._forms, form, topics, ENCODINGS_MAX)
        return topics

    def encode_all_topics(self, form: TopicEncoding, describe: DescribeTopic) -> asyncio.Future[None] | None:
        """Encode all topics of the current image in chunks; return None if too few are missing to need chunks."""
        image = self._metadata.image
        under_way = self._under_way.get(form)
        if under_way is not None and under_way[0] is image:
            return asyncio.shield(under_way[1])
        topics = self.topics(form)
        if topics.missing_partitions(image.topics.values()) <= _PIECE_PARTITIONS:
            return None
        task = self._tasks.spawn(self._encode_in_pieces(form, topics, image, describe))
        self._under_way[form] = (image, task)
        return asyncio.shield(task)

    async def _encode_in_pieces(
        self, form: TopicEncoding, topics: EncodedTopics, image: ClusterImage, describe: DescribeTopic
    ) -> None:
        try:
            topics.forget_deleted(image)
            described = 0
            for topic in image.topics.values():
                described += topics.missing_partitions((topic,))
                topics.encoded(topic, describe)
                if described >= _PIECE_PARTITIONS:
                    described = 0
                    await asyncio.sleep(0)
        finally:
            under_way = self._under_way.get(form)
            if under_way is not None and under_way[0] is image:
                del self._under_way[form]

    def all_topics_response(
        self, form: TopicEncoding, key: Hashable, describe: DescribeTopic, respond: BuildResponse
    ) -> EncodedResponse | Awaitable[EncodedResponse]:
        """Return the response with all topics of the current image.

        `key` is what the response depends on besides the image and `form`.
        """
        image = self._metadata.image
        kept = self._kept(form, key, image)
        if kept is not None:
            return kept
        topics, under_way = self.topics(form), self.encode_all_topics(form, describe)
        if under_way is None:
            return self._encode_answer(form, key, image, topics, describe, respond)

        async def later() -> EncodedResponse:
            await under_way
            return self._kept(form, key, image) or self._encode_answer(
                form, key, image, topics, describe, respond
            )

        return later()

    def _kept(self, form: TopicEncoding, key: Hashable, image: ClusterImage) -> EncodedResponse | None:
        kept = _lookup(self._answers, (form, key))
        return kept[1] if kept is not None and kept[0] is image else None

    def _encode_answer(
        self,
        form: TopicEncoding,
        key: Hashable,
        image: ClusterImage,
        topics: EncodedTopics,
        describe: DescribeTopic,
        respond: BuildResponse,
    ) -> EncodedResponse:
        pieces = [topics.encoded(topic, describe) for topic in image.topics.values()]
        body = encode_response_body(form.api_key, form.version, respond(EncodedElements(pieces)))
        answer = EncodedResponse(body)
        _store(self._answers, (form, key), (image, answer), RESPONSES_MAX)
        return answer


def _lookup(kept: OrderedDict[Key, Value], key: Key) -> Value | None:
    found = kept.get(key)
    if found is not None:
        kept.move_to_end(key)
    return found


def _store(kept: OrderedDict[Key, Value], key: Key, value: Value, count_max: int) -> None:
    kept[key] = value
    kept.move_to_end(key)
    if len(kept) > count_max:
        kept.popitem(last=False)
