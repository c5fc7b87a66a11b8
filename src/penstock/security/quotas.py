"""Client quotas: which limit applies to a client, and how long a client that exceeds it has to wait.

As in Apache Kafka, a quota belongs to a user, a client id, both, or the default of either; the most specific one
applies, and clients that it covers together share it. Rates are measured over ten to eleven windows of a second, and
what exceeds them is owed: all connections of the clients that share a quota together get no more than it allows.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Final, NamedTuple

from penstock.protocol.quota_entities import IP, canonical_entity

PRODUCER_BYTE_RATE: Final = "producer_byte_rate"
CONSUMER_BYTE_RATE: Final = "consumer_byte_rate"
REQUEST_PERCENTAGE: Final = "request_percentage"
CONTROLLER_MUTATION_RATE: Final = "controller_mutation_rate"
CONNECTION_CREATION_RATE: Final = "connection_creation_rate"

USER: Final = "user"
CLIENT_ID: Final = "client-id"

#: The limits that each kind of entity may have.
CLIENT_QUOTAS: Final = frozenset(
    {PRODUCER_BYTE_RATE, CONSUMER_BYTE_RATE, REQUEST_PERCENTAGE, CONTROLLER_MUTATION_RATE}
)
IP_QUOTAS: Final = frozenset({CONNECTION_CREATION_RATE})

#: An entity as the metadata stores it: (type, name) pairs in the order of their types; a name of None is the default.
Entity = tuple[tuple[str, str | None], ...]

_DEFAULT: Final = None
_SLACK_S: Final = 0.001
#: What one connection may use in a turn while more is owed than the windows allow.
_TURN_S: Final = 0.25
#: Clients that sent nothing for this long are forgotten; their windows have run out long before.
_IDLE_MS: Final = 3_600_000


class Limit(NamedTuple):
    """A limit and the clients that share it. `sharers` is the part of (user, client id) that the entity names."""

    per_second: float
    sharers: tuple[str | None, str | None]


class ClientQuotas:
    """The quotas of the cluster, looked up by user and client id."""

    def __init__(self, quotas: Mapping[Entity, Mapping[str, float]]) -> None:
        self._limits: dict[str, dict[Entity, float]] = {}
        for entity, limits in quotas.items():
            canonical = canonical_entity(entity)
            for name, value in limits.items():
                known = self._limits.setdefault(name, {})
                # Older versions stored addresses as they were spelled; the one that was in force stays so.
                if canonical == entity or canonical not in quotas:
                    known[canonical] = value
        #: The kinds of quotas for which a limit exists.
        self.kinds = frozenset(self._limits)

    def limit(self, kind: str, user: str, client_id: str) -> Limit | None:
        """Return the limit of the most specific entity that covers the client."""
        limits = self._limits.get(kind)
        if limits is None:
            return None
        # Most specific first; the order is Apache Kafka's. What names a user or a client id, also as the default,
        # gives each of them a share of its own.
        for named_user, named_client, sharers in (
            (user, client_id, (user, client_id)),
            (user, _DEFAULT, (user, client_id)),
            (user, ..., (user, None)),
            (_DEFAULT, client_id, (user, client_id)),
            (_DEFAULT, _DEFAULT, (user, client_id)),
            (_DEFAULT, ..., (user, None)),
            (..., client_id, (None, client_id)),
            (..., _DEFAULT, (None, client_id)),
        ):
            found = limits.get(_entity(named_user, named_client))
            if found is not None:
                return Limit(found, sharers)
        return None

    def connection_rate(self, host: str) -> float | None:
        """Return how many connections per second a host may open."""
        limits = self._limits.get(CONNECTION_CREATION_RATE, {})
        if not limits:
            return None
        found = limits.get(canonical_entity(((IP, host),)))
        return found if found is not None else limits.get(((IP, _DEFAULT),))


def _entity(user: object, client_id: object) -> Entity:
    """`...` leaves a part out."""
    parts = ((CLIENT_ID, client_id), (USER, user))
    return tuple((kind, name) for kind, name in parts if name is not ...)  # type: ignore[misc]


class Rate:
    """An amount per second, averaged over several windows, as Apache Kafka measures it.

    With eleven windows of a second, a window counts in full until it began eleven seconds ago. For a client that has
    just begun, the sum is divided by ten seconds, although less time has passed. So the quota limits the average over
    ten to eleven seconds, and a client may send ten seconds' worth in one burst.
    """

    __slots__ = ("_samples", "_span_ms_min", "_total", "_window_ms", "_windows")

    def __init__(self, windows: int, window_ms: int) -> None:
        assert windows > 1
        assert window_ms > 0
        self._windows, self._window_ms = windows, window_ms
        self._span_ms_min = (windows - 1) * window_ms
        self._samples: deque[list[float]] = deque()  # [start, amount], oldest first
        self._total = 0.0

    def record(self, amount: float, now_ms: int) -> None:
        self._expire(now_ms)
        samples = self._samples
        if not samples or now_ms - samples[-1][0] >= self._window_ms:
            samples.append([now_ms, 0.0])
        samples[-1][1] += amount
        self._total += amount

    def left(self, limit: float, now_ms: int) -> float:
        """Return what may be used at once before all windows have as much as the limit allows; negative if they do."""
        self._expire(now_ms)
        return limit * self._windows * self._window_ms / 1000 - self._total

    def per_second(self, now_ms: int) -> float:
        self._expire(now_ms)
        return self._total * 1000 / self._span_ms(now_ms)

    def throttle_ms(self, limit: float, now_ms: int) -> int:
        """Return how long until the average is back at the limit if nothing more comes; 0 if it is not exceeded."""
        self._expire(now_ms)
        span_ms = self._span_ms(now_ms)
        excess = self._total * 1000 / span_ms - limit
        return 0 if excess <= 0 else round(min(excess / limit * span_ms, _IDLE_MS)) if limit > 0 else _IDLE_MS

    def is_idle(self, now_ms: int) -> bool:
        return not self._samples or now_ms - self._samples[-1][0] >= _IDLE_MS

    def _span_ms(self, now_ms: int) -> float:
        elapsed_ms = now_ms - self._samples[0][0] if self._samples else 0
        missing = self._windows - 1 - elapsed_ms // self._window_ms
        return max(elapsed_ms + max(missing, 0) * self._window_ms, 1)

    def _expire(self, now_ms: int) -> None:
        samples, oldest_ms = self._samples, now_ms - self._windows * self._window_ms
        while samples and samples[0][0] <= oldest_ms:
            self._total -= samples.popleft()[1]
        if len(samples) <= 1:
            self._total = samples[0][1] if samples else 0.0  # no rounding errors are carried along


class QuotaUsage:
    """What the clients that share a limit have used on all their connections, and how long each of these waits.

    The average over the windows decides as in Apache Kafka, but it forgets: what is older than the windows no longer
    counts. Connections that all wait for the average to fall would use the limit once for each of them. So what
    exceeds a burst is also owed until it is paid for at the rate of the limit. A connection waits until everything is
    paid that was used before, by all: the waits add up, and the connections take turns.
    """

    __slots__ = ("_average_wait_ms_max", "_bucket", "_burst_s", "_left", "_rate", "_request_wait_ms_max")

    def __init__(self, windows: int, window_ms: int, *, request_wait_ms_max: int | None = None) -> None:
        """`request_wait_ms_max`: no request owes more than what is paid for in this time."""
        self._rate = Rate(windows, window_ms)
        self._bucket = TokenBucket(windows - 1, window_ms)  # a burst of what the average allows at once
        self._burst_s = (windows - 1) * window_ms / 1000
        self._request_wait_ms_max = request_wait_ms_max
        # After all windows the average is 0, however high it was.
        self._average_wait_ms_max = (
            windows * window_ms if request_wait_ms_max is None else request_wait_ms_max
        )
        self._left = math.inf

    def measure(self, amount: float, now_ms: int) -> None:
        """Record what no limit applies to."""
        self._rate.record(amount, now_ms)

    def record(self, amount: float, limit: float, now_ms: int) -> int:
        """Return for how many milliseconds the connection that has used the amount waits."""
        rate, bucket = self._rate, self._bucket
        rate.record(amount, now_ms)
        if self._request_wait_ms_max is not None:
            amount = min(amount, limit * self._request_wait_ms_max / 1000)
        bucket.record(amount, limit, now_ms)
        tokens = bucket.tokens(limit, now_ms)
        self._left = min(rate.left(limit, now_ms), tokens)
        wait_ms = min(rate.throttle_ms(limit, now_ms), self._average_wait_ms_max)
        return wait_ms if tokens >= 0 else max(wait_ms, bucket.throttle_ms(limit, now_ms))

    def owed_ms(self, limit: float, now_ms: int) -> int:
        """Return how long it takes to pay for what is owed; 0 if nothing is."""
        return self._bucket.throttle_ms(limit, now_ms)

    def reserve(self, amount: float, limit: float, now_ms: int) -> None:
        """Let the amount be owed before it is used, so that those who come later wait for it too."""
        self._bucket.record(amount, limit, now_ms)
        self._left -= amount

    def give_back(self, amount: float) -> None:
        """The reserved amount will not be used, or is recorded now."""
        self._bucket.give_back(amount)
        self._left += amount

    def left(self, limit: float) -> float:
        """Return what a connection may use at once: what is left of the burst, or else what one turn has.

        As of the last record, so that it costs next to nothing.
        """
        return min(max(self._left, 0.0), limit * self._burst_s) + limit * _TURN_S

    def per_second(self, now_ms: int) -> float:
        return self._rate.per_second(now_ms)

    def is_idle(self, now_ms: int) -> bool:
        return self._rate.is_idle(now_ms)


class Reservation(NamedTuple):
    """What a connection will use when it has waited for its turn."""

    usage: QuotaUsage
    amount: float

    def end(self) -> None:
        self.usage.give_back(self.amount)


class Meter:
    """What limits a client, and what it has used, together with those that share the limit.

    What it uses waits in `pending` until it is more than `slack`, a thousandth of what the limit allows in a second:
    who adds to it pays for an addition and two comparisons. Everything else is up to `record`.
    """

    __slots__ = ("client_id", "limit", "pending", "slack", "usage")

    def __init__(self, client_id: str | None, limit: Limit | None, usage: QuotaUsage) -> None:
        """Without a limit, the usage is of no interest."""
        self.client_id = client_id
        self.limit = limit
        self.usage = usage
        self.pending = 0.0
        self.slack = math.inf if limit is None else limit.per_second * _SLACK_S

    def record(self, amount: float, now_ms: int) -> int:
        """Record the amount and what is pending; return for how many milliseconds the client has to wait."""
        amount, self.pending = amount + self.pending, 0.0
        if self.limit is None:
            return 0
        return self.usage.record(amount, self.limit.per_second, now_ms)

    def retire(self) -> None:
        """Let nothing be pending any more: another meter records what the client uses."""
        self.slack = -1.0


class TokenBucket:
    """For operations that may come in bursts: what one burst has used up comes back at the rate of the limit."""

    __slots__ = ("_burst_s", "_last_ms", "_tokens", "_used_ms")

    def __init__(self, windows: int, window_ms: int) -> None:
        self._burst_s = windows * window_ms / 1000
        self._tokens: float | None = None  # full
        self._last_ms = self._used_ms = 0

    def record(self, amount: float, limit: float, now_ms: int) -> None:
        self._tokens, self._last_ms = self.tokens(limit, now_ms) - amount, now_ms
        self._used_ms = now_ms

    def give_back(self, amount: float) -> None:
        """An operation that was recorded does not take place."""
        if self._tokens is not None:
            self._tokens += amount

    def tokens(self, limit: float, now_ms: int) -> float:
        burst = self._burst_s * limit
        if self._tokens is None:
            return burst
        return min(burst, self._tokens + limit * max(now_ms - self._last_ms, 0) / 1000)

    def throttle_ms(self, limit: float, now_ms: int) -> int:
        """Return how long until an operation is allowed again: as soon as nothing is owed."""
        tokens = self.tokens(limit, now_ms)
        if tokens >= 0:
            return 0
        return round(min(-tokens / limit * 1000, _IDLE_MS)) if limit > 0 else _IDLE_MS

    def is_idle(self, now_ms: int) -> bool:
        return now_ms - self._used_ms >= _IDLE_MS
