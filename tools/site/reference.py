"""Reference pages in Markdown, generated from the code: settings, metrics, commands and the public Python API."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import typer
from tools.site.metric_families import declared_families

from penstock.broker.config.node_settings import NODE_SETTINGS, OTHER_VARIABLES, variable_name
from penstock.cli.commands import root_app
from penstock.client.wire.settings import NUMERIC_SETTINGS, ConnectionSettings
from penstock.cluster.client_metrics import CLIENT_METRICS_SETTINGS
from penstock.cluster.group_settings import GROUP_SETTINGS
from penstock.cluster.tenants import TENANT_SETTINGS
from penstock.cluster.topic_settings import TOPIC_SETTINGS
from penstock.protocol.config_def import Setting
from penstock.spark.sink.options import SINK_OPTIONS
from penstock.spark.source.options import SOURCE_OPTIONS

#: Packages whose public names users import.
API_PACKAGES = ("penstock.client", "penstock.spark", "penstock.testing")


def pages() -> dict[str, str]:
    """Return every generated page by its path below docs/."""
    return {
        "reference/settings.md": settings_page(),
        "reference/metrics.md": metrics_page(),
        "reference/commands.md": commands_page(),
        **{f"reference/{package.partition('.')[2]}.md": api_page(package) for package in API_PACKAGES},
    }


# Settings


def settings_page() -> str:
    return "\n".join(
        (
            "# Settings\n",
            "Durations end in `.ms` and are milliseconds; sizes end in `.bytes`. `penstock config` prints the values "
            "that a node would start with and where each comes from.\n",
            "## Nodes\n",
            "A value comes from the first of these that has it: a flag (`--set NAME=VALUE`), the environment variable, "
            "the TOML file (`--config`), the default. A dynamic setting can be changed while the node runs.\n",
            *_table(
                ("Setting", "Type", "Default", "Values", "Dynamic", "Variable", "Meaning"),
                (
                    (
                        *_setting_cells(setting),
                        "no" if setting.read_only else "yes",
                        f"`{variable_name(name)}`",
                        _cell(setting.doc),
                    )
                    for name, setting in NODE_SETTINGS.items()
                ),
            ),
            "## Topics\n",
            "Set with `penstock topic create -c NAME=VALUE` and `penstock topic alter -c NAME=VALUE`. A topic that "
            "does not set a value has the value of the node setting in the column *Default from*.\n",
            *_resource_table(TOPIC_SETTINGS),
            "## Groups\n",
            "Set with `penstock group alter GROUP -c NAME=VALUE`.\n",
            *_resource_table(GROUP_SETTINGS),
            "## Client metrics subscriptions\n",
            "Set with the tools of Apache Kafka (`kafka-client-metrics.sh`).\n",
            *_resource_table(CLIENT_METRICS_SETTINGS),
            "## Tenants\n",
            "Set by [`penstock tenant`](../tenants.md).\n",
            *_resource_table(TENANT_SETTINGS),
            "## Other environment variables\n",
            *_table(
                ("Variable", "Meaning"),
                ((f"`{name}`", _cell(text)) for name, text in OTHER_VARIABLES.items()),
            ),
            "## Connections of the raw client\n",
            "`penstock.client.wire` and Spark (there with the prefix `kafka.`) read these settings, and "
            "`bootstrap.servers`, `client.id`, `security.protocol`, `sasl.*` and `ssl.*`.\n",
            *_table(("Setting", "Default"), _connection_rows()),
            '## Options of `format("penstock")`\n',
            "[Pipelines](../pipelines.md) describes them. Options that begin with `kafka.` are connection settings.\n",
            *_table(("Option", "Source", "Sink"), _spark_rows()),
        )
    )


def _resource_table(settings: Mapping[str, Setting]) -> Iterator[str]:
    return _table(
        ("Setting", "Type", "Default", "Values", "Default from", "Meaning"),
        (
            (*_setting_cells(each), f"`{each.synonyms[0].name}`" if each.synonyms else "", _cell(each.doc))
            for each in settings.values()
        ),
    )


def _setting_cells(setting: Setting) -> tuple[str, str, str, str]:
    default = setting.text(setting.default)
    return (
        f"`{setting.name}`",
        setting.type.name.lower(),
        "" if default is None else f"`{default}`" if default else "empty",
        _allowed_values(setting),
    )


def _allowed_values(setting: Setting) -> str:
    if setting.choices is not None:
        return ", ".join(f"`{choice}`" for choice in setting.choices)
    low, high = setting.at_least, setting.at_most
    if low is None and high is None:
        return ""
    if high is None:
        return f"at least {low}"
    return f"at most {high}" if low is None else f"{low} to {high}"


def _connection_rows() -> Iterator[tuple[str, str]]:
    defaults = {each.name: each.default for each in fields(ConnectionSettings)}
    for field_name, names in NUMERIC_SETTINGS.items():
        yield " or ".join(f"`{name}`" for name in names), f"`{defaults[field_name]}`"


def _spark_rows() -> Iterator[tuple[str, str, str]]:
    for name in sorted({*SOURCE_OPTIONS, *SINK_OPTIONS}):
        yield f"`{name}`", "yes" if name in SOURCE_OPTIONS else "", "yes" if name in SINK_OPTIONS else ""


# Metrics


def metrics_page() -> str:
    return "\n".join(
        (
            "# Metrics\n",
            "A node serves these metrics at `/metrics` of `penstock.http.listen`, in the text format of Prometheus. "
            "Prometheus adds `_total` to the names of counters, and `_bucket`, `_count` and `_sum` to those of "
            "histograms. The `process_*` metrics of the Prometheus library come with them.\n",
            *_table(
                ("Metric", "Kind", "Labels", "Meaning"),
                (
                    (f"`{each.name}`", each.kind, _names(each.labels), _cell(each.help))
                    for each in declared_families()
                ),
            ),
        )
    )


# Commands


def commands_page() -> str:
    sections = ["# Commands\n", "`penstock COMMAND --help` prints the same.\n"]
    for words, command in commands():
        sections += _command_section(words, command)
    return "\n".join(sections)


def commands() -> Iterator[tuple[str, Any]]:
    """Yield every command with the words that call it, groups before their commands."""
    yield from _walk("penstock", typer.main.get_command(root_app))


def _walk(words: str, command: Any) -> Iterator[tuple[str, Any]]:
    if words != "penstock":
        yield words, command
    if hasattr(command, "commands"):
        context = command.context_class(command, info_name=words)
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            if not child.hidden:
                yield from _walk(f"{words} {name}", child)


def _command_section(words: str, command: Any) -> Iterator[str]:
    yield f"{'##' if words.count(' ') == 1 else '###'} {words}\n"
    yield "\n\n".join(_cell(part) for part in (command.help or "").split("\n\n")) + "\n"
    if hasattr(command, "commands"):
        return
    context = command.context_class(command, info_name=words)
    shown = [each for each in command.params if not getattr(each, "hidden", False)]
    yield f"```\n{words} {' '.join(command.collect_usage_pieces(context))}\n```\n"
    yield from _table(
        ("Argument or option", "Meaning"),
        (
            (f"`{name}`", _cell(text))
            for name, text in filter(None, (each.get_help_record(context) for each in shown))
        ),
    )


# Python API


def api_page(package: str) -> str:
    """Return a page whose `:::` lines mkdocstrings replaces with the documentation of each public name."""
    lines = [
        f"# {package}\n",
        f"::: {package}",
        "    options:",
        "      members: false",
        "      heading_level: 2",
    ]
    lines += ["      show_root_heading: false", ""]
    module = importlib.import_module(package)
    for name in public_names(package):
        home = getattr(module, name).__module__
        if home.startswith("penstock."):
            lines += [f"::: {package}.{name}", ""]
        else:  # mkdocstrings reads only the sources of penstock
            lines += [f"## {name}\n", f"`{home}.{name}`.\n"]
    return "\n".join(lines)


def public_names(package: str) -> list[str]:
    """Return the names that a package defines or exports, in alphabetical order.

    The packages import most names on first use, so this reads the imports that they declare for type checkers.
    """
    module = importlib.import_module(package)
    assert module.__file__ is not None
    names = {*getattr(module, "__all__", ())}
    for node in ast.parse(Path(module.__file__).read_text()).body:
        match node:
            case ast.If(test=ast.Name(id="TYPE_CHECKING"), body=body):
                for each in body:
                    if isinstance(each, ast.ImportFrom):
                        names |= {alias.asname or alias.name for alias in each.names}
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
    return sorted((name for name in names if not name.startswith("_")), key=str.lower)


# Markdown


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(header)} |"
    yield "|---" * len(header) + "|"
    for row in rows:
        yield f"| {' | '.join(row)} |"
    yield ""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
