"""What a group's settings say about its share partitions, as the rules need it."""

from typing import NamedTuple


class Backoff(NamedTuple):
    """How long a released record rests: `min(cap, base * 2^attempt)` and a random part of the jitter."""

    base_ms: int
    cap_ms: int
    jitter_ms: int
    is_exponential: bool

    def delay_ms(self, delivery_count: int, chance: float) -> int:
        """`chance` is from 0 to 1; the first release is attempt 0."""
        wait_ms = self.base_ms
        if self.is_exponential:
            wait_ms = min(self.cap_ms, self.base_ms << min(max(delivery_count - 1, 0), 32))
        return wait_ms + int(self.jitter_ms * chance)


class Policy(NamedTuple):
    lock_ms: int = 30_000
    delivery_limit: int = 5
    locks_max: int = 2_000
    may_renew: bool = True
    is_at_most_once: bool = False
    buries: bool = False  # what is given up goes to a dead-letter topic
    backoff: Backoff | None = None

    @property
    def window_max(self) -> int:
        """Offsets between the oldest record that is not final and the newest that was handed out.

        Wider than the locks, so that one slow record does not stop its neighbours, and bounded, because the whole
        window is kept in memory.
        """
        return 10 * self.locks_max
