"""Options that several commands share, and how their values are read."""

from collections.abc import Iterable
from typing import Annotated

import typer

from penstock.cli.failure import WRONG_USAGE, Failure

Bootstrap = Annotated[
    str,
    typer.Option(
        "--bootstrap", "-b", metavar="HOST:PORT", envvar="PENSTOCK_BOOTSTRAP", help="A broker of the cluster."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]

DEFAULT_BOOTSTRAP = "localhost:9092"


def pairs(texts: Iterable[str], flag: str) -> dict[str, str]:
    """`NAME=VALUE` texts as a mapping."""
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise Failure(f"{flag} takes NAME=VALUE, not {text!r}", exit_code=WRONG_USAGE)
        found[name.strip()] = value
    return found
