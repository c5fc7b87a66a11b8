"""Messages that arrive late, twice, out of order or never; links cut both ways or one way; refused connections."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

from simulation.world import Life, World

#: What goes between a node and the controllers.
_CONTROL: Final = frozenset({"raft", "register", "heartbeat", "alter_partition", "lost"})

#: Kinds of requests that end so are sent over one connection: none is doubled or overtaken by the next.
IN_ORDER: Final = "in order"

#: What a caller hears: the reply, or None with whether the connection was refused or closed.
OnReply = Callable[[Any, bool], None]
Respond = Callable[[Any], None]


class Process(Protocol):
    life: Life

    def receive(self, kind: str, request: Any, respond: Respond) -> None: ...


@dataclass(slots=True, kw_only=True)
class Weather:
    """How bad the network is; faults change it while the world runs."""

    delay_ms: tuple[int, int] = (1, 4)
    slow_chance: float = 0.02
    slow_ms: tuple[int, int] = (10, 60)
    drop_chance: float = 0.0
    duplicate_chance: float = 0.0
    #: A second copy may come long after everybody has forgotten the first.
    duplicate_ms: tuple[int, int] = (1, 600)
    #: A client's request is held back until the client has given it up, sent it again, and gone on.
    hold_chance: float = 0.0
    hold_ms: tuple[int, int] = (150, 1_500)


class Path(NamedTuple):
    """One direction between two parties."""

    source: int
    target: int


class _Call:
    """One request under way; it is answered once, whatever the network does to its messages."""

    __slots__ = ("caller", "is_done", "kind", "on_reply", "request", "source", "target")

    def __init__(
        self, source: int, caller: Life, target: int, kind: str, request: Any, on_reply: OnReply
    ) -> None:
        self.source = source
        self.caller = caller
        self.target = target
        self.kind = kind
        self.request = request
        self.on_reply = on_reply
        self.is_done = False


class Network:
    def __init__(self, world: World, weather: Weather) -> None:
        self.world = world
        self.weather = weather
        self.processes: dict[int, Process] = {}
        #: Machines without power or cable: nobody is there even to refuse.
        self.silent: set[int] = set()
        self.cut: dict[Path, None] = {}
        #: Nodes that reach other brokers and clients, but no controller.
        self.blind: set[int] = set()
        self.messages = 0
        self.lost = 0
        self._air = Life("network")
        self._arrivals: dict[Path, int] = {}
        self._open: dict[Life, list[_Call]] = {}

    def __repr__(self) -> str:
        return f"<Network {self.messages} messages, {self.lost} lost, cut {list(self.cut)}>"

    def call(
        self,
        source: int,
        caller: Life,
        target: int,
        kind: str,
        request: Any,
        on_reply: OnReply,
        timeout_ms: int,
    ) -> None:
        call = _Call(source, caller, target, kind, request, on_reply)
        if kind in _CONTROL and (source in self.blind or target in self.blind):
            self.lost += 1
        elif source < 0 and self._is_held(kind):
            self.messages += 1
            self.world.after(self.world.between(*self.weather.hold_ms), self._air, self._arrive, call)
        elif source < 0 or kind.endswith(IN_ORDER):
            self._carry_in_order(source, target, self._arrive, call)
        else:
            self._carry(source, target, self._arrive, call)
        self.world.after(timeout_ms, caller, self._finish, call, None, False)

    def cut_both_ways(self, one: int, other: int) -> None:
        self.cut[Path(one, other)] = self.cut[Path(other, one)] = None

    def cut_one_way(self, source: int, target: int) -> None:
        self.cut[Path(source, target)] = None

    def heal(self) -> None:
        self.cut.clear()
        self.blind.clear()

    def ended(self, life: Life) -> None:
        """A process died and its machine closes its connections: whoever waits for it hears of that."""
        for call in self._open.pop(life, ()):
            if not call.is_done:
                self._carry(call.target, call.source, self._answer, call, None, True)

    def _is_held(self, kind: str) -> bool:
        chance = self.weather.hold_chance
        return bool(chance) and not kind.endswith(IN_ORDER) and self.world.chance(chance)

    def _carry(self, source: int, target: int, deliver: Callable[..., None], *args: Any) -> None:
        world, weather = self.world, self.weather
        self.messages += 1
        if (source, target) in self.cut or world.chance(weather.drop_chance):
            self.lost += 1
            return
        world.after(self._delay_ms(), self._air, deliver, *args)
        if weather.duplicate_chance and world.chance(weather.duplicate_chance):
            world.after(world.between(*weather.duplicate_ms), self._air, deliver, *args)

    def _carry_in_order(self, source: int, target: int, deliver: Callable[..., None], *args: Any) -> None:
        """A client keeps one connection: what it sends arrives once and in order, or not at all."""
        self.messages += 1
        path = Path(source, target)
        if path in self.cut or self.world.chance(self.weather.drop_chance):
            self.lost += 1
            return
        at_ms = max(self.world.now_ms + self._delay_ms(), self._arrivals.get(path, 0))
        self._arrivals[path] = at_ms
        self.world.after(at_ms - self.world.now_ms, self._air, deliver, *args)

    def _delay_ms(self) -> int:
        weather = self.weather
        low, high = weather.slow_ms if self.world.chance(weather.slow_chance) else weather.delay_ms
        return self.world.between(low, high)

    def _arrive(self, call: _Call) -> None:
        process = self.processes.get(call.target)
        if process is None or process.life.is_over:
            if call.target not in self.silent:
                self._carry(call.target, call.source, self._answer, call, None, True)
            return
        life = process.life
        waiting = self._open.setdefault(life, [])
        waiting.append(call)
        if len(waiting) > 64:
            self._open[life] = [each for each in waiting if not each.is_done]
        # Through the queue of the process, so that a frozen one takes it up when it thaws.
        if life.is_frozen:
            life.waiting.append((self._take_up, (process, call)))
        else:
            self._take_up(process, call)

    def _take_up(self, process: Process, call: _Call) -> None:
        def respond(reply: Any) -> None:
            self._carry(call.target, call.source, self._answer, call, reply, False)

        process.receive(call.kind, call.request, respond)

    def _answer(self, call: _Call, reply: Any, refused: bool) -> None:
        if call.caller.is_over or call.is_done:
            return
        if call.caller.is_frozen:
            call.caller.waiting.append((self._finish, (call, reply, refused)))
        else:
            self._finish(call, reply, refused)

    def _finish(self, call: _Call, reply: Any, refused: bool) -> None:
        if not call.is_done:
            call.is_done = True
            call.on_reply(reply, refused)
