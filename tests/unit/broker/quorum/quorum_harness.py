"""Nodes that are only members of a quorum: real files, real sockets, one event loop."""

from __future__ import annotations

import asyncio
import inspect
import struct
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.ports import free_port
from tests.waiting import eventually_async

from penstock.broker.config.listeners import Listener
from penstock.broker.config.node_settings import NodeSettings, load_settings
from penstock.broker.network.apis import (
    APIS,
    FETCH,
    decode_request,
    encode_response,
    parse_request_header,
    skip_header_tags,
)
from penstock.broker.network.peers import Peers
from penstock.broker.network.requests import RequestContext
from penstock.broker.quorum import Quorum
from penstock.broker.quorum.metadata_log import MetadataLog
from penstock.cluster.controller.decision import Decision
from penstock.cluster.image import ClusterImage, ImageDelta, ResourceType
from penstock.cluster.metadata_records import ConfigRecord
from penstock.log.log import Log
from penstock.log.log_manager import LogManager
from penstock.protocol.errors import ApiError, ErrorCode

FAST = {
    "controller.quorum.election.timeout.ms": "150",
    "controller.quorum.fetch.timeout.ms": "400",
    "controller.quorum.election.backoff.max.ms": "50",
    "controller.quorum.request.timeout.ms": "400",
}
PATIENCE_S = 60.0


class RecordingController:
    def __init__(self) -> None:
        self.events: list[str] = []

    def active_changed(self, is_active: bool) -> None:
        self.events.append("active" if is_active else "inactive")


class Member:
    """As much of a node as a quorum needs."""

    def __init__(self, folder: Path, node_id: int, port: int, settings: Mapping[str, str]) -> None:
        self.node_id = node_id
        self.folder = folder
        self.settings: NodeSettings = load_settings(
            {
                "node.id": str(node_id),
                "log.dirs": str(folder),
                "listeners": f"127.0.0.1:{port}",
                "inter.broker.listener.name": "PLAINTEXT",  # there are no clients to be kept apart
                **FAST,
                **settings,
            },
            {},
        )
        self.state = "starting"
        self.listeners: tuple[Listener, ...] = ()
        self.controller = RecordingController()
        self.followed: list[ImageDelta] = []
        self.syncs = 0
        self.peers = Peers(node_id, address_of=lambda id: self.quorum.address_of(id))
        self.executor = ThreadPoolExecutor(2)
        self.store: LogManager
        self.quorum: Quorum
        self.metadata: MetadataLog
        self._server: asyncio.Server
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def image(self) -> ClusterImage:
        return self.metadata.image

    @property
    def cluster_id(self) -> str:
        return self.store.cluster_id

    async def open(self) -> None:
        """Data opened and listening, as a node does before it looks for its place."""
        self.store = LogManager.open(self.folder, node_id=self.node_id, founding=self.settings.is_standalone)
        self.quorum = Quorum(
            self,
            self.settings,
            self.store,
            peers=lambda: self.peers,
            listeners=lambda: self.listeners,
            is_starting=lambda: self.state == "starting",
        )
        self.metadata = MetadataLog(
            self,
            self.settings,
            self.quorum,
            follow=self._follow,
            image_changed=lambda delta: None,
            active_changed=self.controller.active_changed,
        )
        self.quorum.open()
        self.metadata.open()
        host, port = self.settings.listeners[0].host, self.settings.listeners[0].port
        self._server = await asyncio.start_server(self._serve, host, port)
        port = self._server.sockets[0].getsockname()[1]
        self.listeners = (self.settings.listeners[0]._replace(port=port),)

    async def start(self) -> Member:
        await self.open()
        await self.quorum.start()
        await self.metadata.caught_up()
        await self.metadata.follow(self.metadata.applied_offset)
        self.state = "serving"
        return self

    async def stop(self) -> None:
        await self.quorum.stop()
        await self.kill(clean=True)

    async def kill(self, *, clean: bool = False) -> None:
        """As a process that ends: its sockets close, and nothing of it goes on."""
        self.state = "stopped"
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        await self.peers.close()
        self.executor.shutdown(wait=True)
        self.store.close(clean=clean)

    async def set(self, name: str, value: str) -> None:
        """Something small to decide."""
        record = ConfigRecord(resource_type=ResourceType.BROKER, resource_name="", name=name, value=value)
        await self.metadata.propose(lambda image: Decision((record,), None))

    def get(self, name: str) -> str | None:
        return self.image.config(ResourceType.BROKER, "").get(name)

    # -- what a node offers ----------------------------------------------------------------------------

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def in_thread(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> asyncio.Future[Any]:
        return asyncio.wrap_future(self.executor.submit(call, *args, **kwargs))

    async def sync(self, log: Log) -> None:
        flush_job = log.flush_begin()
        if flush_job is not None:
            self.syncs += 1
            await self.in_thread(flush_job.run)
            log.flush_done(flush_job)

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    async def _follow(self, delta: ImageDelta, image: ClusterImage) -> None:
        self.followed.append(delta)

    # -- the wire --------------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while True:
                (size,) = struct.unpack(">i", await reader.readexactly(4))
                frame = await reader.readexactly(size)
                writer.write(await self._answer(frame))
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _answer(self, frame: bytes) -> bytes:
        header = parse_request_header(memoryview(frame))
        ctx = RequestContext(self, header.api_key, header.version, None, "?", "PLAINTEXT")  # type: ignore[arg-type]
        if header.api_key == FETCH:
            position = skip_header_tags(memoryview(frame), header.position)
            return await self.quorum.answer_fetch(ctx, frame, position, header.correlation_id)
        response = APIS[header.api_key].handler(ctx, decode_request(header, memoryview(frame)))
        if inspect.isawaitable(response):
            response = await response
        return encode_response(header.api_key, header.version, header.correlation_id, response)


async def until(condition: Callable[[], Any], what: str) -> Any:
    """Wait for something that the members bring about among themselves."""

    async def check() -> Any:
        return condition()

    return await eventually_async(check, within_s=PATIENCE_S, what=what)


async def within(work: Awaitable[Any]) -> Any:
    async with asyncio.timeout(PATIENCE_S):
        return await work


class Cluster:
    """Members 1, 2, ... that found a cluster together, each with a port and a folder of its own."""

    def __init__(self, folder: Path, size: int = 3, **settings: str) -> None:
        self.ports = {node_id: free_port() for node_id in range(1, size + 1)}
        self.voters = ",".join(f"{id}@127.0.0.1:{port}" for id, port in self.ports.items())
        self.settings = {name.replace("_", "."): value for name, value in settings.items()}
        self.members: dict[int, Member] = {}
        self._folder = folder

    def member(self, node_id: int, **settings: str) -> Member:
        """A new process of this member, on the folder it has."""
        more = {name.replace("_", "."): value for name, value in settings.items()}
        member = Member(
            self._folder / str(node_id),
            node_id,
            self.ports[node_id],
            {"controller.quorum.voters": self.voters, **self.settings, **more},
        )
        self.members[node_id] = member
        return member

    async def start(self) -> None:
        await within(asyncio.gather(*(self.member(id).start() for id in self.ports)))
        await self.all_vote()

    async def all_vote(self) -> None:
        ids = tuple(self.members)
        await until(lambda: all(m.quorum.voters.ids == ids for m in self.running), "all are voters")

    @property
    def running(self) -> list[Member]:
        return [member for member in self.members.values() if member.state != "stopped"]

    async def active(self) -> Member:
        """The one active controller that a majority knows."""

        def found() -> Member | None:
            active = [member for member in self.running if member.metadata.is_active]
            return active[0] if len(active) == 1 else None

        member: Member = await until(found, "one active controller")
        return member

    async def set(self, name: str, value: str) -> None:
        """Through the active controller, with retries as a client has them."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    return await (await self.active()).set(name, value)
                except ApiError as error:
                    if error.code is not ErrorCode.not_controller:
                        raise

    async def all_have(self, name: str, value: str) -> None:
        await until(lambda: all(m.get(name) == value for m in self.running), f"all have {name}={value}")

    async def kill(self, *ids: int) -> None:
        for node_id in ids:
            await self.members[node_id].kill()

    async def close(self) -> None:
        for member in self.running:
            await member.kill()
