"""A cluster: sends a request to the leader, coordinator or controller, and follows when that role moves."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable, Iterable, Iterator
from enum import IntEnum
from functools import partial
from typing import Any, Final, TypeVar
from uuid import UUID

from penstock.client.errors import (
    RETRIABLE_ERRORS,
    UNKNOWN_TOPIC_ERRORS,
    Refused,
    RetryAction,
    TopicChanged,
    Unavailable,
    broker_error,
    raise_for_error,
)
from penstock.client.retry import Deadline, attempts
from penstock.client.wire.connection import Connection
from penstock.client.wire.metadata import (
    METADATA_VERSION_MIN,
    NO_LEADER,
    BrokerInfo,
    MetadataView,
    PartitionInfo,
    TopicInfo,
    metadata_request,
    metadata_view,
)
from penstock.client.wire.settings import ConnectionSettings
from penstock.protocol.backoff import ExponentialBackoff
from penstock.protocol.errors import ErrorCode
from penstock.protocol.schemas import schema_class

Reply = TypeVar("Reply")
#: Sends a request to one broker, once. Raises Refused or Unavailable.
BrokerCall = Callable[[Connection], Reply]

_FIND_COORDINATOR: Final = 10
_KEY_LIST_VERSION: Final = 4
#: Short, because every broker can answer: the client asks the next one.
_METADATA_TIMEOUT_MS: Final = 10_000
#: A node without a connection comes before one with a connection in one case of eight.
_UNCONNECTED_PENALTY: Final = 0.5


class CoordinatorType(IntEnum):
    """Kinds of coordinators, numbered as on the wire."""

    GROUP = 0
    TRANSACTION = 1


class Cluster:
    """A client of one cluster, for one thread. After a fork, the child opens its own connections."""

    def __init__(
        self,
        settings: ConnectionSettings,
        *,
        backoff: ExponentialBackoff | None = None,
        chance: random.Random | None = None,
    ) -> None:
        self.settings = settings
        self.backoff = backoff or ExponentialBackoff()
        self.chance = chance or random.Random()
        self._owner = os.getpid()
        self._connections: dict[int, Connection] = {}
        self._nodes: dict[int, BrokerInfo] = {}
        self._topics: dict[str, tuple[TopicInfo, Deadline]] = {}
        self._coordinators: dict[tuple[CoordinatorType, str], int] = {}
        self._controller_id = NO_LEADER
        self._cluster_id: str | None = None

    def __repr__(self) -> str:
        return f"<Cluster {self._cluster_id or self.settings.bootstrap}, nodes {sorted(self._nodes)}>"

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        connections, self._connections = self._connections, {}
        for connection in connections.values():
            connection.close()

    # Metadata

    @property
    def cluster_id(self) -> str | None:
        if self._cluster_id is None:
            self._refresh(())
        return self._cluster_id

    def known_nodes(self) -> list[BrokerInfo]:
        """Returns the nodes of the last metadata, without a request."""
        return list(self._nodes.values())

    def nodes(self) -> dict[int, BrokerInfo]:
        """Fetches the nodes. Raises Unavailable."""
        self._call_with_retries(lambda: None, lambda _: self._refresh(()), "the cluster")
        return dict(self._nodes)

    def topics(self, wanted: Iterable[str] | re.Pattern[str] | None = None) -> dict[str, TopicInfo]:
        """Fetches the named topics, those whose whole name matches, or all. Leaves out topics that do not exist.

        A pattern never matches internal topics. Raises Unavailable, Refused.
        """
        names = None if wanted is None or isinstance(wanted, re.Pattern) else tuple(wanted)
        if names == ():
            return {}
        view = self._call_with_retries(lambda: None, lambda _: self._refresh(names), "the cluster")
        if isinstance(wanted, re.Pattern):
            return {
                name: topic
                for name, topic in view.topics.items()
                if not topic.is_internal and wanted.fullmatch(name)
            }
        return view.topics

    def learn_topics(self, names: Iterable[str]) -> None:
        """Fetches metadata of topics whose metadata is missing or too old. Raises Unavailable, Refused."""
        stale = tuple(sorted(name for name in names if self._recent(name) is None))
        if stale:
            self._refresh(stale)

    def _recent(self, name: str) -> TopicInfo | None:
        found, age = self._topics.get(name, (None, None))
        return None if age is None or age.is_over else found

    def topic(self, name: str, topic_id: UUID | None = None) -> TopicInfo:
        """Returns recent metadata. Raises TopicChanged if the topic has another id, Refused if it does not exist."""
        found = self._recent(name) or self._refresh((name,)).topics.get(name)
        if found is None:
            raise broker_error(ErrorCode.unknown_topic_or_partition, f"topic {name}")
        if topic_id is not None and found.id is not None and found.id != topic_id:
            raise TopicChanged(
                f"topic {name} was deleted and created again: its id is {found.id}, not {topic_id}"
            )
        return found

    def await_topic(self, name: str, topic_id: UUID | None = None) -> TopicInfo:
        """Like `topic`, but waits for a topic that may have been created just now. Raises Unavailable too."""
        return self._call_with_retries(
            lambda: None,
            lambda _: self.topic(name, topic_id),
            f"topic {name}",
            forget=lambda: self.forget_topic(name),
        )

    def topic_to_write(self, name: str) -> TopicInfo:
        """Like `await_topic`, but brokers create a missing topic if auto.create.topics.enable is set."""
        if self._recent(name) is None:
            self._call_with_retries(
                lambda: None, lambda _: self._refresh((name,), creates=True), f"topic {name}"
            )
        return self.await_topic(name)

    def leader(self, topic: str, partition: int, topic_id: UUID | None = None) -> PartitionInfo:
        """Returns the leader by recent metadata. Raises Refused if there is none, TopicChanged as `topic` does."""
        info = self.topic(topic, topic_id).partition(partition)
        if info is None:
            raise broker_error(ErrorCode.unknown_topic_or_partition, f"{topic}[{partition}]")
        if info.leader_id == NO_LEADER or info.leader_id not in self._nodes:
            raise broker_error(ErrorCode.leader_not_available, f"{topic}[{partition}]")
        return info

    def forget_topic(self, topic: str) -> None:
        """Discards the metadata of the topic."""
        self._topics.pop(topic, None)

    # Requests

    def call_leader(
        self,
        topic: str,
        partition: int,
        call: BrokerCall[Reply],
        *,
        topic_id: UUID | None = None,
        deadline: Deadline | None = None,
    ) -> Reply:
        """Calls the leader. Raises Unavailable, TopicChanged (of `topic_id`), and errors of `call` that do not pass."""
        return self._call_with_retries(
            lambda: self.connection(self.leader(topic, partition, topic_id).leader_id),
            call,
            f"the leader of {topic}[{partition}]",
            forget=lambda: self.forget_topic(topic),
            deadline=deadline,
        )

    def call_coordinator(
        self, kind: CoordinatorType, key: str, call: BrokerCall[Reply], *, deadline: Deadline | None = None
    ) -> Reply:
        """Calls the coordinator of a group or transactional id. Raises Unavailable, and permanent errors of `call`."""
        return self._call_with_retries(
            lambda: self.connection(self._coordinator(kind, key)),
            call,
            f"the coordinator of {key}",
            forget=lambda: self._coordinators.pop((kind, key), None),
            deadline=deadline,
        )

    def coordinator_id(self, kind: CoordinatorType, key: str) -> int:
        """Returns the node id of the coordinator. Raises Unavailable."""
        return self._call_with_retries(
            lambda: None, lambda _: self._coordinator(kind, key), f"the coordinator of {key}"
        )

    def call_controller(self, call: BrokerCall[Reply], *, deadline: Deadline | None = None) -> Reply:
        """Calls the controller. Raises Unavailable, and permanent errors of `call`."""
        return self._call_with_retries(
            self._controller, call, "the controller", forget=self._forget_controller, deadline=deadline
        )

    def call_any(self, call: BrokerCall[Reply], *, deadline: Deadline | None = None) -> Reply:
        """Calls any node. Raises Unavailable, and permanent errors of `call`."""
        return self._call_with_retries(self._any_connection, call, "the cluster", deadline=deadline)

    def call_node(self, node_id: int, call: BrokerCall[Reply], *, deadline: Deadline | None = None) -> Reply:
        """Calls this node. Raises Unavailable, and permanent errors of `call`."""

        def find() -> Connection:
            if node_id not in self._nodes:
                self._refresh(())
            return self.connection(node_id)

        return self._call_with_retries(find, call, f"node {node_id}", deadline=deadline)

    def call_every_node(self, call: BrokerCall[Reply], *, deadline: Deadline | None = None) -> list[Reply]:
        """Calls every node once, or raises as `call_any` does."""

        def call_all(_: object) -> list[Reply]:
            self._refresh(())
            return [call(self.connection(node_id)) for node_id in sorted(self._nodes)]

        return self._call_with_retries(lambda: None, call_all, "every node", deadline=deadline)

    def attempts(self, deadline: Deadline) -> Iterator[int]:
        return attempts(deadline, self.backoff, self.chance)

    def _call_with_retries(
        self,
        find: Callable[[], Any],
        call: Callable[[Any], Reply],
        target: str,
        *,
        forget: Callable[[], object] = lambda: None,
        deadline: Deadline | None = None,
    ) -> Reply:
        deadline = deadline or Deadline(self.settings.retry_deadline_ms)
        unknown = Deadline(self.settings.unknown_topic_ms_max)
        last_error: Exception | None = None
        for _ in self.attempts(deadline):
            try:
                return call(find())
            except Unavailable as error:
                last_error = error
                forget()
            except TopicChanged as error:
                # A single broker may have old metadata, so retry before believing it.
                if unknown.is_over:
                    raise
                last_error = error
                forget()
            except Refused as error:
                if error.code not in RETRIABLE_ERRORS or (
                    error.code in UNKNOWN_TOPIC_ERRORS and unknown.is_over
                ):
                    raise
                last_error = error
                if RETRIABLE_ERRORS[error.code] is RetryAction.REFRESH_METADATA:
                    forget()
        if isinstance(last_error, TopicChanged):
            raise last_error
        raise Unavailable(f"{target} was not available within {deadline.timeout_ms / 1000:g} s: {last_error}")

    # Connections

    def connection(self, node_id: int) -> Connection:
        """Returns the shared connection to a node. Raises Unavailable."""
        self._drop_parent_connections()
        known = self._connections.get(node_id)
        if known is not None and known.is_usable:
            return known
        if known is not None:
            known.close()
        self._connections[node_id] = made = self.connect(node_id)
        return made

    def connect(self, node_id: int) -> Connection:
        """Opens a new connection for the caller alone. Raises Unavailable."""
        node = self._nodes.get(node_id)
        if node is None:
            raise Unavailable(f"node {node_id} is not in the cluster's metadata")
        return Connection(node.address, self.settings)

    def _drop_parent_connections(self) -> None:
        """Closes the copies of connections that were opened before a fork; the parent keeps its own."""
        if self._owner != os.getpid():
            self.close()
            self._owner = os.getpid()

    def _any_connection(self) -> Connection:
        """Raises Unavailable."""
        if not self._nodes:
            self._refresh(())
        failures = []
        for node_id in self._shuffled_node_ids():
            try:
                return self.connection(node_id)
            except Unavailable as error:
                failures.append(str(error))
        # All nodes may have moved: start again with the bootstrap addresses.
        self._nodes = {}
        raise Unavailable(f"cannot connect to any broker: {'; '.join(failures)}")

    def _shuffled_node_ids(self) -> list[int]:
        """Returns nodes in random order, mostly those with a connection first.

        Mostly and not always, so that the client does not ask a broker that is cut off from the cluster forever.
        """

        def order(node_id: int) -> float:
            return self.chance.random() + (0 if node_id in self._connections else _UNCONNECTED_PENALTY)

        return sorted(self._nodes, key=order)

    # Leaders, coordinators and the controller

    def _refresh(self, names: tuple[str, ...] | None, *, creates: bool = False) -> MetadataView:
        """Fetches metadata from the first broker that answers. Raises Unavailable, Refused."""
        failures: list[str] = []
        for connect in self._sources():
            try:
                source = connect()
                view = self._fetch_metadata(source, names, creates=creates)
            except Unavailable as error:
                failures.append(str(error))
            else:
                self._learn(view, source, names)
                return view
        raise Unavailable(f"cannot fetch metadata from any broker: {'; '.join(failures)}")

    def _sources(self) -> Iterator[Callable[[], Connection]]:
        """Yields functions that connect to known nodes, then to the bootstrap addresses."""
        self._drop_parent_connections()
        for node_id in self._shuffled_node_ids():
            yield partial(self.connection, node_id)
        addresses = list(self.settings.bootstrap)
        self.chance.shuffle(addresses)
        for address in addresses:
            yield partial(Connection, address, self.settings)

    def _fetch_metadata(
        self, source: Connection, names: tuple[str, ...] | None, *, creates: bool
    ) -> MetadataView:
        timeout_ms = min(self.settings.request_timeout_ms, _METADATA_TIMEOUT_MS)
        request = metadata_request(names, creates=creates)
        response = source.call(request, oldest=METADATA_VERSION_MIN, timeout_ms=timeout_ms)
        view = metadata_view(response)
        if not view.nodes:
            raise Unavailable(f"{source.peer} returned metadata without brokers")
        return view

    def _learn(self, view: MetadataView, source: Connection, names: tuple[str, ...] | None) -> None:
        self._nodes = view.nodes
        self._controller_id = view.controller_id
        self._cluster_id = view.cluster_id
        self._adopt(source)
        for name in names or ():
            self._topics.pop(name, None)
        for name, topic in view.topics.items():
            self._topics[name] = (topic, Deadline(self.settings.metadata_age_ms_max))
        for node_id in self._connections.keys() - view.nodes.keys():
            self._connections.pop(node_id).close()

    def _adopt(self, connection: Connection) -> None:
        """Keeps the connection to a bootstrap address if that is the address of a node, else closes it."""
        if connection in self._connections.values():
            return
        for node in self._nodes.values():
            if node.address == connection.address and node.id not in self._connections:
                self._connections[node.id] = connection
                return
        connection.close()

    def _controller(self) -> Connection:
        if self._controller_id not in self._nodes:
            self._refresh(())
        if self._controller_id not in self._nodes:
            return self._any_connection()
        return self.connection(self._controller_id)

    def _forget_controller(self) -> None:
        self._controller_id = NO_LEADER

    def _coordinator(self, kind: CoordinatorType, key: str) -> int:
        """Raises Refused, Unavailable."""
        known = self._coordinators.get((kind, key))
        if known is not None and known in self._nodes:
            return known
        node = _find_coordinator(self._any_connection(), kind, key)
        self._nodes.setdefault(node.id, node)
        self._coordinators[kind, key] = node.id
        return node.id


def _find_coordinator(connection: Connection, kind: CoordinatorType, key: str) -> BrokerInfo:
    version = connection.version(_FIND_COORDINATOR, _KEY_LIST_VERSION)
    if version >= _KEY_LIST_VERSION:
        request = schema_class("find_coordinator.v4.request:FindCoordinatorRequest")(
            key_type=int(kind), coordinator_keys=(key,)
        )
        (found,) = connection.call(request).coordinators
    else:
        request = schema_class("find_coordinator.v3.request:FindCoordinatorRequest")(
            key=key, key_type=int(kind)
        )
        found = connection.call(request)
    raise_for_error(found.error_code, f"the coordinator of {key}", getattr(found, "error_message", None))
    return BrokerInfo(id=int(found.node_id), host=str(found.host), port=int(found.port))
