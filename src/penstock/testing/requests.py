"""A request on its way into an embedded broker, and what a fault may do with it."""

from __future__ import annotations

import struct
from dataclasses import replace
from time import perf_counter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, cast
from uuid import UUID

from penstock.broker.apis import APIS, PRODUCE
from penstock.broker.connection import Reply, Slot
from penstock.broker.refusals import METADATA, NoPlaceForError, refusal
from penstock.broker.topology import reachable_brokers
from penstock.protocol.errors import ErrorCode, MalformedFrame
from penstock.protocol.produce import skip_tags
from penstock.protocol.schemas import request_is_flexible, request_reader, schema_class

if TYPE_CHECKING:
    from penstock.broker.connection import Connection
    from penstock.broker.context import RequestContext
    from penstock.broker.dispatch import Dispatcher

_HEADER: Final = struct.Struct(">hhih")  # api key, version, correlation id, length of the client id
_NO_ID: Final = UUID(int=0)
_TOPIC_ARRAYS: Final = ("topics", "topic_data", "topic_names")


class FaultyRequest:
    """What `when` is asked about: `api`, `version`, `client_id`, `client_host`, `listener`, `topics`, `body`."""

    def __init__(
        self, context: RequestContext, connection: Connection, frame: memoryview, dispatcher: Dispatcher
    ) -> None:
        self.context = context
        self.connection = connection
        self.frame = frame
        self.dispatcher = dispatcher
        self._body: Any = None

    def __repr__(self) -> str:
        return f"<{self.api} v{self.version} from {self.client_id or self.client_host}>"

    @property
    def api(self) -> str:
        return APIS[self.context.api_key].name

    @property
    def version(self) -> int:
        return self.context.version

    @property
    def client_id(self) -> str | None:
        return self.context.client_id

    @property
    def client_host(self) -> str:
        return self.context.client_host

    @property
    def listener(self) -> str:
        return self.context.listener

    @property
    def body(self) -> Any:
        """The message itself, with the fields that Kafka's protocol gives it in this version."""
        if self._body is None:
            self._body = request_reader(self.context.api_key, self.version)(self.frame, self._body_position())
        return self._body

    @property
    def topics(self) -> frozenset[str]:
        """Names of the topics it asks for; empty for one that names none."""
        arrays = (getattr(self.body, name, None) or () for name in _TOPIC_ARRAYS)
        return frozenset(name for array in arrays for topic in array if (name := self._topic_name(topic)))

    def on_frame(self, frame: memoryview) -> FaultyRequest:
        return FaultyRequest(self.context, self.connection, frame, self.dispatcher)

    @property
    def correlation_id(self) -> int:
        return int(_HEADER.unpack_from(self.frame)[2])

    @property
    def position_after_client_id(self) -> int:
        return _HEADER.size + max(int(_HEADER.unpack_from(self.frame)[3]), 0)

    def _body_position(self) -> int:
        position = self.position_after_client_id
        if not request_is_flexible(self.context.api_key, self.version):
            return position
        try:
            return skip_tags(self.frame, position, len(self.frame))
        except IndexError:
            raise MalformedFrame("request header is cut short") from None

    def _topic_name(self, topic: Any) -> str | None:
        if isinstance(topic, str):
            return topic
        known = self.context.node.image.topics_by_id.get(getattr(topic, "topic_id", None) or _NO_ID)
        return known.name if known else getattr(topic, "name", None) or getattr(topic, "topic", None)


def serve(request: FaultyRequest) -> None:
    """Go on as if nothing had been in the way."""
    try:
        _serve_on(request, request.connection)
    except MalformedFrame as error:
        request.connection.server.refuse(request.connection, str(error))


def disown(request: FaultyRequest, error: ErrorCode) -> None:
    """Carry it out, and answer with an error all the same."""
    _serve_on(request, cast("Connection", _Silent(request.connection)))
    refuse(request, error)


def serve_unheard(request: FaultyRequest) -> None:
    """Carry it out; where its answer would be sent, the connection closes."""
    _serve_on(request, cast("Connection", _Unheard(request.connection)))


def _serve_on(request: FaultyRequest, connection: Connection) -> None:
    request.dispatcher.serve(
        request.context,
        connection,
        request.frame,
        request.position_after_client_id,
        request.correlation_id,
        perf_counter(),
    )


class _Unheard:
    """Stands for a connection towards the handlers, and never lets an answer through."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def send(self, reply: Reply) -> None:
        self._connection.abort()

    def defer(self, api_key: int) -> Slot:
        return Slot(api_key)

    def fulfil(self, slot: Slot, reply: Reply) -> None:
        self._connection.abort()


class _Silent(_Unheard):
    """The same, and the connection stays."""

    def send(self, reply: Reply) -> None:
        pass

    def fulfil(self, slot: Slot, reply: Reply) -> None:
        pass


def refuse(request: FaultyRequest, error: ErrorCode) -> None:
    """Answer with an error instead of carrying it out."""
    context, connection = request.context, request.connection
    if context.api_key == PRODUCE and request.body.acks == 0:
        connection.close()
        return
    try:
        response = (
            _metadata_refusal(request, error) if context.api_key == METADATA else _refusal(request, error)
        )
    except NoPlaceForError:
        connection.close()
        return
    answer = request.dispatcher.encode(context.api_key, context.version, request.correlation_id, response)
    connection.send(answer)


def _refusal(request: FaultyRequest, error: ErrorCode) -> Any:
    return refusal(request.context.api_key, request.version, request.body, error, _message(error))


def _metadata_refusal(request: FaultyRequest, error: ErrorCode) -> Any:
    """Clients take no metadata seriously that names no brokers; to ask for no topic is to ask for all."""
    image = request.context.node.image
    asked = request.body
    if not asked.topics:
        asked = SimpleNamespace(
            topics=[SimpleNamespace(name=t.name, topic_id=t.id) for t in image.topics.values()]
        )
    broker = schema_class("metadata.v13.response:MetadataResponseBroker")
    brokers = tuple(
        broker(node_id=each.id, host=at.host, port=at.port, rack=each.rack)
        for each, at in reachable_brokers(image, request.listener)
    )
    return replace(refusal(METADATA, request.version, asked, error, _message(error)), brokers=brokers)


def _message(error: ErrorCode) -> str:
    return f"{error.name}, injected by a test"
