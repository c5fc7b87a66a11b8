"""The changes that make a cluster as a file declares it, in an order in which each of them is possible and safe.

Tenants and quotas come first, so that limits hold before anybody gets access; then users; then rules, those that deny
before those that allow. What the file does not name is removed last, and only on request.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple

from penstock.cli.access.declared.declaration import Declaration, DeclarationError, DeclaredUser, QuotaEntity
from penstock.client.admin.tenants import Tenant
from penstock.cluster import tenants as tenant_policy
from penstock.cluster.tenants import prefixes_overlap
from penstock.protocol.acls import CLUSTER_NAME, WILDCARD, AclBinding, Operation, Permission, ResourceType
from penstock.protocol.scram import ITERATIONS_MIN, SCRAM_HASHES

_USER: Final = "User:"
_EVERYBODY: Final = f"{_USER}{WILDCARD}"
#: What somebody who applies a file needs on the cluster.
_ADMINISTRATION: Final = (
    Operation.ALL,
    Operation.ALTER,
    Operation.ALTER_CONFIGS,
    Operation.DESCRIBE,
    Operation.DESCRIBE_CONFIGS,
)


class Kind(StrEnum):
    TENANT = "tenant"
    QUOTA = "quota"
    USER = "user"
    RULE = "rule"


class Action(StrEnum):
    CREATE = "create"
    CHANGE = "change"
    REMOVE = "remove"


Credentials = Mapping[str, int]  # iterations by mechanism


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessState:
    """What a cluster has. `rules` contains none that follow from tenants."""

    tenants: Mapping[str, Tenant] = field(default_factory=dict)
    users: Mapping[str, Credentials] = field(default_factory=dict)
    rules: frozenset[AclBinding] = frozenset()
    quotas: Mapping[QuotaEntity, Mapping[str, float]] = field(default_factory=dict)


class TenantChange(NamedTuple):
    before: Tenant | None
    after: Tenant | None


class QuotaChange(NamedTuple):
    entity: QuotaEntity
    before: Mapping[str, float]
    after: Mapping[str, float]


class UserChange(NamedTuple):
    name: str
    before: Credentials
    after: Credentials
    sets_password: bool = False


class RuleChange(NamedTuple):
    rule: AclBinding
    action: Action


Change = TenantChange | QuotaChange | UserChange | RuleChange


def kind_of(change: Change) -> Kind:
    match change:
        case TenantChange():
            return Kind.TENANT
        case QuotaChange():
            return Kind.QUOTA
        case UserChange():
            return Kind.USER
        case RuleChange():
            return Kind.RULE


def action_of(change: Change) -> Action:
    if isinstance(change, RuleChange):
        return change.action
    if not change.before:
        return Action.CREATE
    return Action.CHANGE if change.after else Action.REMOVE


class Kept(NamedTuple):
    """What the file does not name and `prune` leaves all the same."""

    item: str | AclBinding  # the name of a user, or a rule
    reason: str


class Plan(NamedTuple):
    changes: tuple[Change, ...] = ()
    kept: tuple[Kept, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Protected:
    """Whose access stays. `caller` is the principal that applies the file; None if it is not known."""

    caller: str | None = None
    super_users: frozenset[str] = frozenset()
    #: The principals of nodes: without their users and rules the cluster falls apart.
    nodes: frozenset[str] = frozenset()

    def keeps_user(self, name: str) -> str | None:
        """Return why this user is not removed."""
        principal = f"{_USER}{name}"
        if principal == self.caller:
            return "it is you"
        if principal in self.super_users:
            return "it is one of super.users"
        return "it is that of a node" if principal in self.nodes else None

    def keeps_rule(self, rule: AclBinding) -> str | None:
        """Return why this rule is not removed."""
        if rule.principal == self.caller:
            return "it is about you"
        if rule.principal in self.super_users:
            return "it is about one of super.users"
        if rule.principal in self.nodes:
            return "it is about a node"
        if not _is_administration(rule) or rule.permission != Permission.ALLOW:
            return None
        if rule.principal == _EVERYBODY:
            return "it gives everybody, and so you, the administration of the cluster"
        return (
            None
            if self.caller
            else "it may be what lets you administer the cluster; --caller says who you are"
        )

    def lock_out(self, rule: AclBinding) -> bool:
        """Whether this rule takes the administration of the cluster from the caller."""
        return (
            self.caller is not None
            and self.caller not in self.super_users
            and rule.permission == Permission.DENY
            and _is_administration(rule)
            and rule.principal in (self.caller, _EVERYBODY)
        )


def nodes_by_rules(rules: Iterable[AclBinding]) -> frozenset[str]:
    """The principals that rules let send requests between nodes."""
    return frozenset(
        rule.principal
        for rule in rules
        if rule.resource_type == ResourceType.CLUSTER
        and rule.operation == Operation.CLUSTER_ACTION
        and rule.permission == Permission.ALLOW
        and rule.principal != _EVERYBODY
    )


def _is_administration(rule: AclBinding) -> bool:
    return (
        rule.resource_type == ResourceType.CLUSTER
        and rule.resource_name in (CLUSTER_NAME, WILDCARD)
        and rule.operation in _ADMINISTRATION
    )


def make_plan(
    declared: Declaration,
    present: AccessState,
    *,
    prune: bool = False,
    rotate: frozenset[str] = frozenset(),
    protected: Protected = Protected(),
) -> Plan:
    """Sections that the file does not have are left alone. `rotate` names users who get their password again.

    Raises DeclarationError if no order of changes leads there.
    """
    kept: list[Kept] = []
    tenants, last_tenants = _plan_tenants(declared, present, prune)
    users = _plan_users(declared, present, rotate)
    quotas = _plan_quotas(declared, present)
    rules = _plan_rules(declared, present, protected, _tenants_after(declared, present, prune))
    removals: list[Change] = []
    if prune:
        removals += _removed_users(declared, present, protected, kept)
        removals += _removed_rules(declared, present, protected, kept)
        removals += _removed_quotas(declared, present)
    return Plan((*tenants, *quotas, *users, *rules, *removals, *last_tenants), tuple(kept))


# Tenants


def _tenants_after(declared: Declaration, present: AccessState, prune: bool) -> dict[str, Tenant]:
    wanted = dict(declared.tenants or {})
    return wanted if prune and declared.tenants is not None else {**present.tenants, **wanted}


def _plan_tenants(
    declared: Declaration, present: AccessState, prune: bool
) -> tuple[list[Change], list[Change]]:
    """Return what comes first, and the removals that come last."""
    if declared.tenants is None:
        return [], []
    wanted = declared.tenants
    others = [tenant for name, tenant in sorted(present.tenants.items()) if name not in wanted]
    in_the_way = [tenant for tenant in others if any(_conflict(tenant, new) for new in wanted.values())]
    if in_the_way and not prune:
        _refuse_conflicts(wanted, in_the_way)
    removed = others if prune else []
    first: list[Change] = [TenantChange(tenant, None) for tenant in removed if tenant in in_the_way]
    last: list[Change] = [TenantChange(tenant, None) for tenant in removed if tenant not in in_the_way]
    return [*first, *_ordered_tenants(wanted, present.tenants)], last


def _conflict(one: Tenant, other: Tenant) -> bool:
    return bool(set(one.users) & set(other.users)) or prefixes_overlap(one.prefix, other.prefix)


def _refuse_conflicts(wanted: Mapping[str, Tenant], others: Iterable[Tenant]) -> None:
    for other in others:
        for new in wanted.values():
            for user in sorted(set(new.users) & set(other.users)):
                raise DeclarationError(
                    f"tenants.{new.name}.users",
                    f"{user} belongs to tenant {other.name}, which the file does not name",
                )
            if prefixes_overlap(new.prefix, other.prefix):
                raise DeclarationError(
                    f"tenants.{new.name}.prefix",
                    f"{new.prefix} overlaps with {other.prefix} of tenant {other.name},"
                    " which the file does not name",
                )


def _ordered_tenants(wanted: Mapping[str, Tenant], present: Mapping[str, Tenant]) -> Iterable[Change]:
    """A user belongs to one tenant at a time: it leaves the old one before it joins the new one."""
    now = {name: present[name] for name in wanted if name in present}
    for name, tenant in now.items():
        if tenant.prefix != wanted[name].prefix:
            raise DeclarationError(
                f"tenants.{name}.prefix", f"is {tenant.prefix} in the cluster, and cannot be changed"
            )
    waiting = {name: tenant for name, tenant in sorted(wanted.items()) if not _same(tenant, now.get(name))}
    while waiting:
        owners = {user: name for name, tenant in now.items() for user in tenant.users}
        ready = [
            name
            for name, tenant in waiting.items()
            if all(owners.get(user, name) == name for user in tenant.users)
        ]
        if ready:
            for name in ready:
                yield TenantChange(now.get(name), waiting[name])
                now[name] = waiting.pop(name)
            continue
        # Users change places: one of the tenants first lets go of those who leave it.
        for name in waiting:
            if name in now and (staying := _without_leavers(now[name], waiting[name])) is not None:
                yield TenantChange(now[name], staying)
                now[name] = staying
                break
        else:
            raise DeclarationError(
                f"tenants.{next(iter(waiting))}.users",
                "all users change places with those of another tenant, and no tenant can be without users;"
                " move them in two steps",
            )


def _without_leavers(tenant: Tenant, wanted: Tenant) -> Tenant | None:
    """None if no user leaves, or none stays."""
    staying = tuple(user for user in tenant.users if user in wanted.users)
    return tenant._replace(users=staying) if staying and len(staying) < len(tenant.users) else None


def _same(wanted: Tenant, present: Tenant | None) -> bool:
    return (
        present is not None
        and set(wanted.users) == set(present.users)
        and (wanted.prefix, wanted.limits) == (present.prefix, present.limits)
    )


# Users


def _plan_users(declared: Declaration, present: AccessState, rotate: frozenset[str]) -> Iterable[Change]:
    users = declared.users or {}
    for name in sorted(rotate):
        if name not in users:
            raise DeclarationError("--rotate", f"the file has no user {name}")
    for name, user in sorted(users.items()):
        before = present.users.get(name, {})
        after = wanted_credentials(user, before)
        needs_password = name in rotate or any(before.get(each) != count for each, count in after.items())
        if needs_password or after != before:
            yield UserChange(name, before, after, needs_password)


def wanted_credentials(user: DeclaredUser, before: Credentials) -> dict[str, int]:
    """What the file leaves open stays as it is."""
    mechanisms = user.mechanisms or tuple(before) or tuple(SCRAM_HASHES)
    return {
        mechanism: user.iterations or before.get(mechanism, ITERATIONS_MIN)
        for mechanism in sorted(mechanisms)
    }


def _removed_users(
    declared: Declaration, present: AccessState, protected: Protected, kept: list[Kept]
) -> Iterable[Change]:
    if declared.users is None:
        return
    for name, credentials in sorted(present.users.items()):
        if name in declared.users:
            continue
        if reason := protected.keeps_user(name):
            kept.append(Kept(name, reason))
        else:
            yield UserChange(name, credentials, {})


# Access rules


def _plan_rules(
    declared: Declaration, present: AccessState, protected: Protected, tenants: Mapping[str, Tenant]
) -> Iterable[Change]:
    """Rules that follow from tenants need not be created."""
    missing = (declared.rules or frozenset()) - present.rules - derived_rules(tenants.values())
    for rule in sorted(missing, key=lambda rule: (rule.permission, rule)):  # DENY is the smaller number
        if protected.lock_out(rule):
            raise DeclarationError(
                "rules", f"one of them denies {rule.principal}, and so you, the administration of the cluster"
            )
        yield RuleChange(rule, Action.CREATE)


def _removed_rules(
    declared: Declaration, present: AccessState, protected: Protected, kept: list[Kept]
) -> Iterable[Change]:
    if declared.rules is None:
        return
    for rule in sorted(present.rules - declared.rules, key=lambda rule: (-rule.permission, rule)):
        if reason := protected.keeps_rule(rule):
            kept.append(Kept(rule, reason))
        else:
            yield RuleChange(rule, Action.REMOVE)


def derived_rules(tenants: Iterable[Tenant]) -> frozenset[AclBinding]:
    """The rules that follow from tenants: the cluster lists them with the others."""
    return frozenset(
        rule
        for tenant in tenants
        for rule in tenant_policy.tenant_rules(
            tenant_policy.Tenant(name=tenant.name, users=tenant.users, prefix=tenant.prefix, limits={})
        )
    )


# Quotas


def _entity_order(entity: QuotaEntity) -> list[tuple[str, str]]:
    return [(kind, name or "") for kind, name in entity]


def _plan_quotas(declared: Declaration, present: AccessState) -> Iterable[Change]:
    quotas = declared.quotas or {}
    for entity in sorted(quotas, key=_entity_order):
        before = present.quotas.get(entity, {})
        if dict(before) != dict(quotas[entity]):
            yield QuotaChange(entity, before, quotas[entity])


def _removed_quotas(declared: Declaration, present: AccessState) -> Iterable[Change]:
    if declared.quotas is None:
        return
    for entity in sorted(present.quotas.keys() - declared.quotas.keys(), key=_entity_order):
        yield QuotaChange(entity, present.quotas[entity], {})
