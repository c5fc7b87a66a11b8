"""`penstock context`: give clusters names, with their addresses and client settings, and choose one."""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from penstock.cli.access.passwords import PASSWORD_VARIABLE, read_password
from penstock.cli.connection import ConnectionOptions
from penstock.cli.connection.contexts import (
    BOOTSTRAP_SETTING,
    Contexts,
    changed_contexts,
    check_context_name,
    contexts_path,
    read_contexts,
)
from penstock.cli.connection.offsets import did_you_mean
from penstock.cli.connection.options import parse_client_settings
from penstock.cli.errors import EXIT_USAGE, CommandError
from penstock.cli.options import AsJson, Yes, expand_options
from penstock.cli.output import HIDDEN, confirm, note, print_facts, print_json, print_rows
from penstock.client.errors import ClientError
from penstock.client.wire.settings import ConnectionSettings, is_secret

app = typer.Typer(
    help="Clusters by name: their addresses and client settings, in a file of this user.",
    no_args_is_help=True,
)

Name = Annotated[str, typer.Argument(metavar="NAME", show_default=False)]


@app.command("list")
def list_all(as_json: AsJson = False) -> None:
    """List the contexts, and which of them is used."""
    contexts = read_contexts()
    rows = [
        {
            "context": name,
            "current": name == contexts.current,
            "bootstrap": settings.get(BOOTSTRAP_SETTING),
            **_protocol_and_user(settings),
        }
        for name, settings in sorted(contexts.settings.items())
    ]
    print_rows(rows, as_json=as_json, if_none="no contexts; `penstock context set NAME` makes one")


@app.command()
def show(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", show_default=False)] = None,
    as_json: AsJson = False,
) -> None:
    """Show the settings of a context, of the current one by default; passwords and keys stay hidden."""
    contexts = read_contexts()
    chosen = name or contexts.current
    if chosen is None:
        raise CommandError("no context is in use", hint="`penstock context use NAME` chooses one")
    settings = _existing(contexts, chosen)
    shown = {key: HIDDEN if is_secret(key) else value for key, value in sorted(settings.items())}
    if as_json:
        print_json({"context": chosen, "current": chosen == contexts.current, "settings": shown})
    else:
        print_facts([("context", chosen), ("current", chosen == contexts.current), *shown.items()])


@app.command()
def use(name: Name) -> None:
    """Let commands that name no cluster use this context."""
    with changed_contexts() as contexts:
        _existing(contexts, name)
        contexts.current = name
    note(f"commands use context {name}")


@app.command("set")
@expand_options
def set_context(
    name: Name,
    connection: ConnectionOptions,
    delete: Annotated[
        list[str] | None,
        typer.Option(
            "--delete", "-d", metavar="SETTING", help="Remove a setting. Repeatable.", show_default=False
        ),
    ] = None,
    password_file: Annotated[
        str | None,
        typer.Option(
            "--password-file",
            metavar="FILE",
            help="Reads sasl.password from a file; - is stdin.",
            show_default=False,
        ),
    ] = None,
    ask_password: Annotated[
        bool, typer.Option("--ask-password", help=f"Asks for sasl.password; also {PASSWORD_VARIABLE}.")
    ] = False,
) -> None:
    """Make a context, or change the settings of one: --bootstrap, --property and the file of --command-config.

    The settings are copied, with passwords and keys that they contain, into a file that only this user can read.
    """
    check_context_name(name)
    if connection.context is not None:
        raise CommandError("the name of the context comes without --context", exit_code=EXIT_USAGE)
    for text in connection.properties or ():
        if is_secret(key := text.partition("=")[0].strip()):
            raise CommandError(
                f"--property {key}: other users can see the arguments of a command",
                hint="put it into a file for --command-config, or use --password-file or --ask-password",
                exit_code=EXIT_USAGE,
            )
    with changed_contexts() as contexts:
        is_new = name not in contexts.settings
        settings: dict[str, str] = {**contexts.settings.get(name, {}), **connection.own_settings()}
        for key in delete or ():
            if settings.pop(key, None) is None:
                raise CommandError(f"context {name} has no setting {key}", exit_code=EXIT_USAGE)
        if password_file is not None or ask_password:
            settings["sasl.password"] = read_password(
                settings.get("sasl.username", "this user"), password_file
            )
        if not settings.get(BOOTSTRAP_SETTING):
            raise CommandError(
                f"context {name} needs the addresses of brokers",
                hint="--bootstrap HOST:PORT",
                exit_code=EXIT_USAGE,
            )
        parse_client_settings(settings)
        contexts.settings[name] = settings
    note(f"context {name} {'made' if is_new else 'changed'} in {contexts_path()}")


@app.command()
def remove(name: Name, yes: Yes = False) -> None:
    """Remove a context, with its passwords."""
    _existing(read_contexts(), name)
    confirm(f"Remove context {name}?", yes=yes)
    with changed_contexts() as contexts:
        contexts.settings.pop(name, None)
        if contexts.current == name:
            contexts.current = None
    note(f"context {name} removed")


def _protocol_and_user(settings: Mapping[str, str]) -> dict[str, str | None]:
    try:
        parsed = ConnectionSettings.parse(settings)
    except ClientError:
        return {
            "protocol": None,
            "user": None,
        }  # its file is gone, for example; `show` and the commands say why
    return {
        "protocol": parsed.security_protocol,
        "user": None if parsed.sasl is None else parsed.sasl.username,
    }


def _existing(contexts: Contexts, name: str) -> dict[str, Any]:
    if name not in contexts.settings:
        raise CommandError(
            f"there is no context {name}",
            hint=did_you_mean(name, contexts.settings, "`penstock context list` shows all contexts"),
        )
    return contexts.settings[name]
