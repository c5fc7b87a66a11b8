"""`penstock config`: the settings that a broker started here would have, and where each of them comes from."""

import os
from typing import Annotated

import typer

from penstock.broker.config.node_settings import NODE_SETTINGS, InvalidSetting, NodeSettings, variable_name
from penstock.cli.errors import EXIT_USAGE, CommandError
from penstock.cli.output import note, print_json, print_table
from penstock.cli.serve import Flags, settings_from_flags


def show(
    flags: Flags,
    filters: Annotated[list[str] | None, typer.Argument(metavar="PART", show_default=False)] = None,
    everything: Annotated[bool, typer.Option("--all", "-a", help="Show what is at its default too.")] = False,
    docs: Annotated[bool, typer.Option("--docs", help="Say what each setting means.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")] = False,
) -> int:
    """Show the effective settings and where each comes from.

    A flag beats an environment variable, which beats the TOML file, which beats the default. Takes the same
    flags as serve.
    """
    try:
        settings = settings_from_flags(flags, os.environ)
    except InvalidSetting as error:
        raise CommandError(str(error), exit_code=EXIT_USAGE) from None
    names = _matching_names(settings, filters or [], everything)
    if as_json:
        print_json({name: _setting_document(settings, name) for name in names})
    elif names:
        _print(settings, names, docs)
    if not names and not as_json:
        note(_nothing_to_show(filters or []))
    return 0


def _matching_names(settings: NodeSettings, filters: list[str], everything: bool) -> list[str]:
    names = [name for name in sorted(NODE_SETTINGS) if all(part in name for part in filters)]
    return names if everything or filters else [name for name in names if name in settings.origins]


def _nothing_to_show(filters: list[str]) -> str:
    if filters:
        return f"no setting has {' and '.join(filters)} in its name"
    return f"all {len(NODE_SETTINGS)} settings are at their defaults; --all shows them"


def _setting_document(settings: NodeSettings, name: str) -> dict[str, object]:
    declared, origin = NODE_SETTINGS[name], settings.source(name)
    return {
        "value": settings[name],
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
        row = [name, setting.text(settings[name]), str(settings.source(name))]
        rows.append([*row, setting.doc] if docs else row)
    columns = ["setting", "value", "source"]
    print_table([*columns, "meaning"] if docs else columns, rows, unfolded=["setting", "source"])
