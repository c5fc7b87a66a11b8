"""A cluster in one process for tests of the controller's runtime.

Nodes are made of the real channel, controller, lifecycle and handlers. What they decide is committed at once, and
requests between them travel as real bytes; who leads, who is cut off and who is slow to follow is up to the test.
"""

import asyncio
import io
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

from kio.index import load_request_schema, load_response_schema
from kio.serial import entity_reader, entity_writer

from penstock.broker.config.node_settings import load_settings
from penstock.broker.controller.broker_lifecycle import BrokerLifecycleManager
from penstock.broker.controller.channel import ControllerChannel
from penstock.broker.controller.controller import Controller, LastController
from penstock.broker.controller.producer_id_manager import ProducerIdManager
from penstock.broker.controller.topic_creation import TopicCreator
from penstock.broker.metrics.counters import Metrics
from penstock.broker.network.apis import APIS, route
from penstock.broker.network.audit import AuditTrail
from penstock.broker.network.peers import PeerUnreachable
from penstock.broker.network.quotas import ClientQuotaManager
from penstock.broker.network.requests import BrokerCalls, RequestContext
from penstock.cluster.controller.decision import Decision, DecisionOrSteps
from penstock.cluster.image import ClusterImage
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.steps import finish

CLUSTER_ID = "a-cluster"
FAST = {"broker.session.timeout.ms": "3000", "broker.heartbeat.interval.ms": "500"}


class Cluster:
    """Every node has an image of its own, which follows the common log."""

    def __init__(self, folder: Path, size: int = 3, **settings: str) -> None:
        self.records: list[Any] = []
        self.leader_id = -1
        self.cuts: set[tuple[int, int]] = set()  # who cannot reach whom
        self.frozen: set[int] = set()  # who does not answer
        self.heard: list[tuple[int, int]] = []  # which node was asked which API
        given = {name.replace("_", "."): value for name, value in settings.items()}
        self.nodes = {id: SmallNode(self, id, folder, given) for id in range(1, size + 1)}

    def __getitem__(self, node_id: int) -> "SmallNode":
        return self.nodes[node_id]

    @property
    def leader(self) -> "SmallNode":
        return self.nodes[self.leader_id]

    def elect(self, node_id: int) -> None:
        """-1: no leader."""
        before, self.leader_id = self.leader_id, node_id
        if before > 0:
            self.nodes[before].metadata.is_active = False
            self.nodes[before].controller.became_inactive()
        if node_id > 0:
            self.leader.metadata.follow()
            self.leader.metadata.is_active = True
            self.leader.controller.became_active()

    def commit(self, records: tuple[Any, ...]) -> None:
        self.records += records
        for node in self.nodes.values():
            if node.is_leader or not node.lags:
                node.metadata.follow()

    async def start(self, *node_ids: int) -> None:
        """Register, report ready, and be unfenced, one after the other."""
        for node_id in node_ids or self.nodes:
            lifecycle = self.nodes[node_id].lifecycle
            await lifecycle.register()
            lifecycle.ready()
            await lifecycle.unfenced()

    async def stop(self) -> None:
        for node in self.nodes.values():
            await node.stop()


class SmallNode:
    authorizer = None

    def __init__(self, cluster: Cluster, node_id: int, folder: Path, settings: dict[str, str]) -> None:
        self.cluster = cluster
        self.node_id = node_id
        self.lags = False
        self.state = "serving"
        self.cluster_id = CLUSTER_ID
        directory = folder / str(node_id)
        directory.mkdir(exist_ok=True)
        self.settings = load_settings(
            {
                **FAST,
                "node.id": str(node_id),
                "listeners": f"PLAINTEXT://127.0.0.1:{9000 + node_id}",
                "log.dirs": str(directory),
                **settings,
            },
            {},
        )
        self.listeners = self.settings.listeners
        directory_id = uuid4()
        self.store = SimpleNamespace(
            directory=directory,
            directory_id=directory_id,
            voter_id=directory_id,
            clean=False,
            cluster_id=CLUSTER_ID,
        )
        self.metrics = Metrics()
        self.audit = AuditTrail()
        self.quotas = ClientQuotaManager(self.settings, lambda: 0)
        self.server: Any = None
        self.partitions = SimpleNamespace(refused=())
        self.telemetry = SimpleNamespace(has_subscriptions=False)
        self._tasks: set[asyncio.Task[Any]] = set()
        self.metadata = SmallMetadata(self)
        self.quorum = SmallQuorum(self)
        self.peers = SmallPeers(self)
        self.new_process()

    def new_process(self) -> None:
        self.channel = ControllerChannel(
            self.node_id,
            self.quorum,  # type: ignore[arg-type]
            self.metadata,  # type: ignore[arg-type]
            peers=lambda: self.peers,  # type: ignore[arg-type,return-value]
            call_local=BrokerCalls(lambda: self, lambda: self.peers).call_local,  # type: ignore[arg-type,return-value]
        )
        self.controller = Controller(
            self,
            self.settings,
            self.metadata,  # type: ignore[arg-type]
            self.metrics,
            own_incarnation=lambda: self.lifecycle.incarnation,
            last_controller=lambda: LastController(
                self.channel.last_controller_id, self.lifecycle.silent_ms()
            ),
        )
        self.lifecycle = BrokerLifecycleManager(
            self,  # type: ignore[arg-type]
            self.settings,
            self.store,  # type: ignore[arg-type]
            quorum=self.quorum,  # type: ignore[arg-type]
            metadata=self.metadata,  # type: ignore[arg-type]
            channel=self.channel,
            controller=self.controller,
            listeners=lambda: self.listeners,
        )
        self.producer_ids = ProducerIdManager(
            self.node_id,
            self.metadata,  # type: ignore[arg-type]
            self.channel,
            lambda: self.lifecycle.broker_epoch,
        )
        self.topic_creator = TopicCreator(
            self.settings,
            self.metadata,  # type: ignore[arg-type]
            self.channel,
            refused_by_disk=lambda: self.partitions.refused,
        )

    @property
    def is_leader(self) -> bool:
        return self.cluster.leader_id == self.node_id

    @property
    def image(self) -> ClusterImage:
        return self.metadata.image

    def now_ms(self) -> int:
        return 0

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def in_thread(self, call: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        done = asyncio.get_running_loop().create_future()
        done.set_result(call(*args))
        return done

    async def stop(self) -> None:
        """Like a kill: without a controlled shutdown."""
        self.controller.became_inactive()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def kill_and_replace(self, *, keep_folder: bool = True) -> None:
        await self.stop()
        if not keep_folder:
            self.store.directory_id = uuid4()
        self.new_process()


class SmallMetadata:
    def __init__(self, node: SmallNode) -> None:
        self._node = node
        self.image = ClusterImage()
        self.applied_offset = -1
        self.is_active = False
        self.fails: ApiError | None = None
        self._moved = asyncio.Event()

    @property
    def next_offset(self) -> int:
        return len(self._node.cluster.records)

    @property
    def committed_offset(self) -> int:
        return self.applied_offset

    def follow(self) -> None:
        records = self._node.cluster.records
        image = self.image.fork()
        image.apply(records[self.applied_offset + 1 :])
        image.check_invariants()
        self.image, self.applied_offset = image, len(records) - 1
        self._moved.set()

    async def propose(self, decide: Callable[[ClusterImage], DecisionOrSteps[Any]]) -> Any:
        if not self.is_active:
            raise ApiError(ErrorCode.not_controller)
        if self.fails is not None:
            raise self.fails
        decided = decide(self.image)
        decision = decided if isinstance(decided, Decision) else finish(decided)
        if decision.records:
            self._node.cluster.commit(decision.records)
        await asyncio.sleep(0.001)
        return decision.reply

    async def reached(self, offset: int) -> None:
        while self.applied_offset < offset:
            self._moved.clear()
            await self._moved.wait()


class SmallQuorum:
    def __init__(self, node: SmallNode) -> None:
        self._node = node
        self.has_cluster = True
        #: Who leads, to the best of its knowledge; None: it knows.
        self.believes: int | None = None

    @property
    def leader_id(self) -> int:
        return self._node.cluster.leader_id if self.believes is None else self.believes

    @property
    def is_only_voter(self) -> bool:
        return len(self._node.cluster.nodes) == 1


class SmallPeers:
    """Requests and responses as bytes of the newest version that is served."""

    def __init__(self, node: SmallNode) -> None:
        self._node = node

    async def call(
        self, where: int, api_key: int, request: Any, *, timeout_s: float, purpose: str = "control"
    ) -> Any:
        cluster, here = self._node.cluster, self._node.node_id
        if (here, where) in cluster.cuts:
            await asyncio.sleep(0.01)
            raise PeerUnreachable(f"no way to {where}", refused=False)
        async with asyncio.timeout(timeout_s):
            response = await self._answer(cluster[where], api_key, request)
            if where in cluster.frozen:
                await asyncio.sleep(timeout_s + 1)
        return response

    async def _answer(self, target: SmallNode, api_key: int, request: Any) -> Any:
        version = APIS[api_key].max_version
        target.cluster.heard.append((target.node_id, api_key))
        context = RequestContext(
            target,
            api_key,
            version,
            f"penstock-{self._node.node_id}",
            "127.0.0.1",
            "PLAINTEXT",  # type: ignore[arg-type]
        )
        found = route(api_key, version)
        response = found.handle(context, found.decode(memoryview(_bytes(api_key, version, request)), 0))
        if asyncio.iscoroutine(response):
            response = await response
        out = io.BytesIO()
        found.encode(out, response)
        return entity_reader(load_response_schema(api_key, version))(out.getvalue(), 0)[0]


def _bytes(api_key: int, version: int, request: Any) -> bytes:
    out = io.BytesIO()
    entity_writer(load_request_schema(api_key, version))(out, request)
    return out.getvalue()


def topic_id(cluster: Cluster, name: str) -> UUID:
    return cluster.leader.image.topics[name].id
