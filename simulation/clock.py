"""A machine's clocks: a monotonic one that runs a little fast or slow, and a wall clock that may be set."""

from simulation.world import World

WALL_START_MS = 1_700_000_000_000


class Clock:
    __slots__ = ("_rate", "_wall_offset_ms", "_world")

    def __init__(self, world: World, *, rate: float = 1.0, skew_ms: int = 0) -> None:
        self._world = world
        self._rate = rate
        self._wall_offset_ms = WALL_START_MS + skew_ms

    def __repr__(self) -> str:
        return f"<Clock x{self._rate:.3f}, wall {self._wall_offset_ms - WALL_START_MS:+d} ms>"

    def monotonic_ms(self) -> int:
        return int(self._world.now_ms * self._rate)

    def wall_ms(self) -> int:
        return self.monotonic_ms() + self._wall_offset_ms

    def jump(self, by_ms: int) -> None:
        """Somebody sets the wall clock; the monotonic one does not notice."""
        self._wall_offset_ms += by_ms

    def mend(self) -> None:
        """Set to what the world's time is."""
        self._wall_offset_ms = WALL_START_MS + self._world.now_ms - self.monotonic_ms()

    def real_ms(self, delay_ms: int) -> int:
        """How long the world takes until this clock has gone on by so much; at least that."""
        return max(0, int(delay_ms / self._rate) + 1)
