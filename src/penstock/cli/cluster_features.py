"""`penstock cluster features`: which levels of the protocol the whole cluster has agreed on, and changing them."""

from typing import Annotated, Any

import typer

from penstock.cli.client import Cluster
from penstock.cli.cluster_requests import Refused, an_address, set_features
from penstock.cli.failure import WRONG_USAGE, Failure
from penstock.cli.options import DEFAULT_BOOTSTRAP, AsJson, Bootstrap, Yes, pairs
from penstock.cli.output import confirm, note, print_json, print_table
from penstock.cli.wire import Address, Feature, features


def show_or_set(
    levels: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME=LEVEL]...", help="The level to set, for example transaction.version=2."
        ),
    ] = None,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Show the levels of the cluster's features, or set some of them, all together or none.

    Clients follow at their next connection. Going down takes capabilities away, and asks first.
    """
    wanted = _levels(levels or [])
    address = an_address(Cluster(bootstrap))
    known = _known(address)
    if wanted:
        _set(address, known, wanted, yes=yes)
        known = _known(address)
    _print(known, as_json=as_json)


def _levels(words: list[str]) -> dict[str, int]:
    wanted = pairs(words, "a feature")
    for name, level in wanted.items():
        if not (level.isascii() and level.isdigit()):
            raise Failure(f"{name}={level}: a level is a whole number", exit_code=WRONG_USAGE)
    return {name: int(level) for name, level in wanted.items()}


def _known(address: Address) -> dict[str, Feature]:
    try:
        return features(address)
    except OSError as error:
        raise Failure(f"the broker does not answer: {error}") from None


def _set(address: Address, known: dict[str, Feature], wanted: dict[str, int], *, yes: bool) -> None:
    for name, level in wanted.items():
        _check(known, name, level)
    lowered = [name for name, level in wanted.items() if level < known[name].level]
    if lowered:
        confirm(f"Lower {', '.join(lowered)}?", yes=yes)
    try:
        set_features(address, wanted, lowered)
    except Refused as error:
        raise Failure(f"nothing was changed: {error}") from None
    except OSError as error:
        raise Failure(f"the controller does not answer: {error}") from None
    note("set " + ", ".join(f"{name} {level}" for name, level in wanted.items()))


def _check(known: dict[str, Feature], name: str, level: int) -> None:
    feature = known.get(name)
    if feature is None:
        hint = f"there are {', '.join(sorted(known))}" if known else None
        raise Failure(f"no feature {name}", hint=hint, exit_code=WRONG_USAGE)
    if not feature.level_min <= level <= feature.level_max:
        spelled = f"{feature.level_min} to {feature.level_max}"
        raise Failure(f"{name} has levels {spelled}, not {level}", exit_code=WRONG_USAGE)


def _print(known: dict[str, Feature], *, as_json: bool) -> None:
    rows: list[dict[str, Any]] = [
        {"feature": name, "level": one.level, "lowest": one.level_min, "highest": one.level_max}
        for name, one in sorted(known.items())
    ]
    if as_json:
        print_json(rows)
    else:
        print_table(["feature", "level", "lowest", "highest"], (list(row.values()) for row in rows))
