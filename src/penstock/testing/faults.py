"""Faults to inject into an embedded broker: requests that are dropped, delayed, failed, or lose their reply.

>>> from penstock.testing import EmbeddedBroker, ErrorCode
>>> with EmbeddedBroker() as broker:
...     broker.faults.fail("produce", ErrorCode.not_leader_or_follower, times=2)
...     broker.faults.delay("fetch", seconds=0.5, when=lambda request: request.client_id == "slow")
...     with broker.faults.drop("heartbeat") as fault:
...         pass  # heartbeats of members are lost while this block runs
...     broker.faults.clear()
Fault(fail produce with not_leader_or_follower, 0 hits, 2 left)
Fault(delay fetch by 0.5 s, 0 hits)
"""

from __future__ import annotations

import asyncio
import struct
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from time import perf_counter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, cast
from uuid import UUID

from penstock.broker.network.apis import APIS, PRODUCE, Api
from penstock.broker.network.connection import PendingReply, Reply
from penstock.broker.network.error_responses import METADATA, NoErrorField, error_response
from penstock.broker.partition.client_view import reachable_brokers
from penstock.protocol.errors import ErrorCode, MalformedFrame
from penstock.protocol.schemas import request_is_flexible, request_reader, schema_class
from penstock.protocol.wire import skip_tags

if TYPE_CHECKING:
    from penstock.broker.network.connection import Connection
    from penstock.broker.network.dispatch import Dispatcher
    from penstock.broker.network.requests import RequestContext


_REQUEST_HEADER: Final = struct.Struct(">hhih")  # api key, version, correlation id, length of the client id
_NO_TOPIC_ID: Final = UUID(int=0)
_TOPIC_FIELDS: Final = ("topics", "topic_data", "topic_names")


class FaultyRequest:
    """The argument of `when`: `api`, `version`, `client_id`, `client_host`, `listener`, `topics`, `body`."""

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
        """The decoded request, with the fields that Kafka's protocol gives it in this version."""
        if self._body is None:
            self._body = request_reader(self.context.api_key, self.version)(self.frame, self._body_position())
        return self._body

    @property
    def topics(self) -> frozenset[str]:
        """Names of the topics in the request; empty if it names none."""
        arrays = (getattr(self.body, name, None) or () for name in _TOPIC_FIELDS)
        return frozenset(name for array in arrays for topic in array if (name := self._topic_name(topic)))

    def on_frame(self, frame: memoryview) -> FaultyRequest:
        return FaultyRequest(self.context, self.connection, frame, self.dispatcher)

    @property
    def correlation_id(self) -> int:
        return int(_REQUEST_HEADER.unpack_from(self.frame)[2])

    @property
    def position_after_client_id(self) -> int:
        return _REQUEST_HEADER.size + max(int(_REQUEST_HEADER.unpack_from(self.frame)[3]), 0)

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
        known = self.context.services.image.topics_by_id.get(getattr(topic, "topic_id", None) or _NO_TOPIC_ID)
        return known.name if known else getattr(topic, "name", None) or getattr(topic, "topic", None)


def serve_request(request: FaultyRequest) -> None:
    """Serves the request normally."""
    try:
        _dispatch(request, request.connection)
    except MalformedFrame as error:
        request.connection.server.refuse(request.connection, str(error))


def serve_but_reply_error(request: FaultyRequest, error: ErrorCode) -> None:
    """Carries the request out, but replies with an error."""
    _dispatch(request, cast("Connection", _SilentConnection(request.connection)))
    reply_error(request, error)


def serve_and_disconnect(request: FaultyRequest) -> None:
    """Carries the request out, but closes the connection instead of sending the reply."""
    _dispatch(request, cast("Connection", _AbortingConnection(request.connection)))


def _dispatch(request: FaultyRequest, connection: Connection) -> None:
    request.dispatcher.serve(
        request.context,
        connection,
        request.frame,
        request.position_after_client_id,
        request.correlation_id,
        perf_counter(),
    )


class _AbortingConnection:
    """Handlers get it instead of the connection; it closes the real connection when they send a reply."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def send(self, reply: Reply) -> None:
        self._connection.abort()

    def defer(self, api_key: int) -> PendingReply:
        return PendingReply(api_key)

    def fulfil(self, slot: PendingReply, reply: Reply) -> None:
        self._connection.abort()


class _SilentConnection(_AbortingConnection):
    """Drops the reply, but keeps the connection."""

    def send(self, reply: Reply) -> None:
        pass

    def fulfil(self, slot: PendingReply, reply: Reply) -> None:
        pass


def reply_error(request: FaultyRequest, error: ErrorCode) -> None:
    """Replies with an error instead of carrying the request out."""
    context, connection = request.context, request.connection
    if context.api_key == PRODUCE and request.body.acks == 0:
        connection.close()
        return
    try:
        response = (
            _metadata_error_response(request, error)
            if context.api_key == METADATA
            else error_response(context.api_key, request.version, request.body, error, _error_message(error))
        )
    except NoErrorField:
        connection.close()
        return
    answer = request.dispatcher.encode(context.api_key, context.version, request.correlation_id, response)
    connection.send(answer)


def _metadata_error_response(request: FaultyRequest, error: ErrorCode) -> Any:
    """Lists the brokers, because clients ignore metadata without any. A request without topics asks for all topics."""
    image = request.context.services.image
    wanted = request.body
    if not wanted.topics:
        wanted = SimpleNamespace(
            topics=[SimpleNamespace(name=t.name, topic_id=t.id) for t in image.topics.values()]
        )
    broker = schema_class("metadata.v13.response:MetadataResponseBroker")
    brokers = tuple(
        broker(node_id=each.id, host=at.host, port=at.port, rack=each.rack)
        for each, at in reachable_brokers(image, request.listener)
    )
    return replace(
        error_response(METADATA, request.version, wanted, error, _error_message(error)), brokers=brokers
    )


def _error_message(error: ErrorCode) -> str:
    return f"{error.name}, injected by a test"


FaultCondition = Callable[[FaultyRequest], bool]
#: What a fault does to a request; the hook can hold the request back.
FaultAction = Callable[["FaultHook", FaultyRequest], None]


class Fault:
    """One injected fault. It ends after `times` hits, by `remove`, or with its `with` block."""

    def __init__(
        self,
        faults: Faults,
        what: str,
        api: Api,
        act: FaultAction,
        times: int | None,
        when: FaultCondition | None,
    ) -> None:
        if times is not None and times < 1:
            raise ValueError(f"times must be at least 1, or None for no limit, not {times}")
        self.hits = 0
        self._faults = faults
        self._what = what
        self._api_key = api.key
        self._act = act
        self._left = times
        self._when = when

    def __repr__(self) -> str:
        left = "" if self._left is None else f", {self._left} left"
        return f"Fault({self._what}, {self.hits} hits{left})"

    def __enter__(self) -> Fault:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    @property
    def is_spent(self) -> bool:
        return self._left == 0

    def remove(self) -> None:
        self._faults._remove(self)

    def _matches(self, request: FaultyRequest) -> bool:
        return request.context.api_key == self._api_key and (self._when is None or self._when(request))

    def _count(self) -> None:
        self.hits += 1
        if self._left is not None:
            self._left -= 1


class Faults:
    """The faults of one broker; they survive its restarts. Usable from any thread.

    `api` is the name of a request: "produce", "OffsetCommit", "find_coordinator". `times` bounds how many requests
    the fault hits. `when` selects requests (see FaultyRequest); it runs in the broker's thread and must be
    quick. If several faults match a request, the one added first is applied.
    """

    def __init__(self) -> None:
        self._active: list[Fault] = []
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<Faults {self._active}>"

    def drop(self, api: str, *, times: int | None = None, when: FaultCondition | None = None) -> Fault:
        """Discards the request and closes the connection: it has no effect, and the client gets no reply."""
        return self._add("drop", api, lambda _, request: request.connection.abort(), times, when)

    def lose_answer(self, api: str, *, times: int | None = None, when: FaultCondition | None = None) -> Fault:
        """Carries the request out, then closes the connection instead of replying.

        A retry then creates a duplicate, unless the producer is idempotent.
        """
        return self._add(
            "lose the answer to", api, lambda _, request: serve_and_disconnect(request), times, when
        )

    def delay(
        self, api: str, seconds: float, *, times: int | None = None, when: FaultCondition | None = None
    ) -> Fault:
        """Serves the request that much later; further requests on the same connection wait behind it."""
        if seconds < 0:
            raise ValueError(f"seconds must be at least 0, not {seconds}")
        what = f"by {seconds:g} s"
        return self._add("delay", api, lambda hook, request: hook.hold(request, seconds), times, when, what)

    def fail(
        self,
        api: str,
        error: ErrorCode | str,
        *,
        times: int | None = None,
        when: FaultCondition | None = None,
    ) -> Fault:
        """Replies with this error for everything in the request, and does not carry it out.

        If there is no reply (acks=0), or the request contains nothing to report an error for, it closes the connection.
        """
        code = _parse_error_code(error)
        return self._add(
            "fail", api, lambda _, request: reply_error(request, code), times, when, f"with {code.name}"
        )

    def disown(
        self,
        api: str,
        error: ErrorCode | str,
        *,
        times: int | None = None,
        when: FaultCondition | None = None,
    ) -> Fault:
        """Carries the request out, but replies with this error.

        A leader replies so when it has written a batch and loses leadership before the followers have replicated it.
        """
        code = _parse_error_code(error)
        return self._add(
            "disown",
            api,
            lambda _, request: serve_but_reply_error(request, code),
            times,
            when,
            f"with {code.name}",
        )

    def clear(self) -> None:
        """Ends all faults. Requests that are already delayed stay delayed."""
        with self._lock:
            self._active.clear()

    def hook(self) -> FaultHook:
        """The hook that a node calls for each request; each start of a node needs its own."""
        return FaultHook(self)

    def _add(
        self,
        verb: str,
        api: str,
        act: FaultAction,
        times: int | None,
        when: FaultCondition | None,
        how: str = "",
    ) -> Fault:
        found = _find_api(api)
        fault = Fault(self, f"{verb} {found.name} {how}".rstrip(), found, act, times, when)
        with self._lock:
            self._active.append(fault)
        return fault

    def _remove(self, fault: Fault) -> None:
        with self._lock:
            if fault in self._active:
                self._active.remove(fault)

    def _claim(self, request: FaultyRequest) -> Fault | None:
        """Returns the fault to apply to this request, if any, and counts the hit."""
        if not self._active:
            return None
        with self._lock:
            fault = next((each for each in self._active if each._matches(request)), None)
            if fault is not None:
                fault._count()
                if fault.is_spent:
                    self._active.remove(fault)
        return fault


class FaultHook:
    """Belongs to the event loop of one node."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._held: dict[Connection, list[bytearray]] = {}

    def __call__(
        self, context: RequestContext, connection: Connection, frame: memoryview, dispatcher: Dispatcher
    ) -> bool:
        """Returns True if the hook has handled the request."""
        waiting = self._held.get(connection)
        if waiting is not None:
            waiting.append(bytearray(frame))
            return True
        request = FaultyRequest(context, connection, frame, dispatcher)
        fault = self._faults._claim(request)
        if fault is None:
            return False
        fault._act(self, request)
        return True

    def hold(self, request: FaultyRequest, seconds: float) -> None:
        # Copy the bytes, because the receive buffer is reused.
        held = request.on_frame(memoryview(bytearray(request.frame)))
        self._held[request.connection] = []
        asyncio.get_running_loop().call_later(seconds, partial(self._release, held))

    def _release(self, request: FaultyRequest) -> None:
        connection = request.connection
        waiting = self._held.pop(connection)
        if connection.is_open:
            serve_request(request)
        for frame in waiting:
            if connection.is_open:
                connection.handle(memoryview(frame))


def _find_api(name: str) -> Api:
    known = {api.name.replace("_", ""): api for api in APIS.values()}
    api = known.get(name.lower().replace("_", "").replace("-", ""))
    if api is None:
        names = ", ".join(sorted(api.name for api in APIS.values()))
        raise ValueError(f"{name!r} is not a request; the requests are {names}")
    return api


def _parse_error_code(error: ErrorCode | str) -> ErrorCode:
    if isinstance(error, str):
        if error.lower() not in ErrorCode.__members__:
            raise ValueError(f"{error!r} is not an error code")
        error = ErrorCode[error.lower()]
    if error is ErrorCode.none:
        raise ValueError("ErrorCode.none is not an error")
    return error
