"""Reads what a cluster has for `penstock apply`, and makes changes one after the other."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from penstock.cli.access.declared.declaration import Declaration, DeclarationError
from penstock.cli.access.declared.plan import (
    AccessState,
    Action,
    Change,
    Protected,
    QuotaChange,
    RuleChange,
    TenantChange,
    UserChange,
    derived_rules,
    nodes_by_rules,
)
from penstock.client.admin.acls import create_acls, delete_acls, list_acls
from penstock.client.admin.quotas import alter_quotas, describe_quotas
from penstock.client.admin.tenants import alter_tenant, delete_tenant, list_tenants, tenant_changes
from penstock.client.admin.users import User, delete_user, list_users, set_password
from penstock.client.errors import Refused
from penstock.client.wire.cluster import Cluster
from penstock.client.wire.topics import ConfigResourceType, describe_configs
from penstock.protocol.acls import AclBinding, AclFilter, Operation, ResourceType
from penstock.protocol.errors import ErrorCode
from penstock.protocol.quota_entities import canonical_entity
from penstock.protocol.scram import SCRAM_HASHES

#: Rules in a request: many, because each request waits for the metadata quorum, and few enough for a small frame.
RULES_PER_REQUEST = 500
_SUPER_USERS = "super.users"
_NODES = "penstock.node.principals"
_MECHANISM = "sasl.mechanism.inter.broker.protocol"


def read_state(cluster: Cluster, declared: Declaration) -> AccessState:
    """Reads the sections that the file has. Raises Refused, Unavailable."""
    with_tenants = declared.tenants is not None or declared.rules is not None
    tenants = list_tenants(cluster) if with_tenants else []
    users = list_users(cluster) if declared.users is not None else []
    rules = frozenset(list_acls(cluster, AclFilter())) if declared.rules is not None else frozenset()
    quotas = describe_quotas(cluster, {}) if declared.quotas is not None else []
    return AccessState(
        tenants={tenant.name: tenant for tenant in tenants},
        users={user.name: user.iterations for user in users},
        rules=rules - derived_rules(tenants),
        quotas={
            canonical_entity(tuple(sorted(each.entity.items(), key=lambda part: part[0]))): each.limits
            for each in quotas
        },
    )


def read_protected(cluster: Cluster, caller: str | None) -> Protected:
    """Reads whose access stays, from the settings of all nodes and from the rules for nodes.

    Raises DeclarationError if it cannot be known as which user the nodes log in, Refused, Unavailable.
    """
    super_users, nodes, mechanisms = set[str](), set[str](), set[str]()
    for node_id in cluster.nodes():
        entries = cluster.call_node(
            node_id,
            lambda connection, name=str(node_id): describe_configs(  # type: ignore[misc]
                connection, ConfigResourceType.BROKER, name, (_SUPER_USERS, _NODES, _MECHANISM)
            ),
        )
        values = {name: entry.value or "" for name, entry in entries.items()}
        super_users |= _principals(values.get(_SUPER_USERS, ""))
        nodes |= _principals(values.get(_NODES, ""))
        mechanisms.add(values.get(_MECHANISM, ""))
    nodes |= nodes_by_rules(_cluster_rules(cluster))
    if mechanisms & SCRAM_HASHES.keys() and not (super_users or nodes):
        raise DeclarationError(
            "--prune",
            "the nodes log in with SCRAM, and it cannot be seen as which user",
            hint=f"name that user in {_NODES} or {_SUPER_USERS}",
        )
    return Protected(caller=caller, super_users=frozenset(super_users), nodes=frozenset(nodes))


def _principals(text: str) -> set[str]:
    return {name for part in text.split(";") if (name := part.strip())}


def _cluster_rules(cluster: Cluster) -> list[AclBinding]:
    try:
        return list_acls(cluster, AclFilter(ResourceType.CLUSTER, operation=Operation.CLUSTER_ACTION))
    except Refused as error:
        if error.code is ErrorCode.security_disabled:
            return []  # there are no rules
        raise


def make_changes(cluster: Cluster, changes: Sequence[Change], passwords: Mapping[str, str]) -> Iterator[int]:
    """Yields after each request how many changes are made. Raises Refused, Unavailable."""
    made = 0
    for batch in _requests(changes):
        match batch[0]:
            case RuleChange(_, action):
                rules = [each.rule for each in batch if isinstance(each, RuleChange)]
                if action is Action.CREATE:
                    create_acls(cluster, rules)
                else:
                    delete_acls(cluster, [AclFilter(*rule) for rule in rules])
            case change:
                _make_change(cluster, change, passwords)
        made += len(batch)
        yield made


def _requests(changes: Sequence[Change]) -> Iterator[list[Change]]:
    """Rules of one action share requests."""
    for is_rule, group in groupby(changes, key=lambda each: isinstance(each, RuleChange) and each.action):
        batch = list(group)
        size = RULES_PER_REQUEST if is_rule else 1
        yield from (batch[start : start + size] for start in range(0, len(batch), size))


def _make_change(cluster: Cluster, change: Change, passwords: Mapping[str, str]) -> None:
    match change:
        case TenantChange(before, None):
            assert before is not None
            delete_tenant(cluster, before)
        case TenantChange(before, after):
            assert after is not None
            alter_tenant(cluster, after.name, tenant_changes(after, before))
        case QuotaChange(entity, before, after):
            alter_quotas(cluster, dict(entity), {**dict.fromkeys(before), **after})
        case UserChange(name, before, after, sets_password):
            if sets_password:
                for mechanism, iterations in after.items():
                    set_password(
                        cluster, name, passwords[name], mechanisms=(mechanism,), iterations=iterations
                    )
            leaving = {mechanism: count for mechanism, count in before.items() if mechanism not in after}
            delete_user(cluster, User(name, leaving))
