"""The rates of one tenant on one node, and this node's part of a limit for the whole cluster.

Every few seconds, each node learns what a tenant uses on the other nodes. It then grants the tenant what they leave of
the limit, but at least the limit divided by the number of nodes. All nodes see the same unused rest at the same time.
If each of them took all of it at once, the grants together would exceed the limit, and all nodes would give the rest
back in the next round, and so on without end. Therefore a node of n changes its grant by only 1/n of the difference.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from penstock.security.quotas import CONSUMER_BYTE_RATE, PRODUCER_BYTE_RATE, QuotaUsage

REQUEST_RATE: Final = "request_rate"
RATES: Final = (PRODUCER_BYTE_RATE, CONSUMER_BYTE_RATE, REQUEST_RATE)


def next_grant(grant: float, limit: float, *, elsewhere: float, nodes: int) -> float:
    """Return what this node grants from now on; `elsewhere` is what the other nodes have measured together."""
    target = max(limit - elsewhere, limit / nodes)
    return grant + (target - grant) / nodes


class TenantRates:
    """Measured as client quotas are: over ten to eleven windows of a second, so that a burst is allowed."""

    __slots__ = ("_grants", "_limits", "throttled_ms", "totals", "usages")

    def __init__(self, windows: int, window_ms: int) -> None:
        self.usages = {kind: QuotaUsage(windows, window_ms) for kind in RATES}
        self._limits: dict[str, float] = {}
        self._grants: dict[str, float] = {}
        #: What was used since this node started, by kind.
        self.totals = dict.fromkeys(RATES, 0.0)
        self.throttled_ms = 0

    def limit(self, limits: Mapping[str, float]) -> None:
        """Take these limits. A limit that is new or has changed is granted as a whole, until other nodes report."""
        wanted = {kind: limits[kind] for kind in RATES if kind in limits}
        self._grants = {
            kind: self._grants[kind] if self._limits.get(kind) == limit else limit
            for kind, limit in wanted.items()
        }
        self._limits = wanted

    def settle(self, elsewhere: Mapping[str, float], nodes: int) -> None:
        """Take one step towards what the other nodes leave of the limits."""
        for kind, limit in self._limits.items():
            self._grants[kind] = next_grant(
                self._grants[kind], limit, elsewhere=elsewhere.get(kind, 0.0), nodes=nodes
            )

    def grant(self, kind: str) -> float | None:
        """Return how much per second this node grants; None without a limit."""
        return self._grants.get(kind)

    def record(self, kind: str, amount: float, now_ms: int) -> int:
        """Record what was used; return for how long the connection that used it has to wait."""
        self.totals[kind] += amount
        usage, grant = self.usages[kind], self._grants.get(kind)
        if grant is None:
            usage.measure(amount, now_ms)
            return 0
        wait_ms = usage.record(amount, grant, now_ms)
        self.throttled_ms += wait_ms
        return wait_ms

    def left(self, kind: str) -> float:
        """Return what a connection may use at once."""
        grant = self._grants.get(kind)
        return math.inf if grant is None else self.usages[kind].left(grant)

    def per_second(self, kind: str, now_ms: int) -> float:
        return self.usages[kind].per_second(now_ms)
