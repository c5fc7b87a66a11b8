"""All verbs of the `penstock` command, and the one place that turns the outcome of a command into an exit code.

`with_flags` makes a command whose options come from the table of flags in `serve`, so that each flag is declared once.
"""

import inspect
import os
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from penstock import __version__
from penstock.cli import (
    app,
    config,
    consume,
    demo,
    disk,
    dlq,
    group,
    outbox,
    pipeline,
    produce,
    serve,
    topic,
    transaction,
)
from penstock.cli.cluster import commands
from penstock.cli.errors import CommandError, report_error
from penstock.cli.serve import SERVE_FLAGS, SETTING_FLAGS, Flag, Flags


def with_flags(flags: Sequence[Flag], command: Callable[..., int]) -> Callable[..., None]:
    """Turns `command(written, **others)` into a typer command with these flags in addition to its own options."""
    names = {_parameter_name(flag): flag for flag in flags}

    def run(**given: Any) -> None:
        written: Flags = {}
        for name, flag in names.items():
            value = given.pop(name)
            if value:
                written[flag.name] = value if flag.repeatable else [] if flag.metavar is None else [value]
        raise typer.Exit(command(written, **given))

    own = list(inspect.signature(command).parameters.values())[1:]
    parameters = [*own, *(_flag_parameter(name, flag) for name, flag in names.items())]
    run.__doc__ = command.__doc__
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
    )
    return run


def _flag_parameter(name: str, flag: Flag) -> inspect.Parameter:
    option = typer.Option(flag.name, metavar=flag.metavar, help=flag.help, show_default=False)
    kind, default = _type_and_default(flag)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
    )


def _type_and_default(flag: Flag) -> tuple[Any, Any]:
    if flag.metavar is None:
        return bool, False
    return (list[str] | None, None) if flag.repeatable else (str | None, None)


def _parameter_name(flag: Flag) -> str:
    return "flag_" + flag.name.strip("-").replace("-", "_")


EXIT_INTERRUPTED = 130
_CONTEXT_SETTINGS = {"help_option_names": ["-h", "--help"]}


VERBS = [
    "serve",
    "demo",
    "topic",
    "produce",
    "consume",
    "group",
    "transaction",
    "app",
    "dlq",
    "outbox",
    "pipeline",
    "cluster",
    "disk",
    "config",
]  # in the order of the help


class VerbGroup(TyperGroup):
    """Runs a verb and reports errors as one sentence. A traceback always means a bug in penstock."""

    def list_commands(self, ctx: Any) -> list[str]:
        return VERBS

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
    context_settings=_CONTEXT_SETTINGS,
)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"penstock {__version__}")
        raise typer.Exit()


@root_app.callback()
def root_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def _serve(flags: Flags) -> int:
    """Run a broker until Ctrl-C or SIGTERM."""
    return serve.start(flags)


root_app.command("serve")(with_flags(SERVE_FLAGS, _serve))
root_app.command("demo")(demo.demo)
root_app.add_typer(topic.app, name="topic")
root_app.command("produce")(produce.produce)
root_app.command("consume")(consume.consume)
root_app.add_typer(group.app, name="group")
root_app.add_typer(transaction.app, name="transaction")
root_app.add_typer(app.app, name="app")
root_app.add_typer(dlq.app, name="dlq")
root_app.add_typer(outbox.app, name="outbox")
root_app.add_typer(pipeline.app, name="pipeline")
root_app.add_typer(commands.app, name="cluster")
root_app.add_typer(disk.app, name="disk")
root_app.command("config")(with_flags(SETTING_FLAGS, config.show))


def run(words: Sequence[str]) -> int:
    try:
        root_app(list(words), prog_name="penstock")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    return 0
