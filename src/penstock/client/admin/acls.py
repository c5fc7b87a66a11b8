"""Access rules (ACLs): lists, creates and deletes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.client.errors import raise_for_error
from penstock.client.wire.cluster import Cluster
from penstock.client.wire.connection import Connection
from penstock.protocol.acls import AclBinding, AclFilter
from penstock.protocol.schemas import schema_class


def list_acls(cluster: Cluster, wanted: AclFilter) -> list[AclBinding]:
    """Return the rules that match, in order. Raises Refused, Unavailable."""
    request = schema_class("describe_acls.v3.request:DescribeAclsRequest")(**_filter_fields(wanted))

    def ask(connection: Connection) -> list[AclBinding]:
        response = connection.call(request)
        raise_for_error(response.error_code, "access rules", response.error_message)
        return sorted(
            AclBinding(
                resource.resource_type,
                resource.resource_name,
                resource.pattern_type,
                acl.principal,
                acl.host,
                acl.operation,
                acl.permission_type,
            )
            for resource in response.resources
            for acl in resource.acls
        )

    return cluster.call_any(ask)


def create_acls(cluster: Cluster, acls: Sequence[AclBinding]) -> None:
    """Create rules; one that exists is no error. Raises Refused, Unavailable."""
    creation = schema_class("create_acls.v3.request:AclCreation")
    request = schema_class("create_acls.v3.request:CreateAclsRequest")(
        creations=tuple(
            creation(
                resource_type=acl.resource_type,
                resource_name=acl.resource_name,
                resource_pattern_type=acl.pattern_type,
                principal=acl.principal,
                host=acl.host,
                operation=acl.operation,
                permission_type=acl.permission,
            )
            for acl in acls
        )
    )

    def ask(connection: Connection) -> None:
        for acl, result in zip(acls, connection.call(request).results, strict=True):
            raise_for_error(result.error_code, acl.resource_name, result.error_message)

    cluster.call_controller(ask)


def delete_acls(cluster: Cluster, filters: Sequence[AclFilter]) -> list[AclBinding]:
    """Delete the rules that match any of the filters, and return them, in order. Raises Refused, Unavailable."""
    matching = schema_class("delete_acls.v3.request:DeleteAclsFilter")
    request = schema_class("delete_acls.v3.request:DeleteAclsRequest")(
        filters=tuple(matching(**_filter_fields(wanted)) for wanted in filters)
    )

    def ask(connection: Connection) -> list[AclBinding]:
        deleted: set[AclBinding] = set()
        for result in connection.call(request).filter_results:
            raise_for_error(result.error_code, "access rules", result.error_message)
            for acl in result.matching_acls:
                raise_for_error(acl.error_code, acl.resource_name, acl.error_message)
                deleted.add(
                    AclBinding(
                        acl.resource_type,
                        acl.resource_name,
                        acl.pattern_type,
                        acl.principal,
                        acl.host,
                        acl.operation,
                        acl.permission_type,
                    )
                )
        return sorted(deleted)

    return cluster.call_controller(ask)


def _filter_fields(wanted: AclFilter) -> dict[str, Any]:
    return {
        "resource_type_filter": wanted.resource_type,
        "resource_name_filter": wanted.resource_name,
        "pattern_type_filter": wanted.pattern_type,
        "principal_filter": wanted.principal,
        "host_filter": wanted.host,
        "operation": wanted.operation,
        "permission_type": wanted.permission,
    }
