"""The options of every verb that connects to a cluster, and where its client settings come from.

A setting comes from the first of these that has it, under the name that Java clients and librdkafka use:

1. flags: --bootstrap and --property, then the file of --command-config;
2. the environment: PENSTOCK_BOOTSTRAP and PENSTOCK_CLIENT_*, then the file of PENSTOCK_COMMAND_CONFIG; or, in its
   place, the context of --context;
3. the context of PENSTOCK_CONTEXT; or the current context, unless 1 or 2 gave an address. A password is sent only to
   the cluster that it was stored for, or where the user has named both.

A setting that `penstock.client` does not know is an error, because an ignored security setting does harm.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from penstock.broker.config.listeners import parse_addresses
from penstock.broker.config.node_settings import CLIENT_VARIABLE_PREFIX
from penstock.cli.connection.contexts import BOOTSTRAP_SETTING, CONTEXT_VARIABLE, Contexts, read_contexts
from penstock.cli.errors import EXIT_USAGE, CommandError
from penstock.cli.options import parse_pairs
from penstock.client.errors import ClientError
from penstock.client.wire.properties import read_properties, with_config_file
from penstock.client.wire.settings import ConnectionSettings

CLIENT_ID = "penstock-cli"
DEFAULT_BOOTSTRAP = "localhost:9092"
BOOTSTRAP_VARIABLE = "PENSTOCK_BOOTSTRAP"
CONFIG_VARIABLE = "PENSTOCK_COMMAND_CONFIG"
#: Shorter than the defaults of applications, because a person waits.
_DEFAULT_SETTINGS = {
    "client.id": CLIENT_ID,
    "default.api.timeout.ms": "10000",
    "request.timeout.ms": "15000",
    "socket.connection.setup.timeout.ms": "3000",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionOptions:
    """The options of every verb that connects to a cluster."""

    bootstrap: Annotated[
        str | None,
        typer.Option(
            "--bootstrap",
            "-b",
            metavar="HOST:PORT,...",
            show_default=False,
            help=f"Addresses of brokers. Also {BOOTSTRAP_VARIABLE}, or a context; else {DEFAULT_BOOTSTRAP}.",
        ),
    ] = None
    properties: Annotated[
        list[str] | None,
        typer.Option(
            "--property",
            "-X",
            metavar="NAME=VALUE",
            help="A client setting, such as sasl.username; passwords belong into a file. Repeatable. "
            f"Also {CLIENT_VARIABLE_PREFIX}NAME.",
        ),
    ] = None
    config_file: Annotated[
        Path | None,
        typer.Option(
            "--command-config",
            metavar="FILE",
            show_default=False,
            help=f"A file with client settings, such as client.properties. Also {CONFIG_VARIABLE}.",
        ),
    ] = None
    context: Annotated[
        str | None,
        typer.Option(
            "--context",
            metavar="NAME",
            show_default=False,
            help=f"A cluster that `penstock context set` has named. Also {CONTEXT_VARIABLE}.",
        ),
    ] = None

    @property
    def addresses(self) -> str:
        """The addresses of brokers, from whatever source."""
        return self._settings().get(BOOTSTRAP_SETTING) or DEFAULT_BOOTSTRAP

    def given_settings(self) -> dict[str, str]:
        """The settings that the user has given anywhere, without the addresses. Raises CommandError."""
        return {name: value for name, value in self._settings().items() if name != BOOTSTRAP_SETTING}

    def connection_settings(self, *, allow_unknown: bool = False) -> ConnectionSettings:
        """The settings of the client of `penstock.client`. Raises CommandError, also for unknown settings."""
        given = self._settings()
        addresses = given.pop(BOOTSTRAP_SETTING, "") or DEFAULT_BOOTSTRAP
        try:
            parse_addresses(addresses)  # a missing port is an error here; clients take 9092
        except ValueError as error:
            raise CommandError(f"--bootstrap: {error}", exit_code=EXIT_USAGE) from None
        return parse_client_settings({**given, BOOTSTRAP_SETTING: addresses}, allow_unknown=allow_unknown)

    def own_settings(self) -> dict[str, str]:
        """The settings of flags alone. Raises CommandError."""
        given = {} if self.config_file is None else _read_file("--command-config", self.config_file)
        given |= _expanded(parse_pairs(self.properties or (), "--property"))
        return given | ({} if self.bootstrap is None else {BOOTSTRAP_SETTING: self.bootstrap})

    def _settings(self) -> dict[str, str]:
        given = self.own_settings()
        if self.context is not None:
            return {**_context_settings(read_contexts(), self.context, "--context"), **given}
        given = {**_environment_settings(), **given}
        if named := os.environ.get(CONTEXT_VARIABLE):
            return {**_context_settings(read_contexts(), named, CONTEXT_VARIABLE), **given}
        if BOOTSTRAP_SETTING not in given and (contexts := read_contexts()).current is not None:
            return {**_context_settings(contexts, contexts.current, "the current context"), **given}
        return given


def parse_client_settings(given: Mapping[str, str], *, allow_unknown: bool = False) -> ConnectionSettings:
    """Raises CommandError, also for unknown settings."""
    try:
        settings = ConnectionSettings.parse({**_DEFAULT_SETTINGS, **given})
    except ClientError as error:
        raise CommandError(str(error), exit_code=EXIT_USAGE) from None
    if settings.unknown and not allow_unknown:
        raise CommandError(
            f"penstock has no client setting {', '.join(settings.unknown)}",
            hint=f"check the spelling in --property, the file of --command-config and {CLIENT_VARIABLE_PREFIX}*",
            exit_code=EXIT_USAGE,
        )
    return settings


def _environment_settings() -> dict[str, str]:
    path = os.environ.get(CONFIG_VARIABLE)
    given = _read_file(CONFIG_VARIABLE, Path(path)) if path else {}
    variables = {
        name.removeprefix(CLIENT_VARIABLE_PREFIX).lower().replace("_", "."): value
        for name, value in os.environ.items()
        if name.startswith(CLIENT_VARIABLE_PREFIX) and value
    }
    given |= _expanded(variables)
    return given | ({BOOTSTRAP_SETTING: text} if (text := os.environ.get(BOOTSTRAP_VARIABLE)) else {})


def _context_settings(contexts: Contexts, name: str, source: str) -> dict[str, str]:
    return _expanded(contexts.find(name, source))


def _read_file(source: str, path: Path) -> dict[str, str]:
    try:
        return read_properties(path)
    except ClientError as error:
        raise CommandError(f"{source}: {error}", exit_code=EXIT_USAGE) from None


def _expanded(settings: Mapping[str, str]) -> dict[str, str]:
    try:
        return with_config_file(settings)
    except ClientError as error:
        raise CommandError(str(error), exit_code=EXIT_USAGE) from None
