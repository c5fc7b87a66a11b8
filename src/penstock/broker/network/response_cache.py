"""Answers about topics in the form in which they are sent, kept while what they say is unchanged.

Describing a topic and encoding that takes some 20 µs, so an answer about thousands of topics would hold the loop for
tens of milliseconds, for each client that refreshes its metadata. Here a topic is encoded once for each version and
listener, and again when it or the set of brokers changes; many topics are encoded in pieces, with the loop free in
between. An answer about all topics is kept whole until the image changes.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Iterable
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar
from uuid import UUID

from penstock.broker.routes import EncodedResponse, encode_body
from penstock.protocol.schemas import response_element_encoder
from penstock.protocol.writing import EncodedElements

if TYPE_CHECKING:
    from penstock.broker.node import Node
    from penstock.cluster.image import ClusterImage
    from penstock.cluster.state import TopicState

#: Forms in which topics are kept, and answers about all of them: the newest few that clients have asked for.
FORMS_MAX: Final = 8
ANSWERS_MAX: Final = 8
#: Partitions that are described before the loop gets to do something else.
_PIECE_PARTITIONS: Final = 50
#: Topics that are gone are kept until there are this many of them.
_GONE_MAX: Final = 100


class TopicForm(NamedTuple):
    """What an encoded topic depends on, besides the topic and the brokers."""

    api_key: int
    version: int
    listener: str
    operations: int


Describe = Callable[["TopicState"], Any]
Respond = Callable[[EncodedElements], Any]
#: Their ids, and whether clients of a listener can reach them.
Brokers = frozenset[tuple[int, bool]]
Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class EncodedTopics:
    """Topics in one form, while the brokers are the same."""

    def __init__(self, form: TopicForm, brokers: Brokers) -> None:
        self.brokers = brokers
        self._encode = response_element_encoder(form.api_key, form.version, "topics")
        self._kept: dict[UUID, tuple[TopicState, bytes]] = {}

    def encoded(self, topic: TopicState, describe: Describe) -> bytes:
        kept = self._kept.get(topic.id)
        if kept is not None and kept[0] is topic:
            return kept[1]
        data = self._encode(describe(topic))
        self._kept[topic.id] = (topic, data)
        return data

    def encode(self, described: Any) -> bytes:
        return self._encode(described)

    def missing_partitions(self, topics: Iterable[TopicState]) -> int:
        """Partitions that have to be described before these topics can be sent."""
        kept = self._kept
        return sum(
            len(topic.partitions)
            for topic in topics
            if (found := kept.get(topic.id)) is None or found[0] is not topic
        )

    def forget_deleted(self, image: ClusterImage) -> None:
        if len(self._kept) > len(image.topics) + _GONE_MAX:
            self._kept = {id: kept for id, kept in self._kept.items() if id in image.topics_by_id}


class TopicAnswers:
    def __init__(self, node: Node) -> None:
        self._node = node
        self._forms: OrderedDict[TopicForm, EncodedTopics] = OrderedDict()
        self._answers: OrderedDict[Hashable, tuple[ClusterImage, EncodedResponse]] = OrderedDict()
        self._under_way: dict[TopicForm, tuple[ClusterImage, asyncio.Task[None]]] = {}

    def topics(self, form: TopicForm) -> EncodedTopics:
        """For the present image; a topic that has not changed since an earlier one is the same object in both."""
        image = self._node.image
        brokers = frozenset(
            (broker.id, not broker.fenced and form.listener in broker.endpoints)
            for broker in image.brokers.values()
        )
        topics = _newest(self._forms, form)
        if topics is None or topics.brokers != brokers:
            topics = EncodedTopics(form, brokers)
            _keep(self._forms, form, topics, FORMS_MAX)
        return topics

    def all_encoded(self, form: TopicForm, describe: Describe) -> asyncio.Future[None] | None:
        """Encode all topics of the present image, in pieces; None where so few are missing that it is not worth it."""
        image = self._node.image
        under_way = self._under_way.get(form)
        if under_way is not None and under_way[0] is image:
            return asyncio.shield(under_way[1])
        topics = self.topics(form)
        if topics.missing_partitions(image.topics.values()) <= _PIECE_PARTITIONS:
            return None
        task = self._node.spawn(self._encode_in_pieces(form, topics, image, describe))
        self._under_way[form] = (image, task)
        return asyncio.shield(task)

    async def _encode_in_pieces(
        self, form: TopicForm, topics: EncodedTopics, image: ClusterImage, describe: Describe
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

    def about_all(
        self, form: TopicForm, key: Hashable, describe: Describe, respond: Respond
    ) -> EncodedResponse | Awaitable[EncodedResponse]:
        """The answer about every topic of the present image; `key` is what it depends on besides that and the form."""
        image = self._node.image
        kept = self._kept(form, key, image)
        if kept is not None:
            return kept
        topics, under_way = self.topics(form), self.all_encoded(form, describe)
        if under_way is None:
            return self._encode_answer(form, key, image, topics, describe, respond)

        async def later() -> EncodedResponse:
            await under_way
            return self._kept(form, key, image) or self._encode_answer(
                form, key, image, topics, describe, respond
            )

        return later()

    def _kept(self, form: TopicForm, key: Hashable, image: ClusterImage) -> EncodedResponse | None:
        kept = _newest(self._answers, (form, key))
        return kept[1] if kept is not None and kept[0] is image else None

    def _encode_answer(
        self,
        form: TopicForm,
        key: Hashable,
        image: ClusterImage,
        topics: EncodedTopics,
        describe: Describe,
        respond: Respond,
    ) -> EncodedResponse:
        pieces = [topics.encoded(topic, describe) for topic in image.topics.values()]
        body = encode_body(form.api_key, form.version, respond(EncodedElements(pieces)))
        answer = EncodedResponse(body)
        _keep(self._answers, (form, key), (image, answer), ANSWERS_MAX)
        return answer


def _newest(kept: OrderedDict[Key, Value], key: Key) -> Value | None:
    found = kept.get(key)
    if found is not None:
        kept.move_to_end(key)
    return found


def _keep(kept: OrderedDict[Key, Value], key: Key, value: Value, count_max: int) -> None:
    kept[key] = value
    kept.move_to_end(key)
    if len(kept) > count_max:
        kept.popitem(last=False)
