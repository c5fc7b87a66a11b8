"""`penstock demo`: a broker, an application and Spark pipelines on one machine, shown while they run."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.errors import CommandError
from penstock.client.errors import ClientError


def demo(
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="Address that the broker listens on.")] = (
        "localhost:9092"
    ),
    data_dir: Annotated[
        Path,
        typer.Option(metavar="DIR", help="Directory for all data; a second start continues with it."),
    ] = Path("data"),
    http: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Serve /metrics, /health and /ready here.")
    ] = None,
    rate: Annotated[float, typer.Option(min=0.1, help="Orders per second.")] = 40.0,
    spark: Annotated[
        bool, typer.Option(help="Run the Spark pipelines, which need the `spark` extra.")
    ] = True,
    secure: Annotated[
        bool, typer.Option("--secure", help="With TLS, a login and access rules; kept by later starts.")
    ] = False,
    lines: Annotated[
        bool,
        typer.Option(
            "--lines", help="Print lines instead of a screen, as when the output is not a terminal."
        ),
    ] = False,
    every: Annotated[
        float, typer.Option(min=0.1, help="Seconds between two summaries, if lines are printed.")
    ] = 5.0,
) -> None:
    """Run a broker, an application and Spark pipelines that process, repair, sum up and archive orders."""
    from penstock.demo.launcher import Demo, DemoFailed, DemoSettings  # loads everything that the demo runs

    settings = DemoSettings(
        data=data_dir,
        listen=listen,
        http=http or None,
        orders_per_s=rate,
        with_spark=spark,
        secure=secure,
        on_screen=sys.stdout.isatty() and not lines,
        lines_every_s=every,
    )
    try:
        code = Demo(settings).run()
    except DemoFailed as error:
        raise CommandError(str(error), hint=error.hint) from None
    except ClientError as error:
        raise CommandError(str(error)) from None
    raise typer.Exit(code)
