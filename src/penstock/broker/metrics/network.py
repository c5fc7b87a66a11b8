"""The metrics of one node's connections, of what clients send over them, and of the requests it serves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from penstock.broker.metrics.counters import MetricFamily, counter, gauge, histogram_snapshot
from penstock.broker.network.apis import APIS

if TYPE_CHECKING:
    from penstock.broker.metrics.sources import MetricSources


def connection_families(sources: MetricSources) -> Iterator[MetricFamily]:
    metrics, server = sources.metrics, sources.server
    connections = Counter(connection.listener for connection in tuple(server.connections))
    yield MetricFamily(
        "gauge",
        "penstock_connections",
        "Open connections of clients.",
        ("listener",),
        [((listener.name,), connections[listener.name]) for listener in sources.listeners],
    )
    yield counter("penstock_connections_refused", "Connections over a limit.", metrics.connections_refused)
    yield MetricFamily(
        "counter",
        "penstock_client_throttle_seconds",
        "How long clients above a quota were told to wait.",
        ("quota",),
        [((kind,), wait_ms / 1000) for kind, wait_ms in sorted(sources.quotas.throttled_ms.items())],
    )
    yield MetricFamily(
        "gauge",
        "penstock_unauthenticated_connections",
        "Connections in their TLS handshake or SASL exchange.",
        ("listener",),
        [((listener,), count) for listener, count in server.unauthenticated_counts().items()],
    )
    yield MetricFamily(
        "counter",
        "penstock_tls_handshakes",
        "TLS handshakes that succeeded.",
        ("listener",),
        [((listener,), count) for listener, count in sorted(metrics.tls_handshakes.items())],
    )
    yield MetricFamily(
        "counter",
        "penstock_authentication_failures",
        "Connections that did not authenticate, by what went wrong.",
        ("listener", "kind"),
        [(labels, count) for labels, count in sorted(metrics.authentication_failures.items())],
    )
    yield MetricFamily(
        "counter",
        "penstock_node_requests_refused",
        "Requests that only nodes send, refused on a listener for clients.",
        ("api",),
        [((api,), count) for api, count in sorted(metrics.node_requests_refused.items())],
    )
    yield counter(
        "penstock_malformed_frames",
        "Connections cut off because of what they sent.",
        metrics.malformed_frames,
    )


def client_families(sources: MetricSources) -> Iterator[MetricFamily]:
    """What the node holds for its clients: the metrics they push, their memory and their fetch sessions."""
    if (telemetry := sources.telemetry.existing) is not None:
        yield gauge(
            "penstock_telemetry_clients", "Clients that have asked which metrics to push.", telemetry.clients
        )
        yield counter("penstock_telemetry_pushes", "Pushes of client metrics taken.", telemetry.pushes)
        yield counter("penstock_telemetry_bytes", "Bytes of client metrics taken.", telemetry.bytes_pushed)
    yield gauge(
        "penstock_request_buffer_bytes",
        "Memory held by requests that are still arriving.",
        sources.server.buffers.bytes_in_use,
    )
    yield gauge("penstock_fetch_sessions", "Incremental fetch sessions.", len(sources.fetch_sessions))
    yield counter(
        "penstock_fetch_session_evictions",
        "Sessions that made room for others.",
        sources.fetch_sessions.evictions,
    )


def request_families(sources: MetricSources) -> Iterator[MetricFamily]:
    metrics = sources.metrics
    yield MetricFamily(
        "histogram",
        "penstock_request_seconds",
        "Time from a whole request to its reply; a fetch includes the wait that it requests.",
        ("api",),
        [
            ((APIS[key].name,), histogram_snapshot(timings))
            for key, timings in metrics.requests.items()
            if key in APIS
        ],
    )
    yield MetricFamily(
        "counter",
        "penstock_request_errors",
        "Errors in replies, by their name in the protocol.",
        ("api", "error"),
        list(metrics.errors.items()),
    )
