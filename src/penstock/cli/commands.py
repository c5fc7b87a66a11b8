"""All verbs of the `penstock` command, and the one place that turns the outcome of a command into an exit code.

A verb is imported when it is used, because importing all of them takes a third of a second.
"""

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command, get_group

from penstock import __version__
from penstock.cli.errors import CommandError, report_error

EXIT_INTERRUPTED = 130
#: By verb, in the order of the help: the module and the command or group of commands in it.
VERBS = {
    "serve": ("penstock.cli.config", "serve"),
    "demo": ("penstock.cli.demo", "demo"),
    "topic": ("penstock.cli.topic", "app"),
    "produce": ("penstock.cli.produce", "produce"),
    "consume": ("penstock.cli.consume", "consume"),
    "group": ("penstock.cli.group", "app"),
    "transaction": ("penstock.cli.transaction", "app"),
    "app": ("penstock.cli.app", "app"),
    "dlq": ("penstock.cli.dlq.commands", "app"),
    "outbox": ("penstock.cli.outbox", "app"),
    "pipeline": ("penstock.cli.pipeline.commands", "app"),
    "cluster": ("penstock.cli.cluster.commands", "app"),
    "user": ("penstock.cli.access.user", "app"),
    "acl": ("penstock.cli.access.acl", "app"),
    "delegation-token": ("penstock.cli.access.delegation_token", "app"),
    "quota": ("penstock.cli.access.quota", "app"),
    "tenant": ("penstock.cli.access.tenant", "app"),
    "apply": ("penstock.cli.access.declared.command", "apply"),
    "disk": ("penstock.cli.disk", "app"),
    "context": ("penstock.cli.context", "app"),
    "config": ("penstock.cli.config", "config"),
}


class VerbGroup(TyperGroup):
    """Runs a verb and reports errors as one sentence. A traceback always means a bug in penstock."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.commands and cmd_name in VERBS:
            module, name = VERBS[cmd_name]
            found = getattr(import_module(module), name)
            if isinstance(found, typer.Typer):
                command: Any = get_group(found)
            else:
                wrapper = typer.Typer(add_completion=False)
                wrapper.command()(found)
                command = get_command(wrapper)
            command.name = cmd_name
            self.commands[cmd_name] = command
        return self.commands.get(cmd_name)

    def invoke(self, ctx: Any) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except CommandError as failure:
            raise typer.Exit(report_error(failure)) from None
        except BrokenPipeError:
            # The reader has closed the pipe. Redirect stdout, or Python would fail to flush it at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(0) from None
        except KeyboardInterrupt:
            raise typer.Exit(EXIT_INTERRUPTED) from None
        return result


root_app = typer.Typer(
    name="penstock",
    cls=VerbGroup,
    help="A durable, Kafka-compatible message queue.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(is_given: bool) -> None:
    if is_given:
        print(f"penstock {__version__}")
        raise typer.Exit()


@root_app.callback()
def root_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def run(words: Sequence[str]) -> int:
    try:
        root_app(list(words), prog_name="penstock")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    return 0
