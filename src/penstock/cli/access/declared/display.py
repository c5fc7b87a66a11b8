"""How `penstock apply` shows a plan: a table for people, a document for scripts. Neither has a password."""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from penstock.cli.access.acl import acl_document
from penstock.cli.access.declared.declaration import QuotaEntity
from penstock.cli.access.declared.plan import (
    Action,
    Change,
    Kept,
    Plan,
    QuotaChange,
    RuleChange,
    TenantChange,
    UserChange,
    action_of,
    kind_of,
)
from penstock.cli.access.tenant import LIMIT_OPTIONS
from penstock.cli.output import plain_number, print_table
from penstock.client.admin.tenants import Tenant
from penstock.protocol.acls import WILDCARD, AclBinding

_SIGNS: Final = {Action.CREATE: "+", Action.CHANGE: "~", Action.REMOVE: "-"}
_STYLES: Final = {Action.CREATE: "green", Action.CHANGE: "yellow", Action.REMOVE: "red"}


def print_plan(plan: Plan) -> None:
    print_table(
        ["", "what", "name", "details"],
        [[_SIGNS[action_of(each)], kind_of(each), _name(each), _details(each)] for each in plan.changes],
        styles=[_STYLES[action_of(each)] for each in plan.changes],
    )


def summary(plan: Plan) -> str:
    """`2 to create, 1 to change, 0 to remove`."""
    actions = [action_of(each) for each in plan.changes]
    return ", ".join(f"{actions.count(action):,} to {action}" for action in Action)


def kept_text(kept: Kept) -> str:
    name = rule_text(kept.item) if isinstance(kept.item, AclBinding) else f"user {kept.item}"
    return f"kept, although the file does not name it: {name}: {kept.reason}"


def plan_document(plan: Plan) -> dict[str, Any]:
    return {
        "changes": [
            {"action": action_of(each), "kind": kind_of(each), **_fields(each)} for each in plan.changes
        ],
        "kept": [
            {
                **(
                    {"rule": acl_document(each.item)}
                    if isinstance(each.item, AclBinding)
                    else {"user": each.item}
                ),
                "reason": each.reason,
            }
            for each in plan.kept
        ],
    }


def change_text(change: Change) -> str:
    return f"{action_of(change)} {kind_of(change)} {_name(change)}"


def rule_text(rule: AclBinding) -> str:
    shown = acl_document(rule)
    name = "" if shown["resource"] == "Cluster" else f" {shown['name']}"
    prefixed = "*" if shown["pattern"] == "prefixed" else ""
    host = "" if rule.host == WILDCARD else f" from {rule.host}"
    return (
        f"{shown['permission'].lower()} {rule.principal} {shown['operation']}"
        f" on {shown['resource']}{name}{prefixed}{host}"
    )


def _name(change: Change) -> str:
    match change:
        case TenantChange(before, after):
            return (after or before or _NOBODY).name
        case QuotaChange(entity):
            return _entity_text(entity)
        case UserChange(name):
            return name
        case RuleChange(rule):
            return rule_text(rule)


_NOBODY: Final = Tenant("", (), "", {})


def _entity_text(entity: QuotaEntity) -> str:
    return ", ".join(f"{kind} {'default' if name is None else name}" for kind, name in entity)


def _details(change: Change) -> str:
    match change:
        case TenantChange(None, Tenant() as after):
            limits = _values(_by_option(after))
            return "; ".join([f"users {', '.join(after.users)}", f"prefix {after.prefix}", *limits])
        case TenantChange(Tenant() as before, None):
            return f"its users lose access to {before.prefix}*"
        case TenantChange(Tenant() as before, Tenant() as after):
            joining = [f"+{user}" for user in after.users if user not in before.users]
            leaving = [f"-{user}" for user in before.users if user not in after.users]
            users = [f"users {' '.join([*joining, *leaving])}"] if joining or leaving else []
            return "; ".join([*users, *_differences(_by_option(before), _by_option(after))])
        case QuotaChange(_, before, after):
            return "; ".join(_differences(before, after) if before and after else _values(after or before))
        case UserChange(_, before, after, sets_password):
            password = ["new password"] if before and sets_password else []
            if not before or not after:
                return "; ".join(_values(after or before))
            return "; ".join([*_differences(before, after), *password])
        case _:
            return ""


def _by_option(tenant: Tenant) -> dict[str, float]:
    return {
        option: tenant.limits[setting]
        for option, (setting, _, _) in LIMIT_OPTIONS.items()
        if setting in tenant.limits
    }


def _values(values: Mapping[str, float]) -> list[str]:
    return [f"{name} {plain_number(value)}" for name, value in sorted(values.items())]


def _differences(before: Mapping[str, float], after: Mapping[str, float]) -> Iterable[str]:
    def shown(values: Mapping[str, float], name: str) -> str:
        return plain_number(values[name]) if name in values else "none"

    for name in sorted({*before, *after}):
        if before.get(name) != after.get(name):
            yield f"{name} {shown(before, name)} -> {shown(after, name)}"


def _fields(change: Change) -> dict[str, Any]:
    match change:
        case TenantChange(before, after):
            return {
                "name": (after or before or _NOBODY).name,
                "before": _tenant_document(before),
                "after": _tenant_document(after),
            }
        case QuotaChange(entity, before, after):
            return {"entity": dict(entity), "before": dict(before) or None, "after": dict(after) or None}
        case UserChange(name, before, after, sets_password):
            return {
                "name": name,
                "before": dict(before) or None,
                "after": dict(after) or None,
                "sets_password": sets_password,
            }
        case RuleChange(rule):
            return {"rule": acl_document(rule)}


def _tenant_document(tenant: Tenant | None) -> dict[str, Any] | None:
    if tenant is None:
        return None
    return {"users": list(tenant.users), "prefix": tenant.prefix, "limits": tenant.limits}
