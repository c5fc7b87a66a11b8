"""A whole broker inside the process of a test, with its own thread, data directory and free port."""

from __future__ import annotations

import asyncio
import secrets
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar
from uuid import uuid4

from penstock.broker.config.listeners import format_address
from penstock.broker.config.node_settings import NodeSettings, load_settings
from penstock.broker.controller.bootstrap_user import BootstrapUser
from penstock.broker.node import Node
from penstock.broker.process import new_event_loop
from penstock.client.admin.acls import create_acls
from penstock.client.admin.users import set_password
from penstock.client.wire.cluster import Cluster
from penstock.client.wire.settings import ConnectionSettings
from penstock.cluster.controller.create_topics import NewTopic
from penstock.protocol.acls import (
    CLUSTER_NAME,
    SUPPORTED_OPERATIONS,
    WILDCARD,
    AclBinding,
    Operation,
    PatternType,
    Permission,
    ResourceType,
)
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.testing.credentials import ADMIN, CLIENT_LISTENER, Credentials
from penstock.testing.faults import Faults

if TYPE_CHECKING:
    from os import PathLike

_HOST: Final = "127.0.0.1"
#: Starting may include recovery after a kill; a broker that takes longer than this hangs.
_TIMEOUT_S: Final = 60.0

#: How an embedded broker differs from `penstock serve`: tests are many and short, and their data need not be durable.
#: `penstock.flush=never` leaves syncing to the operating system (a killed broker still recovers all data, because the
#: process lives on); pass `settings={"penstock.flush": "ack"}` to sync as in production.
EMBEDDED_SETTINGS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "group.initial.rebalance.delay.ms": "0",
        "group.min.session.timeout.ms": "100",
        "offsets.topic.num.partitions": "1",
        "penstock.flush": "never",
        "penstock.io.threads": "2",
        "penstock.sync.threads": "2",
        "transaction.state.log.num.partitions": "1",
    }
)

#: PLAIN accepts the same users, because every client library can do PLAIN.
_SECURE_SETTINGS: Final = {
    "sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256,SCRAM-SHA-512",
    "penstock.sasl.plain.scram.credentials": "true",
}

SettingValue = str | int | float | bool | Iterable[str]
Result = TypeVar("Result")


class EmbeddedBroker:
    """A broker that any Kafka client can use, ready in a few milliseconds.

    It keeps its data and its port across `stop`, `kill` and `restart`. Without `data_dir` the data is in a temporary
    folder that is deleted when the `with` block ends, or with the process.

    With `secure=True` clients need TLS and a password, and access rules decide what they may do. `client_settings()`
    are those of a user who may do everything; `create_user` and `allow` make others.

        >>> from confluent_kafka import Consumer, Producer
        >>> from penstock.testing import EmbeddedBroker
        >>> with EmbeddedBroker(settings={"num.partitions": 3}) as broker:
        ...     topic = broker.create_topic("orders", cleanup_policy="compact")
        ...     producer = Producer({"bootstrap.servers": broker.bootstrap_servers})
        ...     producer.produce(topic, key="a", value="1")
        ...     assert producer.flush(10) == 0
        ...     broker.restart()
        ...     consumer = Consumer(
        ...         {"bootstrap.servers": broker.bootstrap_servers, "group.id": "g", "auto.offset.reset": "earliest"}
        ...     )
        ...     consumer.subscribe([topic])
        ...     print(consumer.poll(10).value())
        ...     consumer.close()
        b'1'
    """

    def __init__(
        self,
        *,
        data_dir: str | PathLike[str] | None = None,
        port: int = 0,
        settings: Mapping[str, SettingValue] = MappingProxyType({}),
        secure: bool = False,
    ) -> None:
        """`settings` are node settings with the names that Kafka uses; see EMBEDDED_SETTINGS for the defaults.

        Raises InvalidSetting, and NoCryptography if a secure broker cannot be made. Environment variables are ignored.
        """
        self.faults = Faults()
        self._given = {name: _setting_text(value) for name, value in settings.items()}
        self._port = port
        self._passwords: dict[str, str] = {}
        self._is_own_dir = data_dir is None
        self.data_dir = Path(tempfile.mkdtemp(prefix="penstock-") if data_dir is None else data_dir)
        self._running: _NodeThread | None = None
        if self._is_own_dir:
            self._clean_up = weakref.finalize(self, shutil.rmtree, self.data_dir, ignore_errors=True)
        self._credentials = Credentials(self.data_dir / "security") if secure else None
        self._settings()

    def __repr__(self) -> str:
        state = f"on {self.bootstrap_servers}" if self.is_running else "stopped"
        return f"<EmbeddedBroker {state}, data in {self.data_dir}>"

    def __enter__(self) -> Self:
        return self if self.is_running else self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        if self._is_own_dir:
            self._clean_up()

    # -- lifecycle -----------------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        return self._running is not None

    def start(self) -> Self:
        """Returns when clients can connect. Raises the error that keeps the broker from starting."""
        if self._running is not None:
            raise RuntimeError(f"{self} is already running")
        self.data_dir.mkdir(parents=True, exist_ok=True)
        user = None if self._credentials is None else BootstrapUser(ADMIN, self._credentials.password)
        self._running = _NodeThread.start(self._settings(), self.faults, user)
        self._port = self._running.node.listeners[0].port
        return self

    def stop(self) -> None:
        """Stop the broker cleanly, as an operator would. Its data stays for the next `start`."""
        self._end(clean=True)

    def kill(self) -> None:
        """Stop the broker as a crash would: it drops its connections, and the next `start` has to recover the data.

        All written data is still there, synced or not, as after `kill -9`. This does not simulate a power loss.
        """
        self._end(clean=False)

    def restart(self) -> None:
        """Stop, and start on the same port with the same data; after a `kill`, only start."""
        self.stop()
        self.start()

    # -- usage ---------------------------------------------------------------------------------------

    @property
    def port(self) -> int:
        """The port that the broker listens on; 0 before the first start if no port was given."""
        return self._port

    @property
    def bootstrap_servers(self) -> str:
        """The value for the clients' setting `bootstrap.servers`."""
        return format_address(_HOST, self._port)

    def client_settings(self, user: str | None = None) -> dict[str, str]:
        """The settings with which a client of librdkafka or `penstock.client` connects, as this user.

        The user of a secure broker is the super user `admin`, or one that `create_user` has made.

            >>> from confluent_kafka import Producer
            >>> with EmbeddedBroker(secure=True) as broker:
            ...     topic = broker.create_topic("orders")
            ...     _ = broker.create_user("alice")
            ...     broker.allow("alice", "write", topic="orders")
            ...     producer = Producer(broker.client_settings("alice"))
            ...     producer.produce(topic, b"hello")
            ...     assert producer.flush(10) == 0
        """
        addresses = {"bootstrap.servers": self.bootstrap_servers}
        if self._credentials is None and user is None:
            return addresses
        name = user or ADMIN
        password = self._security().password if name == ADMIN else self._passwords.get(name)
        if password is None:
            raise ValueError(f"create_user has not made {name!r}")
        return {**addresses, **self._security().client_settings(name, password)}

    @property
    def client_properties(self) -> Path:
        """A `client.properties` with which Kafka's tools and `penstock --command-config` connect as `admin`."""
        return self._security().write_properties(self.bootstrap_servers)

    @property
    def authority(self) -> Path:
        """The certificate that clients of a secure broker have to trust, as PEM."""
        return self._security().authority_file

    def create_user(self, name: str, password: str | None = None) -> dict[str, str]:
        """Make a user of a secure broker, with a random password by default; return the user's client settings.

        The user may do nothing until `allow`. The password works with SCRAM and with PLAIN.
        """
        chosen = secrets.token_urlsafe() if password is None else password
        with self._admin() as cluster:
            set_password(cluster, name, chosen)
        self._passwords[name] = chosen
        return self.client_settings(name)

    def allow(
        self,
        user: str,
        *operations: str,
        topic: str | None = None,
        group: str | None = None,
        transactional_id: str | None = None,
        cluster: bool = False,
        prefixed: bool = False,
    ) -> None:
        """Add access rules that let the user do this: `allow("alice", "read", topic="orders", group="billing")`.

        Operations have Kafka's names, such as read, write and describe_configs. Without any they are all. "*" is every
        topic, group or transactional id; with `prefixed`, names are prefixes.
        """
        named = (
            (ResourceType.TOPIC, topic),
            (ResourceType.GROUP, group),
            (ResourceType.TRANSACTIONAL_ID, transactional_id),
            (ResourceType.CLUSTER, CLUSTER_NAME if cluster else None),
        )
        pattern = PatternType.PREFIXED if prefixed else PatternType.LITERAL
        rules = [
            AclBinding(
                kind,
                name,
                PatternType.LITERAL if kind is ResourceType.CLUSTER else pattern,
                f"User:{user}",
                WILDCARD,
                operation,
                Permission.ALLOW,
            )
            for kind, name in named
            if name is not None
            for operation in map(_operation, operations or ("all",))
            if operation is Operation.ALL or operation in SUPPORTED_OPERATIONS[kind]
        ]
        if not rules:
            raise ValueError(
                "name a topic, a group, a transactional id or the cluster, and operations that it has"
            )
        with self._admin() as connected:
            create_acls(connected, rules)

    @property
    def http_url(self) -> str | None:
        """The base URL of /metrics, /health and /ready. Needs the setting `penstock.http.listen`: "127.0.0.1:0"."""
        http = self._node().http
        return None if http is None else f"http://{format_address(_HOST, http.port)}"

    def create_topic(self, name: str, partitions: int = 1, **settings: SettingValue) -> str:
        """Create a topic and return its name; it can be used at once.

        Settings have the names that Kafka uses, or underscores for dots where that is easier to write:
        `create_topic("t", retention_ms=1000)` or `create_topic("t", **{"retention.ms": 1000})`.
        Raises ValueError if the broker refuses.
        """
        topic = NewTopic(
            name=name,
            partitions=partitions,
            configs=tuple((key.replace("_", "."), _setting_text(value)) for key, value in settings.items()),
        )
        node = self._node()
        (result,) = self._call(node.topic_creator.create([topic]))
        if result.error is not ErrorCode.none:
            raise ValueError(f"topic {name!r} was not created: {result.message or result.error.name}")
        return name

    def new_topic(self, prefix: str = "topic", partitions: int = 1, **settings: SettingValue) -> str:
        """Create a topic with a unique name, so that tests can share one broker."""
        return self.create_topic(self.unique_name(prefix), partitions, **settings)

    @staticmethod
    def unique_name(prefix: str = "name") -> str:
        """A name for groups, topics and transactional ids that must differ from those of other tests."""
        return f"{prefix}-{uuid4().hex[:12]}"

    # -- internals -----------------------------------------------------------------------------------

    def _settings(self) -> NodeSettings:
        fixed = {"listeners": f"PLAINTEXT://{_HOST}:{self._port}", "log.dirs": str(self.data_dir)}
        if self._credentials is not None:
            fixed |= self._credentials.node_settings("node", (_HOST, "localhost"))
            fixed |= {**self._credentials.node_secrets(), **_SECURE_SETTINGS}
            fixed["listeners"] = f"{CLIENT_LISTENER}://{_HOST}:{self._port}"
        return load_settings({**EMBEDDED_SETTINGS, **fixed, **self._given}, {})

    def _security(self) -> Credentials:
        if self._credentials is None:
            raise RuntimeError(f"{self} has no users: make it with EmbeddedBroker(secure=True)")
        return self._credentials

    def _admin(self) -> Cluster:
        return Cluster(
            ConnectionSettings.parse({**self.client_settings(ADMIN), "client.id": "penstock-embedded"})
        )

    def _node(self) -> Node:
        if self._running is None:
            raise RuntimeError(f"{self} is not running")
        return self._running.node

    def _call(self, work: Coroutine[Any, Any, Result]) -> Result:
        assert self._running is not None
        try:
            return asyncio.run_coroutine_threadsafe(work, self._running.loop).result(_TIMEOUT_S)
        except ApiError as error:
            raise ValueError(str(error)) from error

    def _end(self, *, clean: bool) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.end(clean=clean)


class _NodeThread:
    """A node that runs on the event loop of its own thread."""

    def __init__(self, settings: NodeSettings, faults: Faults, user: BootstrapUser | None) -> None:
        self.node: Node
        self.loop: asyncio.AbstractEventLoop
        self._stop: Callable[[bool], None]
        self._settings = settings
        self._faults = faults
        self._user = user
        self._started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="penstock-embedded", daemon=True)

    @classmethod
    def start(cls, settings: NodeSettings, faults: Faults, user: BootstrapUser | None = None) -> Self:
        self = cls(settings, faults, user)
        self._thread.start()
        self._started.result(_TIMEOUT_S)
        return self

    def end(self, *, clean: bool) -> None:
        self.loop.call_soon_threadsafe(self._stop, clean)
        self._thread.join(_TIMEOUT_S)
        if self._thread.is_alive():
            raise RuntimeError(f"{self.node} did not stop within {_TIMEOUT_S:g} s")

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=new_event_loop) as runner:
                runner.run(self._serve())
        except BaseException as error:
            if self._started.done():
                raise
            self._started.set_exception(error)

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        ended: asyncio.Future[bool] = self.loop.create_future()
        self._stop = ended.set_result
        self.node = Node(self._settings)
        self.node.faults = self._faults.hook()
        self.node.bootstrap_user = self._user
        await self.node.start()
        self._started.set_result(None)
        await self.node.stop(clean=await ended)


def _operation(name: str) -> Operation:
    wanted = name.replace("_", "").lower()
    for operation in Operation:
        if operation > Operation.ANY and operation.name.replace("_", "").lower() == wanted:
            return operation
    raise ValueError(f"there is no operation {name!r}")


def _setting_text(value: SettingValue) -> str:
    """The value as Kafka writes it: true, false, and lists with commas."""
    match value:
        case bool():
            return "true" if value else "false"
        case str() | int() | float():
            return str(value)
        case _:
            return ",".join(value)
