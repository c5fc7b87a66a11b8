"""`penstock pipeline`: run pipelines and jobs on Spark, show their status, stop, release and reset them.

This module declares the verbs and their options; it imports their implementation when a verb runs.
"""

import sys
import time
import uuid
from typing import Annotated

import typer

from penstock.cli.errors import CommandError
from penstock.cli.options import (
    DEFAULT_BOOTSTRAP,
    AsJson,
    Bootstrap,
    OffsetSpec,
    OffsetSpecKind,
    OnlyTopics,
    ShiftBy,
    To,
    ToEarliest,
    ToLatest,
    ToOffset,
    ToTimestamp,
    Yes,
    parse_reset_target,
)
from penstock.cli.output import note, print_json

app = typer.Typer(help="Run, watch, stop and reset pipelines on Spark.", no_args_is_help=True)

WATCH_EVERY_S = 2.0
POLL_S = 0.3

PipelineName = Annotated[str, typer.Argument(metavar="NAME", show_default=False)]
Properties = Annotated[
    list[str] | None,
    typer.Option(
        "--property", "-X", metavar="NAME=VALUE", help="A client setting, such as sasl.username. Repeatable."
    ),
]


@app.command("run", epilog="`penstock pipeline built-in` lists what comes with Penstock.")
def run_command(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="file.py, file.py:NAME, package.module:NAME, or a built-in pipeline.",
            show_default=False,
        ),
    ],
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="SETTING=VALUE", help="Of a built-in pipeline.", show_default=False),
    ] = None,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    master: Annotated[
        str,
        typer.Option(
            "--master", metavar="ADDRESS",
            help="Where Spark runs: local[*,4], spark://host:7077, or sc://host for Spark Connect.",
        ),
    ] = "local[*,4]",
    checkpoints: Annotated[
        str,
        typer.Option(
            "--checkpoints", metavar="DIR",
            help="Where pipelines keep how far they have come; a folder, or an address that all of Spark can reach.",
        ),
    ] = "checkpoints",
    once: Annotated[bool, typer.Option("--once", help="Read what is there now, and end.")] = False,
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="Run it under another name.")
    ] = None,
    restarts: Annotated[
        int | None,
        typer.Option(
            "--restarts", metavar="N", min=0,
            help="Give up after so many failures in a row; a pipeline never does, and a job at once.",
            show_default=False,
        ),
    ] = None,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="Go on even though another process seems to run it.")
    ] = False,
    properties: Properties = None,
    conf: Annotated[
        list[str] | None,
        typer.Option("--conf", "-c", metavar="NAME=VALUE", help="A setting of Spark. Repeatable."),
    ] = None,
) -> None:  # fmt: skip
    """Run a pipeline until Ctrl-C or SIGTERM. It finishes its batch first; a second signal stops it at once."""
    from penstock.cli.pipeline.run import run_target

    raise typer.Exit(
        run_target(
            target, settings or [], bootstrap=bootstrap, master=master, checkpoints=checkpoints, once=once, name=name,
            restarts=restarts, take_over=take_over, properties=properties or [], conf=conf or [],
        )
    )  # fmt: skip


@app.command("built-in")
def built_in() -> None:
    """List the pipelines and jobs that come with Penstock, with their settings."""
    from penstock.cli.pipeline.run import print_built_in

    print_built_in()


@app.command("list")
def list_pipelines(
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP, properties: Properties = None, as_json: AsJson = False
) -> None:
    """List pipelines with their state, rate and lag."""
    from penstock.cli.pipeline.status import open_status_store, print_list, view_pipelines

    with open_status_store(bootstrap, properties) as store:
        found = view_pipelines(store)
    if as_json:
        print_json([each.document() for each in found])
    elif found:
        print_list(found)
    else:
        note("no pipelines yet")


@app.command("status")
def status_command(
    name: PipelineName,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Look again every 2 seconds.")] = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    properties: Properties = None,
    as_json: AsJson = False,
) -> None:
    """Show the status of a pipeline: rate, lag, batch time, rows in, out, retried and dead."""
    from penstock.cli.pipeline.status import open_status_store, print_status, view_pipeline

    with open_status_store(bootstrap, properties) as store:
        while True:
            found = view_pipeline(store, name)
            if watch and sys.stdout.isatty() and not as_json:
                print("\x1b[H\x1b[2J", end="")
            if as_json:
                print_json(found.document())
            else:
                print_status(found)
            if not watch:
                return
            sys.stdout.flush()
            time.sleep(WATCH_EVERY_S)


@app.command("stop")
def stop_command(
    name: PipelineName,
    timeout_s: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", min=0, help="How long to wait for it.")
    ] = 90,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    properties: Properties = None,
) -> None:
    """Stop a pipeline between two batches, on whatever machine it runs, and wait until it has ended."""
    from penstock.cli.pipeline.status import open_status_store, view_pipeline
    from penstock.spark.pipelines.status import PipelineState, request_stop

    with open_status_store(bootstrap, properties) as store:
        found = view_pipeline(store, name)
        if found.state.is_over:
            note(f"{name} does not run: it is {found.state.value}")
            return
        request_stop(store, name, uuid.uuid4().hex)
        deadline = time.monotonic() + timeout_s
        while not found.state.is_over:
            if time.monotonic() > deadline:
                raise CommandError(
                    f"{name} has not stopped within {timeout_s:g} s",
                    hint=f"it will when its batch is done; `penstock pipeline status {name}` shows it",
                )
            time.sleep(POLL_S)
            found = view_pipeline(store, name)
        if found.state is PipelineState.LOST:
            raise CommandError(f"{name} is not heard of any more: whoever ran it is gone")
        note(f"{name} {found.state.value}")


@app.command("release")
def release_command(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="Of a pipeline or job, or the id of a query.", show_default=False
        ),
    ],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what is open.")] = False,
    yes: Yes = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    properties: Properties = None,
    as_json: AsJson = False,
) -> None:
    """End transactions that a pipeline left open when it was killed, so that readers do not wait for it.

    Commits what it had decided to write and aborts everything else. When it runs again, it continues where it was.
    """
    from penstock.cli.pipeline.reset import release_pipeline
    from penstock.cli.pipeline.status import open_status_store

    with open_status_store(bootstrap, properties) as store:
        release_pipeline(store, name, dry_run=dry_run, yes=yes, as_json=as_json)


@app.command("reset")
def reset_command(
    name: PipelineName,
    topics: OnlyTopics = None,
    to: To = None,
    to_earliest: ToEarliest = False,
    to_latest: ToLatest = False,
    to_offset: ToOffset = None,
    to_timestamp: ToTimestamp = None,
    shift_by: ShiftBy = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would change.")] = False,
    yes: Yes = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    properties: Properties = None,
    as_json: AsJson = False,
) -> None:
    """Let a stopped pipeline start again at other offsets, with a new checkpoint; at the earliest by default.

    Records waiting in its retry topics stay where they are. Shows the plan first and asks before it changes anything.
    """
    from penstock.cli.pipeline.reset import reset_pipeline
    from penstock.cli.pipeline.status import open_status_store

    target = parse_reset_target(
        to,
        to_earliest=to_earliest,
        to_latest=to_latest,
        to_offset=to_offset,
        to_timestamp=to_timestamp,
        shift_by=shift_by,
        default=OffsetSpec(OffsetSpecKind.BEGINNING),
    )
    with open_status_store(bootstrap, properties) as store:
        reset_pipeline(store, name, target, topics or [], dry_run=dry_run, yes=yes, as_json=as_json)
