"""TenantUsage (key 30002), v0: what tenants use.

This API is our own. Nodes ask each other with it what tenants use there, because limits hold for all nodes together;
`penstock tenant show` asks one node what it knows of all of them.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Final, NamedTuple

from penstock.protocol.errors import MalformedFrame

__all__ = [
    "TENANT_USAGE",
    "TenantUsage",
    "decode_usage",
    "encode_usage",
    "encode_usage_request",
    "parse_usage_request",
]

TENANT_USAGE: Final = 30_002
#: More than a cluster may have.
_TENANTS_MAX: Final = 10_000
_REQUEST: Final = struct.Struct(">B")
_COUNT: Final = struct.Struct(">I")
_ROW: Final = struct.Struct(">Hqqqqdddq")  # length of the name, then the usage in the order of its fields


class TenantUsage(NamedTuple):
    """On one node or on several together. Rates are per second; `partitions` is 0 for a single node."""

    connections: int = 0
    groups: int = 0
    partitions: int = 0
    stored_bytes: int = 0
    produced: float = 0.0
    fetched: float = 0.0
    requests: float = 0.0
    #: How long connections were told to wait so far, of this process of each node.
    throttled_ms: int = 0

    def plus(self, other: TenantUsage) -> TenantUsage:
        return TenantUsage(
            self.connections + other.connections,
            self.groups + other.groups,
            self.partitions + other.partitions,
            self.stored_bytes + other.stored_bytes,
            self.produced + other.produced,
            self.fetched + other.fetched,
            self.requests + other.requests,
            self.throttled_ms + other.throttled_ms,
        )


def encode_usage_request(*, of_cluster: bool) -> bytes:
    """`of_cluster`: of all nodes, as far as the receiver knows; otherwise of the receiver alone."""
    return _REQUEST.pack(of_cluster)


def parse_usage_request(frame: memoryview, position: int = 0) -> bool:
    """Return whether the usage of all nodes is asked for. Raises MalformedFrame."""
    try:
        return bool(_REQUEST.unpack_from(frame, position)[0])
    except struct.error as error:
        raise MalformedFrame(f"tenant usage: {error}") from None


def encode_usage(usage: Mapping[str, TenantUsage]) -> bytes:
    parts = [_COUNT.pack(len(usage))]
    for name, used in usage.items():
        raw = name.encode()
        parts += (_ROW.pack(len(raw), *used), raw)
    return b"".join(parts)


def decode_usage(frame: memoryview, position: int = 0) -> dict[str, TenantUsage]:
    """Raises MalformedFrame."""
    usage = {}
    try:
        (count,) = _COUNT.unpack_from(frame, position)
        if count > _TENANTS_MAX:
            raise ValueError(f"{count} tenants")
        position += _COUNT.size
        for _ in range(count):
            size, *used = _ROW.unpack_from(frame, position)
            position += _ROW.size
            if position + size > len(frame):
                raise ValueError("cut short")
            usage[str(frame[position : position + size], "utf-8")] = TenantUsage(*used)
            position += size
    except (struct.error, ValueError) as error:
        raise MalformedFrame(f"tenant usage: {error}") from None
    return usage
