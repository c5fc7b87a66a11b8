"""`penstock quota`: list, set and remove client quotas."""

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from penstock.cli.connection import ConnectionOptions, open_cluster
from penstock.cli.errors import EXIT_USAGE, CommandError
from penstock.cli.options import AsJson, expand_options, parse_size
from penstock.cli.output import note, plain_number, print_json, print_table
from penstock.client.admin.quotas import alter_quotas, describe_quotas

app = typer.Typer(
    help="Limit what users, client ids and hosts may use. A client above its quota is throttled.",
    no_args_is_help=True,
)

_DEFAULT = "default"


@dataclass(frozen=True)
class EntityOptions:
    """Whose quotas. The name `default` stands for all that have no quota of their own."""

    user: Annotated[
        str | None, typer.Option("--user", metavar="NAME", help="A user, or `default`.", show_default=False)
    ] = None
    client_id: Annotated[
        str | None,
        typer.Option("--client-id", metavar="ID", help="A client id, or `default`.", show_default=False),
    ] = None
    ip: Annotated[
        str | None, typer.Option("--ip", metavar="ADDRESS", help="A host, or `default`.", show_default=False)
    ] = None

    def entity(self) -> dict[str, str | None]:
        given = {"user": self.user, "client-id": self.client_id, "ip": self.ip}
        return {kind: None if name == _DEFAULT else name for kind, name in given.items() if name is not None}

    def one_entity(self) -> dict[str, str | None]:
        """Return the entity to change. Raises CommandError if none is named."""
        entity = self.entity()
        if not entity:
            raise CommandError(
                "whose quota is it?",
                hint="name a --user, a --client-id, both, or an --ip",
                exit_code=EXIT_USAGE,
            )
        return entity


def _rate_option(name: str, text: str) -> Any:
    return typer.Option(name, metavar="RATE", help=text, show_default=False)


@app.command("list")
@expand_options
def list_quotas(entity: EntityOptions, connection: ConnectionOptions, as_json: AsJson = False) -> None:
    """List quotas, all or those of one user, client id or host."""
    with open_cluster(connection) as cluster:
        found = describe_quotas(cluster, entity.entity())
    if as_json:
        print_json([{"entity": each.entity, "limits": each.limits} for each in found])
        return
    if not found:
        note("no quotas")
        return
    rows = [
        [*(_shown(each.entity, kind) for kind in ("user", "client-id", "ip")), name, plain_number(value)]
        for each in found
        for name, value in sorted(each.limits.items())
    ]
    print_table(["user", "client id", "host", "quota", "limit"], sorted(rows))


def _shown(entity: dict[str, str | None], kind: str) -> str:
    return "" if kind not in entity else _DEFAULT if entity[kind] is None else str(entity[kind])


@app.command("set")
@expand_options
def set_quota(
    entity: EntityOptions,
    connection: ConnectionOptions,
    produce: Annotated[
        str | None, _rate_option("--produce", "Bytes per second and broker that it may produce, as in 20MB.")
    ] = None,
    consume: Annotated[
        str | None, _rate_option("--consume", "Bytes per second and broker that it may fetch, as in 60MB.")
    ] = None,
    requests: Annotated[
        float | None,
        typer.Option(
            "--requests", metavar="PERCENT", help="Share of a broker's event loop.", show_default=False
        ),
    ] = None,
    mutations: Annotated[
        float | None,
        typer.Option(
            "--mutations",
            metavar="RATE",
            help="Partitions per second that it may create or delete.",
            show_default=False,
        ),
    ] = None,
    connections: Annotated[
        float | None,
        typer.Option(
            "--connections",
            metavar="RATE",
            help="Connections per second that a host may open (with --ip).",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Set quotas of a user, a client id, both, or a host; other quotas of it stay."""
    limits = {
        "producer_byte_rate": _bytes_per_second("--produce", produce),
        "consumer_byte_rate": _bytes_per_second("--consume", consume),
        "request_percentage": requests,
        "controller_mutation_rate": mutations,
        "connection_creation_rate": connections,
    }
    given = {name: value for name, value in limits.items() if value is not None}
    if not given:
        raise CommandError("which limit?", hint="for example --produce 20MB", exit_code=EXIT_USAGE)
    wanted = entity.one_entity()
    with open_cluster(connection) as cluster:
        alter_quotas(cluster, wanted, given)
    shown = ", ".join(f"{name} {plain_number(value)}" for name, value in given.items())
    note(f"quotas of {_described(wanted)}: {shown}")


@app.command()
@expand_options
def remove(
    entity: EntityOptions,
    connection: ConnectionOptions,
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="QUOTA",
            help="Quotas to remove, by the names that `list` shows. Default: all.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Remove quotas of a user, a client id, both, or a host."""
    wanted = entity.one_entity()
    with open_cluster(connection) as cluster:
        found = [each.limits for each in describe_quotas(cluster, wanted) if each.entity == wanted]
        present = set(found[0]) if found else set()
        unknown = sorted(set(names or ()) - present)
        if unknown or not present:
            raise CommandError(
                f"it has no quota {', '.join(unknown)}" if unknown else "it has no quotas",
                hint="`penstock quota list` shows all quotas",
            )
        removed = names or sorted(present)
        alter_quotas(cluster, wanted, dict.fromkeys(removed))
    note(f"quotas of {_described(wanted)} removed: {', '.join(removed)}")


def _described(entity: dict[str, str | None]) -> str:
    return ", ".join(
        f"{kind} {_shown(entity, kind)}" for kind in ("user", "client-id", "ip") if kind in entity
    )


def _bytes_per_second(option: str, text: str | None) -> float | None:
    if text is None:
        return None
    return float(
        parse_size(option, text, what="rate", example="bytes per second, as in 500000, 500KB or 20MB")
    )
