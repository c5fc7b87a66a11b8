"""The verbs of `penstock pipeline` and their options.

This module imports their implementation when a verb runs, because that loads much of `penstock.spark`, which
`penstock --help` does not need.
"""

import sys
import time
import uuid
from typing import Annotated

import typer

from penstock.cli.connection import ConnectionOptions
from penstock.cli.errors import CommandError
from penstock.cli.options import AsJson, OffsetSpec, OffsetSpecKind, ResetOptions, Watch, Yes, expand_options
from penstock.cli.output import WATCH_EVERY_S, clear_screen, note, print_json

app = typer.Typer(help="Run, watch, stop and reset pipelines on Spark.", no_args_is_help=True)

POLL_S = 0.3

PipelineName = Annotated[str, typer.Argument(metavar="NAME", show_default=False)]


@app.command("run", epilog="`penstock pipeline built-in` lists the pipelines that come with Penstock.")
@expand_options
def run_command(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="file.py, file.py:NAME, package.module:NAME, or a built-in pipeline.",
            show_default=False,
        ),
    ],
    connection: ConnectionOptions,
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="SETTING=VALUE", help="Settings of a built-in pipeline.", show_default=False),
    ] = None,
    master: Annotated[
        str,
        typer.Option(
            "--master",
            metavar="ADDRESS",
            help="Spark master: local[*,4], spark://host:7077, or sc://host for Spark Connect.",
        ),
    ] = "local[*,4]",
    checkpoints: Annotated[
        str,
        typer.Option(
            "--checkpoints",
            metavar="DIR",
            help="Directory of the checkpoints; a path or address that all Spark executors can reach.",
        ),
    ] = "checkpoints",
    once: Annotated[
        bool, typer.Option("--once", help="Process the records that exist now, then end.")
    ] = False,
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="Run it under another name.")
    ] = None,
    restarts: Annotated[
        int | None,
        typer.Option(
            "--restarts",
            metavar="N",
            min=0,
            help="Restarts after failures in a row. Default: unlimited for a pipeline, none for a job.",
            show_default=False,
        ),
    ] = None,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="Run even if another process seems to run it.")
    ] = False,
    conf: Annotated[
        list[str] | None,
        typer.Option("--conf", "-c", metavar="NAME=VALUE", help="A Spark setting. Repeatable."),
    ] = None,
) -> None:
    """Run a pipeline until Ctrl-C or SIGTERM. It finishes its batch first; a second signal stops it at once."""
    from penstock.cli.pipeline.run import run_target

    code = run_target(
        target,
        settings or [],
        connection,
        master=master,
        checkpoints=checkpoints,
        once=once,
        name=name,
        restarts=restarts,
        take_over=take_over,
        conf=conf or [],
    )
    raise typer.Exit(code)


@app.command("built-in")
def built_in() -> None:
    """List the pipelines and jobs that come with Penstock, with their settings."""
    from penstock.cli.pipeline.run import print_built_in

    print_built_in()


@app.command("list")
@expand_options
def list_pipelines(connection: ConnectionOptions, as_json: AsJson = False) -> None:
    """List pipelines with their state, rate and lag."""
    from penstock.cli.pipeline.status import open_status_store, print_list, view_pipelines

    with open_status_store(connection) as store:
        found = view_pipelines(store)
    if as_json:
        print_json([each.document() for each in found])
    elif found:
        print_list(found)
    else:
        note("no pipelines yet")


@app.command("status")
@expand_options
def status_command(
    name: PipelineName, connection: ConnectionOptions, watch: Watch = False, as_json: AsJson = False
) -> None:
    """Show the status of a pipeline: rate, lag, batch time, rows in, out, retried and dead."""
    from penstock.cli.pipeline.status import open_status_store, print_status, view_pipeline

    with open_status_store(connection) as store:
        while True:
            found = view_pipeline(store, name)
            if watch:
                clear_screen(as_json)
            if as_json:
                print_json(found.document())
            else:
                print_status(found)
            if not watch:
                return
            sys.stdout.flush()
            time.sleep(WATCH_EVERY_S)


@app.command("stop")
@expand_options
def stop_command(
    name: PipelineName,
    connection: ConnectionOptions,
    timeout_s: Annotated[
        float,
        typer.Option("--timeout", metavar="SECONDS", min=0, help="How long to wait until it has stopped."),
    ] = 90,
) -> None:
    """Stop a pipeline between two batches, on any machine, and wait until it has ended."""
    from penstock.cli.pipeline.status import open_status_store, view_pipeline
    from penstock.spark.pipelines.status import PipelineState, request_stop

    with open_status_store(connection) as store:
        found = view_pipeline(store, name)
        if found.state.is_over:
            note(f"{name} is not running: it is {found.state.value}")
            return
        request_stop(store, name, uuid.uuid4().hex)
        deadline = time.monotonic() + timeout_s
        while not found.state.is_over:
            if time.monotonic() > deadline:
                raise CommandError(
                    f"{name} has not stopped within {timeout_s:g} s",
                    hint=f"it stops when its batch is done; `penstock pipeline status {name}` shows its state",
                )
            time.sleep(POLL_S)
            found = view_pipeline(store, name)
        if found.state is PipelineState.LOST:
            raise CommandError(
                f"{name} is lost: the process that ran it no longer reports its status",
                hint=f"`penstock pipeline status {name}` shows where it ran",
            )
        note(f"{name} {found.state.value}")


@app.command("release")
@expand_options
def release_command(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="The name of a pipeline or job, or the id of a query.", show_default=False
        ),
    ],
    connection: ConnectionOptions,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show the open transactions.")] = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """End transactions that a pipeline left open when it was killed, so that readers do not wait for it.

    Commits what it had decided to write and aborts everything else. When it runs again, it continues where it was.
    """
    from penstock.cli.pipeline.reset import release_pipeline
    from penstock.cli.pipeline.status import open_status_store

    with open_status_store(connection) as store:
        release_pipeline(store, name, dry_run=dry_run, yes=yes, as_json=as_json)


@app.command("reset")
@expand_options
def reset_command(
    name: PipelineName, options: ResetOptions, connection: ConnectionOptions, as_json: AsJson = False
) -> None:
    """Let a stopped pipeline start again at other offsets, with a new checkpoint; at the earliest by default.

    Records in its retry topics stay there. Shows the plan and asks for confirmation before it changes anything.
    """
    from penstock.cli.pipeline.reset import reset_pipeline
    from penstock.cli.pipeline.status import open_status_store

    target = options.target(default=OffsetSpec(OffsetSpecKind.BEGINNING))
    with open_status_store(connection) as store:
        reset_pipeline(
            store,
            name,
            target,
            options.topics or [],
            dry_run=options.dry_run,
            yes=options.yes,
            as_json=as_json,
        )
