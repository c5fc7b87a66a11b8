"""`penstock user`: list users with SCRAM credentials, set their passwords, remove them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import typer

from penstock.cli.access.passwords import PASSWORD_VARIABLE, read_password
from penstock.cli.connection import ConnectionOptions, open_cluster
from penstock.cli.errors import EXIT_USAGE, CommandError
from penstock.cli.options import AsJson, Yes, expand_options
from penstock.cli.output import confirm, note, print_json, print_table
from penstock.client.admin.users import RESERVED_NAMES, User, delete_user, list_users, set_password
from penstock.client.wire.cluster import Cluster
from penstock.protocol.scram import ITERATIONS_MAX, ITERATIONS_MIN, SCRAM_HASHES

app = typer.Typer(help="Users that log in with SASL SCRAM, and their passwords.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(metavar="NAME", show_default=False)]


@dataclass(frozen=True)
class CredentialOptions:
    """Where the password comes from, and how it is stored."""

    password_file: Annotated[
        str | None,
        typer.Option(
            "--password-file",
            metavar="FILE",
            help=f"Reads the password from a file; - is stdin. Also {PASSWORD_VARIABLE}; else it is asked for.",
            show_default=False,
        ),
    ] = None
    mechanism: Annotated[
        list[str] | None,
        typer.Option(
            "--mechanism",
            metavar="NAME",
            help="SCRAM-SHA-256 or SCRAM-SHA-512. Default: both.",
            show_default=False,
        ),
    ] = None
    iterations: Annotated[
        int,
        typer.Option(
            "--iterations",
            metavar="N",
            min=ITERATIONS_MIN,
            max=ITERATIONS_MAX,
            help="Work that a login takes.",
        ),
    ] = ITERATIONS_MIN

    def mechanisms(self) -> Sequence[str]:
        chosen = [name.upper() for name in self.mechanism or SCRAM_HASHES]
        for name in chosen:
            if name not in SCRAM_HASHES:
                raise CommandError(
                    f"{name} has no credentials",
                    hint=f"use {' or '.join(SCRAM_HASHES)}",
                    exit_code=EXIT_USAGE,
                )
        return chosen


@app.command("list")
@expand_options
def list_all(connection: ConnectionOptions, as_json: AsJson = False) -> None:
    """List users and the mechanisms with which they can log in."""
    with open_cluster(connection) as cluster:
        users = list_users(cluster)
    if as_json:
        print_json([{"user": user.name, "iterations": user.iterations} for user in users])
    elif users:
        print_table(
            ["user", "mechanism", "iterations"],
            [[user.name, name, f"{count:,}"] for user in users for name, count in user.iterations.items()],
        )
    else:
        note("no users")


@app.command()
@expand_options
def create(name: Name, connection: ConnectionOptions, credential: CredentialOptions) -> None:
    """Create a user with a password."""
    if not name or name in RESERVED_NAMES:
        raise CommandError(
            f"no user can log in as {name!r}",
            hint="`User:*` is everybody in access rules, and ANONYMOUS a client that has not logged in",
            exit_code=EXIT_USAGE,
        )
    mechanisms = credential.mechanisms()
    with open_cluster(connection) as cluster:
        if list_users(cluster, [name]):
            raise CommandError(
                f"user {name} exists", hint=f"`penstock user alter {name}` sets a new password"
            )
        password = read_password(name, credential.password_file)
        set_password(cluster, name, password, mechanisms=mechanisms, iterations=credential.iterations)
    note(f"user {name} created")


@app.command()
@expand_options
def alter(name: Name, connection: ConnectionOptions, credential: CredentialOptions) -> None:
    """Set a new password. Connections that are open stay; with connections.max.reauth.ms they log in again."""
    mechanisms = credential.mechanisms()
    with open_cluster(connection) as cluster:
        user = _existing(cluster, name)
        if left := sorted(user.iterations.keys() - set(mechanisms)):
            note(f"the old password stays valid for {', '.join(left)}")
        password = read_password(name, credential.password_file)
        set_password(cluster, name, password, mechanisms=mechanisms, iterations=credential.iterations)
    note(f"password of {name} changed")


@app.command()
@expand_options
def delete(name: Name, connection: ConnectionOptions, yes: Yes = False) -> None:
    """Remove a user's credentials. Connections that are open stay until they log in again."""
    with open_cluster(connection) as cluster:
        user = _existing(cluster, name)
        confirm(f"Delete user {name}?", yes=yes)
        delete_user(cluster, user)
    note(f"user {name} deleted")


def _existing(cluster: Cluster, name: str) -> User:
    found = list_users(cluster, [name])
    if not found:
        raise CommandError(f"user {name} does not exist", hint="`penstock user list` shows all users")
    return found[0]
