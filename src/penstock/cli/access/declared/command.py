"""`penstock apply -f access.toml`: makes tenants, users, access rules and client quotas as a file declares them."""

import os
import tomllib
from pathlib import Path
from typing import Annotated, Final

import typer

from penstock.cli.access.declared.declaration import (
    Declaration,
    DeclarationError,
    PasswordSource,
    parse_declaration,
)
from penstock.cli.access.declared.display import (
    change_text,
    kept_text,
    plan_document,
    print_plan,
    summary,
)
from penstock.cli.access.declared.execution import make_changes, read_protected, read_state
from penstock.cli.access.declared.plan import Plan, Protected, UserChange, make_plan
from penstock.cli.access.tenant import warn_without_authorizer
from penstock.cli.connection import ConnectionOptions, open_cluster
from penstock.cli.connection.cluster import explain_client_error
from penstock.cli.errors import EXIT_USAGE, CommandError
from penstock.cli.options import AsJson, Yes, expand_options
from penstock.cli.output import confirm, note, plural, print_json
from penstock.client.errors import ClientError
from penstock.client.wire.cluster import Cluster
from penstock.client.wire.settings import ConnectionSettings
from penstock.protocol.acls import Permission, ResourceType, parse_principal
from penstock.protocol.scram import SCRAM_HASHES

#: Of --check, where a failure is 1 and a mistake in the file or the options is 2.
EXIT_DIFFERENT: Final = 3
_OF_OTHERS: Final = 0o077
_PLAIN: Final = "PLAIN"
_ANONYMOUS: Final = "User:ANONYMOUS"


@expand_options
def apply(
    connection: ConnectionOptions,
    file: Annotated[
        Path,
        typer.Option("--file", "-f", metavar="FILE", help="The declaration, in TOML.", show_default=False),
    ],
    check: Annotated[
        bool,
        typer.Option("--check", help=f"Change nothing; exit with {EXIT_DIFFERENT} if something differs."),
    ] = False,
    prune: Annotated[
        bool,
        typer.Option(
            "--prune", help="Remove what the file does not name, within the sections that the file has."
        ),
    ] = False,
    rotate: Annotated[
        list[str] | None,
        typer.Option(
            "--rotate",
            metavar="USER",
            help="Set the password of this user again. Repeatable.",
            show_default=False,
        ),
    ] = None,
    caller: Annotated[
        str | None,
        typer.Option(
            "--caller",
            metavar="PRINCIPAL",
            help="Who you are, as in User:CN=ops, if you log in with a certificate or a token: "
            "--prune keeps your access.",
            show_default=False,
        ),
    ] = None,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Make tenants, users, access rules and client quotas as a file declares them, after showing what would change."""
    declared = read_declaration(file)
    principal = _caller(caller, connection.connection_settings())
    if prune and principal is None:
        raise CommandError(
            "--prune keeps your own access, and cannot tell from a certificate or a token who you are",
            hint="add --caller User:NAME",
            exit_code=EXIT_USAGE,
        )
    with open_cluster(connection) as cluster:
        present = read_state(cluster, declared)
        may_lock_out = any(
            rule.resource_type == ResourceType.CLUSTER and rule.permission == Permission.DENY
            for rule in declared.rules or ()
        )
        try:
            protected = (
                read_protected(cluster, principal) if prune or may_lock_out else Protected(caller=principal)
            )
            plan = make_plan(
                declared,
                present,
                prune=prune,
                rotate=frozenset(rotate or ()),
                protected=protected,
            )
        except DeclarationError as error:
            raise _in_file(file, error) from None
        if not as_json:
            _show(plan)
        if check or not plan.changes:
            if as_json:
                print_json({**plan_document(plan), "applied": 0, "error": None})
            raise typer.Exit(EXIT_DIFFERENT if plan.changes else 0)
        passwords = _passwords(file, declared, plan)
        confirm(f"Apply {plural(len(plan.changes), 'change')}?", yes=yes)
        _execute(cluster, plan, passwords, as_json)
        if declared.tenants:
            warn_without_authorizer(cluster)


def read_declaration(file: Path) -> Declaration:
    """Raises CommandError that names the file and the key."""
    try:
        with file.open("rb") as content:
            mode = os.fstat(content.fileno()).st_mode
            document = tomllib.load(content)
    except OSError as error:
        raise CommandError(f"cannot read {file}: {error.strerror}", exit_code=EXIT_USAGE) from None
    except UnicodeDecodeError:
        raise CommandError(f"cannot read {file}: it is not UTF-8", exit_code=EXIT_USAGE) from None
    except tomllib.TOMLDecodeError as error:
        # The message has the position, and at most one character of the text.
        raise CommandError(f"cannot read {file}: {error}", exit_code=EXIT_USAGE) from None
    try:
        declared = parse_declaration(document)
    except DeclarationError as error:
        raise _in_file(file, error) from None
    has_password = any(
        user.password is not None and user.password.kind == "password"
        for user in (declared.users or {}).values()
    )
    if has_password and mode & _OF_OTHERS:
        raise CommandError(
            f"{file} contains passwords, and others can read or change it",
            hint=f"chmod 600 {file}, or use password_env or password_file",
            exit_code=EXIT_USAGE,
        )
    return declared


def _in_file(file: Path, error: DeclarationError) -> CommandError:
    return CommandError(f"{file}: {error}", hint=error.hint, exit_code=EXIT_USAGE)


def _caller(given: str | None, settings: ConnectionSettings) -> str | None:
    """The principal that the cluster sees, where the client can know it."""
    if given is not None:
        try:
            kind, name = parse_principal(given)
        except ValueError:
            kind, name = "", ""
        if kind != "User" or not name:
            raise CommandError(
                f"--caller: {given!r} is no principal", hint="write User:NAME", exit_code=EXIT_USAGE
            )
        return given
    sasl = settings.sasl
    if sasl is not None:
        knows_name = sasl.mechanism in (_PLAIN, *SCRAM_HASHES) and not sasl.is_token
        return f"User:{sasl.username}" if knows_name else None
    return _ANONYMOUS if settings.security is None else None


def _show(plan: Plan) -> None:
    for kept in plan.kept:
        note(kept_text(kept))
    if plan.changes:
        print_plan(plan)
        note(summary(plan))
    else:
        note("nothing to change")


def _passwords(file: Path, declared: Declaration, plan: Plan) -> dict[str, str]:
    """Reads all passwords before the first change. Raises CommandError for one that is missing."""
    found = {}
    for change in plan.changes:
        if isinstance(change, UserChange) and change.sets_password:
            assert declared.users is not None
            source = declared.users[change.name].password
            key = f"{file}: users.{change.name}"
            if source is None:
                raise CommandError(
                    f"{key}: the plan sets a password, and the file names none",
                    hint='add password_env = "VARIABLE" or password_file = "PATH"',
                    exit_code=EXIT_USAGE,
                )
            found[change.name] = _password(file, f"{key}.{source.kind}", source)
    return found


def _password(file: Path, key: str, source: PasswordSource) -> str:
    match source:
        case PasswordSource("password_env", variable):
            password = os.environ.get(variable, "")
            problem = f"the variable {variable} is not set, or empty"
        case PasswordSource("password_file", name):
            try:
                password = (file.parent / Path(name).expanduser()).read_text()
            except (OSError, UnicodeDecodeError) as error:
                reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
                raise CommandError(f"{key}: cannot read {name}: {reason}", exit_code=EXIT_USAGE) from None
            password = password.removesuffix("\n").removesuffix("\r")
            problem = f"{name} is empty"
        case _:
            return source.value
    if not password:
        raise CommandError(f"{key}: {problem}", exit_code=EXIT_USAGE)
    return password


def _execute(cluster: Cluster, plan: Plan, passwords: dict[str, str], as_json: bool) -> None:
    made, failure = 0, None
    try:
        for made in make_changes(cluster, plan.changes, passwords):  # noqa: B007 (reported after a failure)
            pass
    except ClientError as error:
        failure = error
    if as_json:
        reason = None if failure is None else str(failure)
        print_json({**plan_document(plan), "applied": made, "error": reason})
    if failure is None:
        if not as_json:
            note(f"{plural(made, 'change')} applied")
        return
    explained = explain_client_error(failure)
    raise CommandError(
        f"{made:,} of {plural(len(plan.changes), 'change')} applied;"
        f" failed at: {change_text(plan.changes[made])}: {explained.message}",
        hint=explained.hint or "apply the file again: it makes the changes that are missing",
    )
