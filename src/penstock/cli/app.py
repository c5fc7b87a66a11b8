"""All verbs put together, and the one place where a command's end becomes an exit code."""

import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from penstock import __version__
from penstock.cli import (
    application,
    cluster,
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
from penstock.cli.failure import Failure, report
from penstock.cli.flagged import with_flags
from penstock.cli.flags import SERVE_FLAGS, SETTING_FLAGS, Flags

INTERRUPTED = 130
CONTEXT = {"help_option_names": ["-h", "--help"]}


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
]  # as help lists them


class Verbs(TyperGroup):
    """Runs a verb and says in a sentence what went wrong; a traceback is only ever a bug of ours."""

    def list_commands(self, ctx: Any) -> list[str]:
        return VERBS

    def invoke(self, ctx: Any) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except Failure as failure:
            raise typer.Exit(report(failure)) from None
        except BrokenPipeError:
            # The reader has seen enough. What Python would still flush at exit has nowhere to go.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(0) from None
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        return result


app = typer.Typer(
    name="penstock",
    cls=Verbs,
    help="A durable, Kafka-compatible message queue.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings=CONTEXT,
)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"penstock {__version__}")
        raise typer.Exit()


@app.callback()
def penstock(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def _serve(flags: Flags) -> int:
    """Run a broker until it is told to stop (Ctrl-C or SIGTERM)."""
    return serve.start(flags)


app.command("serve")(with_flags(SERVE_FLAGS, _serve))
app.command("demo")(demo.demo)
app.add_typer(topic.app, name="topic")
app.command("produce")(produce.produce)
app.command("consume")(consume.consume)
app.add_typer(group.app, name="group")
app.add_typer(transaction.app, name="transaction")
app.add_typer(application.app, name="app")
app.add_typer(dlq.app, name="dlq")
app.add_typer(outbox.app, name="outbox")
app.add_typer(pipeline.app, name="pipeline")
app.add_typer(cluster.app, name="cluster")
app.add_typer(disk.app, name="disk")
app.command("config")(with_flags(SETTING_FLAGS, config.show))


def run(words: Sequence[str]) -> int:
    try:
        app(list(words), prog_name="penstock")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    return 0
