"""`penstock demo`: a whole story on one machine, shown while it happens."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.failure import Failure


def demo(
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where the broker listens.")] = (
        "localhost:9092"
    ),
    data_dir: Annotated[
        Path,
        typer.Option(metavar="DIR", help="Folder for all that it keeps; a second start goes on with it."),
    ] = Path("data"),
    http: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Serve /metrics, /health and /ready here.")
    ] = None,
    rate: Annotated[float, typer.Option(min=0.1, help="Orders in a second.")] = 40.0,
    spark: Annotated[bool, typer.Option(help="With pipelines, which need the `spark` extra.")] = True,
    lines: Annotated[
        bool, typer.Option("--lines", help="Write lines, as where the output is no terminal.")
    ] = False,
    every: Annotated[
        float, typer.Option(min=0.1, help="Seconds between lines that tell how things are.")
    ] = 5.0,
) -> None:
    """Orders that flow, fail, are mended, summed up and archived: broker, subscriber and Spark pipelines in one go."""
    from penstock.client.errors import ClientError
    from penstock.demo.house import DemoFailed, DemoSettings, House

    settings = DemoSettings(
        data=data_dir,
        listen=listen,
        http=http or None,
        orders_per_s=rate,
        with_spark=spark,
        on_screen=sys.stdout.isatty() and not lines,
        lines_every_s=every,
    )
    try:
        code = House(settings).run()
    except DemoFailed as error:
        raise Failure(str(error), hint=error.hint) from None
    except ClientError as error:
        raise Failure(str(error)) from None
    raise typer.Exit(code)
