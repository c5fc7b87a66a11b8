"""Commands whose options come from the flag table, so that a flag is declared in one place only."""

import inspect
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from penstock.cli.flags import Flag, Flags


def with_flags(flags: Sequence[Flag], command: Callable[..., int]) -> Callable[..., None]:
    """`command(written, **others)` as a command that takes these flags beside its own options."""
    names = {_identifier(flag): flag for flag in flags}

    def run(**given: Any) -> None:
        written: Flags = {}
        for name, flag in names.items():
            value = given.pop(name)
            if value:
                written[flag.name] = value if flag.repeatable else [] if flag.metavar is None else [value]
        raise typer.Exit(command(written, **given))

    own = list(inspect.signature(command).parameters.values())[1:]
    parameters = [*own, *(_parameter(name, flag) for name, flag in names.items())]
    run.__doc__ = command.__doc__
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
    )
    return run


def _parameter(name: str, flag: Flag) -> inspect.Parameter:
    option = typer.Option(flag.name, metavar=flag.metavar, help=flag.help, show_default=False)
    kind, default = _type_and_default(flag)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
    )


def _type_and_default(flag: Flag) -> tuple[Any, Any]:
    if flag.metavar is None:
        return bool, False
    return (list[str] | None, None) if flag.repeatable else (str | None, None)


def _identifier(flag: Flag) -> str:
    return "flag_" + flag.name.strip("-").replace("-", "_")
