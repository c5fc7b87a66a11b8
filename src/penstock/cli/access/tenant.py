"""`penstock tenant`: users that share a namespace, access rules and limits, and what they use of them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

import typer

from penstock.cli.connection import ConnectionOptions, open_cluster
from penstock.cli.errors import EXIT_USAGE, CommandError
from penstock.cli.options import AsJson, Yes, expand_options, parse_size
from penstock.cli.output import Cell, confirm, human_bytes, note, print_facts, print_json, print_table
from penstock.client.admin.acls import list_acls
from penstock.client.admin.tenants import (
    Tenant,
    alter_tenant,
    delete_tenant,
    find_tenant,
    list_tenants,
    tenant_changes,
    tenant_usage,
)
from penstock.client.errors import Refused
from penstock.client.wire.cluster import Cluster
from penstock.protocol.acls import AclFilter
from penstock.protocol.errors import ErrorCode
from penstock.protocol.tenant_usage import TenantUsage

app = typer.Typer(
    help="Tenants: users that share a namespace, access rules and limits.",
    no_args_is_help=True,
)

Name = Annotated[str, typer.Argument(metavar="NAME", show_default=False)]
Prefix = Annotated[
    str,
    typer.Option(
        "--prefix",
        metavar="PREFIX",
        help="How the names of its topics, groups and transactional ids begin, as in `acme.`.",
        show_default=False,
    ),
]
#: In place of a limit: there is none.
UNLIMITED: Final = "none"
#: By option: the setting, what it is called when it is wrong, and an example.
LIMIT_OPTIONS: Final[Mapping[str, tuple[str, str, str]]] = {
    "in": ("producer_byte_rate", "rate", "bytes per second, as in 500KB/s or 20MB/s"),
    "out": ("consumer_byte_rate", "rate", "bytes per second, as in 500KB/s or 60MB/s"),
    "requests": ("request_rate", "rate", "requests per second, as in 2000/s"),
    "storage": ("storage_bytes_max", "size", "bytes, as in 500GB"),
    "partitions": ("partitions_max", "number", "a whole number, as in 300"),
    "connections": ("connections_max", "number", "a whole number, as in 200"),
    "groups": ("groups_max", "number", "a whole number, as in 100"),
}


def _limit_option(name: str, metavar: str, text: str) -> Any:
    return typer.Option(
        f"--{name}", metavar=metavar, help=f"{text}; `none` for no limit.", show_default=False
    )


def _users_option(name: str, text: str) -> Any:
    return typer.Option(name, metavar="USER,...", help=f"{text} Repeatable.", show_default=False)


@dataclass(frozen=True)
class LimitOptions:
    """Limits of all its users, connections and nodes together."""

    produce: Annotated[str | None, _limit_option("in", "RATE", "Bytes per second that it may produce")] = None
    fetch: Annotated[str | None, _limit_option("out", "RATE", "Bytes per second that it may fetch")] = None
    requests: Annotated[
        str | None, _limit_option("requests", "RATE", "Requests per second, as in 2000/s")
    ] = None
    storage: Annotated[
        str | None, _limit_option("storage", "BYTES", "Bytes of its topics on all disks, as in 500GB")
    ] = None
    partitions: Annotated[str | None, _limit_option("partitions", "N", "Partitions of its topics")] = None
    connections: Annotated[str | None, _limit_option("connections", "N", "Open connections")] = None
    groups: Annotated[str | None, _limit_option("groups", "N", "Groups")] = None

    def limits(self) -> dict[str, int | None]:
        """Return the limits that were given, by setting; None for `none`. Raises CommandError."""
        given = {
            "in": self.produce,
            "out": self.fetch,
            "requests": self.requests,
            "storage": self.storage,
            "partitions": self.partitions,
            "connections": self.connections,
            "groups": self.groups,
        }
        return {
            LIMIT_OPTIONS[option][0]: parse_limit(f"--{option}", option, text)
            for option, text in given.items()
            if text is not None
        }


def parse_limit(where: str, option: str, text: str) -> int | None:
    """Return None for `none`. Raises CommandError, which begins with `where`."""
    if text.strip().lower() == UNLIMITED:
        return None
    _, what, example = LIMIT_OPTIONS[option]
    if what == "number" and not text.strip().isdecimal():
        raise CommandError(f"{where}: {text!r} is no {what}", hint=example, exit_code=EXIT_USAGE)
    return parse_size(where, text, what=what, example=example)


def split_users(texts: Iterable[str]) -> tuple[str, ...]:
    """Split `ann,bob`. Distinguished names contain commas: between them, or after one, stands a semicolon."""
    found = []
    for text in texts:
        found += text.split(";" if ";" in text or "=" in text else ",")
    return tuple(dict.fromkeys(name for part in found if (name := part.strip().removeprefix("User:"))))


@app.command("list")
@expand_options
def list_all(connection: ConnectionOptions, as_json: AsJson = False) -> None:
    """List tenants and what they use."""
    with open_cluster(connection) as cluster:
        tenants, usage = list_tenants(cluster), tenant_usage(cluster)
    if as_json:
        print_json([_document(tenant, usage.get(tenant.name)) for tenant in tenants])
    elif tenants:
        rows: list[list[Cell]] = []
        for tenant in tenants:
            used = usage.get(tenant.name, TenantUsage())
            rows.append(
                [
                    tenant.name,
                    tenant.prefix,
                    len(tenant.users),
                    used.connections,
                    used.groups,
                    used.partitions,
                    human_bytes(used.stored_bytes),
                    human_bytes(round(used.produced)),
                    human_bytes(round(used.fetched)),
                    round(used.requests),
                ]
            )
        columns = ["tenant", "prefix", "users", "connections", "groups", "partitions", "stored"]
        print_table([*columns, "in/s", "out/s", "requests/s"], rows)
    else:
        note("no tenants")


@app.command()
@expand_options
def show(name: Name, connection: ConnectionOptions, as_json: AsJson = False) -> None:
    """Show a tenant, its limits and what it uses of them, on all nodes together."""
    with open_cluster(connection) as cluster:
        tenant, usage = _existing(cluster, name), tenant_usage(cluster).get(name)
    if as_json:
        print_json(_document(tenant, usage))
        return
    print_facts([("users", ", ".join(tenant.users)), ("prefix", tenant.prefix)])
    print()
    used = _used(usage or TenantUsage())
    rows: list[list[str]] = []
    for option, (setting, _, _) in LIMIT_OPTIONS.items():
        limit, now = tenant.limits.get(setting), used[setting]
        share = "" if limit is None else f"{100 * now / limit:.0f} %"
        rows.append(
            [option, _shown(option, now), UNLIMITED if limit is None else _shown(option, limit), share]
        )
    print_table(["limit", "used", "of", "share"], rows)


@app.command()
@expand_options
def create(
    name: Name,
    users: Annotated[list[str], _users_option("--users", "Its users.")],
    prefix: Prefix,
    limit: LimitOptions,
    connection: ConnectionOptions,
) -> None:
    """Create a tenant: a namespace, the access rules of its users, and limits. Users need not exist yet."""
    limits = {setting: value for setting, value in limit.limits().items() if value is not None}
    tenant = Tenant(name, split_users(users), prefix, limits)
    with open_cluster(connection) as cluster:
        if find_tenant(cluster, name) is not None:
            raise CommandError(f"tenant {name} exists", hint=f"`penstock tenant alter {name}` changes it")
        alter_tenant(cluster, name, tenant_changes(tenant, None))
        warn_without_authorizer(cluster)
    note(f"tenant {name} created")


@app.command()
@expand_options
def alter(
    name: Name,
    limit: LimitOptions,
    connection: ConnectionOptions,
    users: Annotated[list[str] | None, _users_option("--users", "The new list of its users.")] = None,
    add_users: Annotated[list[str] | None, _users_option("--add-users", "Users to add.")] = None,
    remove_users: Annotated[list[str] | None, _users_option("--remove-users", "Users to remove.")] = None,
) -> None:
    """Change the users or the limits of a tenant; what is not named stays. The prefix cannot be changed."""
    given = limit.limits()
    with open_cluster(connection) as cluster:
        present = _existing(cluster, name)
        members = present.users if users is None else split_users(users)
        leaving = split_users(remove_users or ())
        if unknown := sorted(set(leaving) - set(members)):
            raise CommandError(f"{unknown[0]} is no user of tenant {name}")
        members = tuple(
            dict.fromkeys(user for user in (*members, *split_users(add_users or ())) if user not in leaving)
        )
        limits = {
            setting: value for setting, value in {**present.limits, **given}.items() if value is not None
        }
        changes = tenant_changes(present._replace(users=members, limits=limits), present)
        if not changes:
            note("nothing to change")
            return
        alter_tenant(cluster, name, changes)
    note(f"tenant {name} changed")


@app.command()
@expand_options
def delete(name: Name, connection: ConnectionOptions, yes: Yes = False) -> None:
    """Delete a tenant: its limits and the access of its users end; users, topics and groups stay."""
    with open_cluster(connection) as cluster:
        tenant = _existing(cluster, name)
        confirm(f"Delete tenant {name}? Its users lose access to {tenant.prefix}*.", yes=yes)
        delete_tenant(cluster, tenant)
    note(f"tenant {name} deleted; its users, topics and groups are still there")


def warn_without_authorizer(cluster: Cluster) -> None:
    """Say so if no access rules hold, because then a tenant has limits only."""
    try:
        list_acls(cluster, AclFilter(principal="User:"))
    except Refused as error:
        if error.code is ErrorCode.security_disabled:
            note("no authorizer.class.name is set: limits hold, but everybody may use every name")


def _existing(cluster: Cluster, name: str) -> Tenant:
    found = find_tenant(cluster, name)
    if found is None:
        raise CommandError(f"tenant {name} does not exist", hint="`penstock tenant list` shows all tenants")
    return found


def _used(usage: TenantUsage) -> dict[str, float]:
    """Return what is used, by the setting that limits it."""
    return {
        "producer_byte_rate": usage.produced,
        "consumer_byte_rate": usage.fetched,
        "request_rate": usage.requests,
        "storage_bytes_max": usage.stored_bytes,
        "partitions_max": usage.partitions,
        "connections_max": usage.connections,
        "groups_max": usage.groups,
    }


def _shown(option: str, value: float) -> str:
    match option:
        case "in" | "out":
            return f"{human_bytes(round(value))}/s"
        case "storage":
            return str(human_bytes(round(value)))
        case "requests":
            return f"{value:,.0f}/s"
        case _:
            return f"{value:,.0f}"


def _document(tenant: Tenant, usage: TenantUsage | None) -> dict[str, Any]:
    used = usage or TenantUsage()
    return {
        "tenant": tenant.name,
        "users": list(tenant.users),
        "prefix": tenant.prefix,
        "limits": tenant.limits,
        "usage": {
            "bytes_in_per_second": round(used.produced, 1),
            "bytes_out_per_second": round(used.fetched, 1),
            "requests_per_second": round(used.requests, 1),
            "stored_bytes": used.stored_bytes,
            "partitions": used.partitions,
            "connections": used.connections,
            "groups": used.groups,
            "throttled_ms": used.throttled_ms,
        },
    }
