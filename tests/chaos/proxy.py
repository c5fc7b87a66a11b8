"""`python -m tests.chaos.proxy`: the network between the nodes of a cluster, as one process that can break it.

Every node is reached only through its doors here. Who knocks is told by the source address, or by the process where a
node calls from no address of its own, so that each ordered pair has a path of its own. Bytes that travel from A to B
are held back while that path is cut, whichever of the two opened the connection: a held connection stays open, because
a closed socket tells the peer more than a dead network does.
Commands arrive as JSON lines on stdin, each answered with one JSON line.
"""

import asyncio
import json
import sys
from typing import Any, NamedTuple

from tests.chaos.callers import caller
from tests.chaos.held_requests import Ambush, Road

OUTSIDE = "clients"  # all that are not known nodes
HIGH_WATER_BYTES = 1 << 20


class Path(NamedTuple):
    source: str
    target: str


class Door(NamedTuple):
    """Where peers knock for a node, and where it really listens."""

    node: str
    host: str
    port: int
    behind: tuple[str, int]


class Rules:
    """What the network does to each path at the moment."""

    def __init__(self) -> None:
        self.cut: set[Path] = set()
        self.refused: set[Path] = set()
        self.delay_s: dict[Path, float] = {}

    def holds(self, path: Path) -> bool:
        return path in self.cut

    def connects(self, source: str, target: str) -> bool:
        """A connection begins with packets both ways."""
        return not (self.holds(Path(source, target)) or self.holds(Path(target, source)))


class Side(asyncio.Protocol):
    """One end of a connection: what it reads travels along `path` to the other end."""

    def __init__(self, link: "Link", path: Path) -> None:
        self.link = link
        self.path = path
        self.transport: asyncio.Transport | None = None
        self.is_gone = False  # it has hung up, and the other end may not know yet
        self._is_choked = False  # the other end takes no more for now
        self._is_held = False
        self._free_at = 0.0

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)
        self.link.began(self)

    def data_received(self, data: bytes) -> None:
        delay = self.link.network.rules.delay_s.get(self.path, 0.0)
        loop = self.link.network.loop
        due = max(loop.time() + delay, self._free_at)
        if due <= loop.time():
            self.link.forward(self, data)
        else:
            self._free_at = due
            loop.call_at(due, self.link.forward, self, data)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self.is_gone = True
        # not before what is still on its way
        self.link.network.loop.call_at(self._free_at, self.link.hung_up, self)

    def pause_writing(self) -> None:
        self.link.other(self).choke(True)

    def resume_writing(self) -> None:
        self.link.other(self).choke(False)

    def choke(self, is_choked: bool) -> None:
        self._is_choked = is_choked
        self._breathe()

    def hold(self, is_held: bool) -> None:
        self._is_held = is_held
        self._breathe()

    def _breathe(self) -> None:
        if self.transport is None or self.transport.is_closing():
            return
        if self._is_choked or self._is_held or self.link.is_dialling:
            self.transport.pause_reading()
        else:
            self.transport.resume_reading()


class Link:
    """A connection through the proxy: a caller, the node it called, and what is held back between them."""

    def __init__(self, network: "Network", door: Door) -> None:
        self.network = network
        self.door = door
        self.source = OUTSIDE
        self.is_dialling = True  # not yet through to the node
        self._has_dialled = False
        self.road: Road | None = None  # where single requests of clients may be held
        self._is_over = False  # it was held, let go, and answered or cut off
        self._early: list[bytes] = []  # some versions of asyncio read on although they are told to pause
        self.caller = Side(self, Path(OUTSIDE, door.node))
        self.called = Side(self, Path(door.node, OUTSIDE))

    def other(self, side: Side) -> Side:
        return self.called if side is self.caller else self.caller

    def began(self, side: Side) -> None:
        if side is not self.caller:
            return
        assert side.transport is not None
        self.source = self.network.name_of(side.transport.get_extra_info("peername"))
        self.caller.path = Path(self.source, self.door.node)
        self.called.path = Path(self.door.node, self.source)
        self.network.links.add(self)
        if self.source == OUTSIDE and self.network.ambush is not None:
            self.road = Road(self.network.ambush)
        side.transport.pause_reading()
        self.dial()

    def dial(self) -> None:
        rules = self.network.rules
        if self.caller.path in rules.refused:
            self.reset()
        elif not self._has_dialled and rules.connects(*self.caller.path):
            self._has_dialled = True
            self.network.spawn(self._dial())

    async def _dial(self) -> None:
        host, port = self.door.behind
        try:
            await self.network.loop.create_connection(lambda: self.called, host, port)
        except OSError:
            self.reset()
            return
        self.is_dialling = False
        for data in self._early:
            self.forward(self.caller, data)
        if self.caller.is_gone:
            self.reset()
        self.refresh()

    def refresh(self) -> None:
        """The rules have changed."""
        if self.caller.path in self.network.rules.refused or self.called.path in self.network.rules.refused:
            self.reset()
            return
        for side in (self.caller, self.called):
            is_held = self.network.rules.holds(side.path)
            side.hold(is_held)
            if side.is_gone and not is_held:
                self._tell(side)
        self.dial()

    def forward(self, side: Side, data: bytes) -> None:
        if self.road is not None:
            data = self._on_the_road(self.road, side, data)
        self._pass_on(side, data)

    def _on_the_road(self, road: Road, side: Side, data: bytes) -> bytes:
        if side is self.caller:
            return road.send(data)
        self._note_end()
        return data

    def _note_end(self) -> None:
        if self.was_ambushed and not self.is_ambushed and not self._is_over:
            self._is_over = True
            self.network.over += 1

    def let_go(self) -> None:
        assert self.road is not None
        self._pass_on(self.caller, self.road.let_go())

    @property
    def is_ambushed(self) -> bool:
        return self.road is not None and self.road.is_blocked

    @property
    def was_ambushed(self) -> bool:
        return self.road is not None and self.road.has_been_blocked

    def _pass_on(self, side: Side, data: bytes) -> None:
        transport = self.other(side).transport
        if self.is_dialling:
            self._early.append(data)
        elif transport is not None and not transport.is_closing():
            transport.write(data)

    def hung_up(self, side: Side) -> None:
        if side is self.caller and self.was_ambushed:
            return  # the node shall get what was held, and have somebody to answer
        if not self.network.rules.holds(side.path):
            self._tell(side)

    def _tell(self, gone: Side) -> None:
        self._note_end()
        transport = self.other(gone).transport
        if transport is not None:
            transport.close()
        self.network.links.discard(self)

    def reset(self) -> None:
        for side in (self.caller, self.called):
            if side.transport is not None:
                side.transport.abort()
        self.network.links.discard(self)


class Network:
    """All doors and links, and the rules that a command may change."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.rules = Rules()
        self.links: set[Link] = set()
        self.ambush: Ambush | None = None
        self.over = 0  # requests that were let go, and answered or cut off
        self._names: dict[str, str] = {}
        self._pids: dict[str, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def name_of(self, address: tuple[str, int]) -> str:
        name = self._names.get(address[0])
        if name is None and self._pids:
            name = caller(address, self._pids)
        return OUTSIDE if name is None else name

    def spawn(self, work: Any) -> None:
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def open(self, node: str, host: str, behind: tuple[str, int]) -> int:
        """A door for a node; connections from `host` are that node's."""
        self._names[host] = node
        door = Door(node, host, 0, behind)
        server = await self.loop.create_server(lambda: Link(self, door).caller, host, 0, backlog=256)
        return int(server.sockets[0].getsockname()[1])

    def cut(self, paths: list[Path]) -> None:
        self.rules.cut |= set(paths)
        self._refresh()

    def refuse(self, paths: list[Path]) -> None:
        self.rules.refused |= set(paths)
        self._refresh()

    def delay(self, paths: list[Path], delay_s: float) -> None:
        self.rules.delay_s |= dict.fromkeys(paths, delay_s)

    def join(self, paths: list[Path]) -> None:
        """These flow again, while others stay cut."""
        self.rules.cut -= set(paths)
        self._refresh()

    def heal(self, *, reset: bool) -> int:
        """Everything flows again; what was held arrives late, or its connections are reset."""
        held = [link for link in self.links if not self.rules.connects(*link.caller.path)]
        self.rules = Rules()
        if reset:
            for link in held:
                link.reset()
        self._refresh()
        return len(held)

    def lie_in_wait(self, api_key: int) -> None:
        """For the next request of a client of that kind; connections of before are not watched."""
        assert self.ambush is not None, "requests are not watched"
        self.ambush.wanted[api_key] += 1

    def call_off(self) -> None:
        assert self.ambush is not None, "requests are not watched"
        self.ambush.wanted.clear()

    def let_go(self) -> int:
        caught = [link for link in self.links if link.is_ambushed]
        for link in caught:
            link.let_go()
        return len(caught)

    def held(self) -> dict[str, int]:
        return {"held": sum(link.is_ambushed for link in self.links), "over": self.over}

    def _refresh(self) -> None:
        for link in list(self.links):
            link.refresh()

    async def obey(self, command: dict[str, Any]) -> Any:
        paths = [Path(*pair) for pair in command.get("paths", ())]
        match command["do"]:
            case "open":
                host, port = command["behind"]
                return await self.open(command["node"], command["host"], (host, port))
            case "introduce":
                self._pids[command["node"]] = command["pid"]
                return None
            case "cut":
                return self.cut(paths)
            case "join":
                return self.join(paths)
            case "refuse":
                return self.refuse(paths)
            case "delay":
                return self.delay(paths, command["delay_s"])
            case "heal":
                return self.heal(reset=command["reset"])
            case "lie in wait":
                return self.lie_in_wait(command["api_key"])
            case "watch":
                self.ambush = Ambush()
                return None
            case "call off":
                return self.call_off()
            case "let go":
                return self.let_go()
            case "held":
                return self.held()
            case "links":
                return sorted([*link.caller.path] for link in self.links)
            case other:
                raise AssertionError(f"no such command: {other}")


async def _serve() -> None:
    loop = asyncio.get_running_loop()
    network = Network(loop)
    commands = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    while line := await commands.readline():
        answer = await network.obey(json.loads(line))
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    asyncio.run(_serve())
