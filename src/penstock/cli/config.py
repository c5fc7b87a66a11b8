"""`penstock config`: the settings that a broker started here would have, and where each of them comes from.

`serve` is here too, as the command-line library sees it for help and usage errors: both commands take their options
from the table of flags in `penstock.cli.serve`, so that each flag is declared once.
"""

import inspect
import os
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from penstock.broker.config.node_settings import NODE_SETTINGS, InvalidSetting, NodeSettings, variable_name
from penstock.cli.errors import EXIT_USAGE, CommandError
from penstock.cli.options import AsJson, with_parameters
from penstock.cli.output import HIDDEN, note, print_json, print_table
from penstock.cli.serve import SERVE_FLAGS, SETTING_FLAGS, Flag, Flags, settings_from_flags, start
from penstock.protocol.config_def import SettingType


def show(
    flags: Flags,
    filters: Annotated[
        list[str] | None,
        typer.Argument(metavar="PART", help="Only settings with this in their name.", show_default=False),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", "-a", help="Also show settings that have their default.")
    ] = False,
    docs: Annotated[bool, typer.Option("--docs", help="Also show what each setting means.")] = False,
    as_json: AsJson = False,
) -> int:
    """Show the effective settings and where each comes from.

    A flag overrides an environment variable, which overrides the TOML file, which overrides the default. Takes the
    same flags as serve.
    """
    try:
        settings = settings_from_flags(flags, os.environ)
    except InvalidSetting as error:
        raise CommandError(str(error), exit_code=EXIT_USAGE) from None
    names = [name for name in sorted(NODE_SETTINGS) if all(part in name for part in filters or ())]
    if not everything and not filters:
        names = [name for name in names if name in settings.origins]
    if as_json:
        print_json({name: _setting_document(settings, name) for name in names})
    elif names:
        _print(settings, names, docs)
    elif filters:
        note(f"no setting has {' and '.join(filters)} in its name")
    else:
        note(f"all {len(NODE_SETTINGS)} settings have their defaults; --all shows them")
    return 0


def _setting_document(settings: NodeSettings, name: str) -> dict[str, object]:
    declared, origin = NODE_SETTINGS[name], settings.source(name)
    return {
        "value": HIDDEN if declared.type is SettingType.PASSWORD and settings[name] else settings[name],
        "default": declared.default,
        "source": origin.kind,
        "source_detail": origin.detail or None,
        "variable": variable_name(name),
        "doc": declared.doc,
    }


def _print(settings: NodeSettings, names: list[str], docs: bool) -> None:
    rows = []
    for name in names:
        setting = NODE_SETTINGS[name]
        is_secret = setting.type is SettingType.PASSWORD and settings[name]
        row = [name, HIDDEN if is_secret else setting.text(settings[name]), str(settings.source(name))]
        rows.append([*row, setting.doc] if docs else row)
    columns = ["setting", "value", "source"]
    print_table([*columns, "meaning"] if docs else columns, rows, unfolded=["setting", "source"])


def _serve(flags: Flags) -> int:
    """Run a broker until Ctrl-C or SIGTERM."""
    return start(flags)


def _with_flags(flags: Sequence[Flag], command: Callable[..., int]) -> Callable[..., None]:
    """Turns `command(written, **others)` into a typer command with these flags in addition to its own options."""
    names = {"flag_" + flag.name.strip("-").replace("-", "_"): flag for flag in flags}

    def run(**given: Any) -> None:
        written: Flags = {}
        for name, flag in names.items():
            value = given.pop(name)
            if value:
                written[flag.name] = value if flag.repeatable else [] if flag.metavar is None else [value]
        raise typer.Exit(command(written, **given))

    run.__doc__ = command.__doc__
    own = list(inspect.signature(command).parameters.values())[1:]
    return with_parameters(run, [*own, *(_flag_parameter(name, flag) for name, flag in names.items())])


def _flag_parameter(name: str, flag: Flag) -> inspect.Parameter:
    option = typer.Option(flag.name, metavar=flag.metavar, help=flag.help, show_default=False)
    kind: Any = bool if flag.metavar is None else list[str] | None if flag.repeatable else str | None
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=False if flag.metavar is None else None,
        annotation=Annotated[kind, option],
    )


serve = _with_flags(SERVE_FLAGS, _serve)
config = _with_flags(SETTING_FLAGS, show)
