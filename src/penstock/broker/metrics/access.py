"""The metrics of tenants and of the audit trail on one node.

`penstock tenant show` has those of a tenant on all nodes together.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from penstock.broker.metrics.counters import MetricFamily, counter
from penstock.security.quotas import CONSUMER_BYTE_RATE, PRODUCER_BYTE_RATE
from penstock.security.tenant_limits import REQUEST_RATE

if TYPE_CHECKING:
    from penstock.broker.network.audit import AuditTrail
    from penstock.broker.network.tenants import TenantManager


def tenant_families(tenants: TenantManager) -> Iterator[MetricFamily]:
    """What tenants use on this node; there are no more labels than tenants that an operator has created."""
    here = [(found.tenant.name, found) for found in tenants.here]
    yield MetricFamily(
        "gauge",
        "penstock_tenant_connections",
        "Open connections of a tenant's users on this node.",
        ("tenant",),
        [((name,), found.connections) for name, found in here],
    )
    yield MetricFamily(
        "gauge",
        "penstock_tenant_groups",
        "Groups of a tenant that this node coordinates.",
        ("tenant",),
        [((name,), found.groups + len(found.new_groups)) for name, found in here],
    )
    yield MetricFamily(
        "gauge",
        "penstock_tenant_stored_bytes",
        "Bytes of a tenant's topics on the disks of this node.",
        ("tenant",),
        [((name,), found.stored_bytes) for name, found in here],
    )
    yield MetricFamily(
        "counter",
        "penstock_tenant_produced_bytes",
        "Bytes of Produce requests of a tenant's users.",
        ("tenant",),
        [((name,), found.rates.totals[PRODUCER_BYTE_RATE]) for name, found in here],
    )
    yield MetricFamily(
        "counter",
        "penstock_tenant_fetched_bytes",
        "Bytes of records that a tenant's users have fetched.",
        ("tenant",),
        [((name,), found.rates.totals[CONSUMER_BYTE_RATE]) for name, found in here],
    )
    yield MetricFamily(
        "counter",
        "penstock_tenant_requests",
        "Requests of a tenant's users.",
        ("tenant",),
        [((name,), found.rates.totals[REQUEST_RATE]) for name, found in here],
    )
    yield MetricFamily(
        "counter",
        "penstock_tenant_throttle_seconds",
        "How long connections of a tenant above a limit were told to wait.",
        ("tenant",),
        [((name,), found.rates.throttled_ms / 1000) for name, found in here],
    )
    yield MetricFamily(
        "counter",
        "penstock_tenant_refused",
        "Connections and groups that a limit of the tenant has refused on this node.",
        ("tenant", "limit"),
        [((name, what), count) for name, found in here for what, count in found.refused.items()],
    )


def audit_families(audit: AuditTrail) -> Iterator[MetricFamily]:
    yield counter(
        "penstock_audit_lines_left_out",
        "Lines of the audit trail above a principal's budget.",
        audit.left_out,
    )
    if audit.topic is not None:
        yield counter(
            "penstock_audit_topic_records", "Lines written to the audit topic.", audit.topic.written
        )
        yield counter(
            "penstock_audit_topic_dropped",
            "Lines that the audit topic lacks, because it could not be written in time.",
            audit.topic.dropped,
        )
