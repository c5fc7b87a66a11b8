"""TenantUsage (key 30002), v0. What tenants use on this node, or on all nodes as far as this one knows.

Our own API, encoded by hand. Who may describe the cluster sees all tenants; a tenant's user sees that tenant.
"""

from __future__ import annotations

from penstock.broker.network.connection import Connection, Reply
from penstock.broker.network.requests import RequestContext, own_api_reply
from penstock.protocol.acls import Operation, ResourceType
from penstock.protocol.tenant_usage import encode_usage, parse_usage_request


def handle(
    ctx: RequestContext, connection: Connection, frame: memoryview, position: int, correlation_id: int
) -> Reply:
    """Raises MalformedFrame."""
    tenants = ctx.services.tenants
    usage = tenants.cluster_usage() if parse_usage_request(frame, position) else tenants.usage()
    if not any(
        ctx.may(operation, ResourceType.CLUSTER)
        for operation in (Operation.DESCRIBE, Operation.CLUSTER_ACTION)
    ):
        own = tenants.tenant_name(ctx.principal)
        usage = {name: used for name, used in usage.items() if name == own}
    return own_api_reply(correlation_id, encode_usage(usage))
