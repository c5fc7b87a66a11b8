"""`penstock serve`: run a broker, or several under one supervisor, until SIGTERM or Ctrl-C.

The flags that set a node's settings are declared once, here: for `serve`, for `config`, and for their help. This
module does not load the command-line library.
"""

import errno
import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from penstock.broker.config.node_settings import InvalidSetting, NodeSettings, load_settings
from penstock.cli import imports_without_gc
from penstock.cli.errors import EXIT_USAGE, CommandError, report_error
from penstock.cli.os_process import raise_open_file_limit

Flags = dict[str, list[str]]  # the values given, by flag; a switch has no values


class Flag(NamedTuple):
    name: str
    metavar: str | None  # None for a switch
    help: str
    setting: str | None = None
    repeatable: bool = False


SETTING_FLAGS = (
    Flag(
        "--listen",
        "[NAME://]HOST:PORT",
        "Address to listen on; port 0 picks a free one. NODES://HOST:PORT is for other nodes.",
        "listeners",
        repeatable=True,
    ),
    Flag(
        "--advertise",
        "[NAME://]HOST:PORT",
        "Address that clients are told, where it differs.",
        "advertised.listeners",
        repeatable=True,
    ),
    Flag("--data-dir", "DIR", "Folder for the data; made if it is not there.", "log.dirs"),
    Flag("--node-id", "N", "Id of this node in the cluster.", "node.id"),
    Flag("--roles", "ROLE,ROLE", "broker, controller, or both (the default).", "process.roles"),
    Flag(
        "--voters",
        "ID@HOST:PORT,...",
        "The controllers that found a new cluster together, the same on all of them.",
        "controller.quorum.voters",
        repeatable=True,
    ),
    Flag(
        "--join",
        "HOST:PORT,...",
        "Nodes of a running cluster, to find and join it.",
        "controller.quorum.bootstrap.servers",
        repeatable=True,
    ),
    Flag("--rack", "NAME", "What fails together: a rack, a zone; else the host.", "broker.rack"),
    Flag("--http", "HOST:PORT", "Serve /metrics, /health and /ready here.", "penstock.http.listen"),
    Flag("--config", "FILE", "TOML file with settings (also PENSTOCK_CONFIG)."),
    Flag(
        "--set",
        "NAME=VALUE",
        "Any setting by its name; `penstock config --all` lists them.",
        repeatable=True,
    ),
)

WORKERS_FLAG = "--workers"
STOP_WITH_STDIN_FLAG = "--stop-with-stdin"

SERVE_FLAGS = (
    *SETTING_FLAGS,
    Flag(WORKERS_FLAG, "N", "Run N nodes, one per core: ids, ports and folders count up from this one's."),
    Flag(
        STOP_WITH_STDIN_FLAG, None, "Stop when stdin ends: together with the process that started this one."
    ),
    Flag("--welcome", None, "Print what to try next once the broker is up."),
)


def parse_flags(words: Sequence[str]) -> Flags | None:
    """The flags of `serve`; None if the command-line library has to handle them: help, or a usage error."""
    known = {flag.name: flag for flag in SERVE_FLAGS}
    flags: Flags = {}
    rest = list(reversed(words))
    while rest:
        name, equals, value = rest.pop().partition("=")
        flag = known.get(name)
        if flag is None or (flag.metavar is None and equals):
            return None
        values = flags.setdefault(name, [])
        if flag.metavar is None:
            continue
        if not equals:
            if not rest or rest[-1].startswith("-"):
                return None
            value = rest.pop()
        values.append(value)
    return flags


def settings_from_flags(flags: Mapping[str, Sequence[str]], environ: Mapping[str, str]) -> NodeSettings:
    """The effective settings. Raises InvalidSetting."""
    texts: dict[str, str] = {}
    written_as: dict[str, str] = {}
    for text in flags.get("--set", ()):
        name, equals, value = text.partition("=")
        if not equals:
            raise InvalidSetting(f"--set takes NAME=VALUE, not {text!r}")
        texts[name.strip()] = value
    for flag in SETTING_FLAGS:
        values = flags.get(flag.name)
        if flag.setting is not None and values:
            texts[flag.setting] = ",".join(values) if flag.repeatable else values[-1]
            written_as[flag.setting] = flag.name
    files = flags.get("--config") or [environ.get("PENSTOCK_CONFIG", "")]
    return load_settings(texts, environ, files[-1] or None, flag_names=written_as)


def start(flags: Mapping[str, Sequence[str]]) -> int:
    try:
        settings = settings_from_flags(flags, os.environ)
    except InvalidSetting as error:
        return report_error(CommandError(str(error), exit_code=EXIT_USAGE))
    raise_open_file_limit()
    if STOP_WITH_STDIN_FLAG in flags:
        from penstock.cli.os_process import stop_with_stdin

        stop_with_stdin()
    return _start_workers(flags, settings) if WORKERS_FLAG in flags else _start_node(flags, settings)


def _start_workers(flags: Mapping[str, Sequence[str]], settings: NodeSettings) -> int:
    from penstock.cli.cluster import workers

    try:
        return workers.start_workers(flags, settings)
    except CommandError as failure:
        return report_error(failure)


def _start_node(flags: Mapping[str, Sequence[str]], settings: NodeSettings) -> int:
    with imports_without_gc():
        from penstock.broker.node import StartFailed, serve
        from penstock.cli.welcome import print_ready

    try:
        return serve(settings, lambda node: print_ready(node, welcome="--welcome" in flags))
    except StartFailed as error:
        return report_error(CommandError(str(error), hint=error.hint))
    except OSError as error:
        return report_error(_data_dir_error(error, settings))


def _data_dir_error(error: OSError, settings: NodeSettings) -> CommandError:
    """Address errors are StartFailed, so this error is about the data folder: not writable, not a folder, no space."""
    path = error.filename or settings.data_dir
    if error.errno in (errno.EEXIST, errno.ENOTDIR):
        return CommandError(f"{path} is not a folder", hint="--data-dir names another")
    why = os.strerror(error.errno) if error.errno else str(error)
    return CommandError(f"{path}: {why}", hint="--data-dir names another folder")
