"""`penstock serve`: run a broker, or several under one supervisor, until SIGTERM or Ctrl-C.

The flags that set a node's settings are declared once, here: for `serve`, for `config`, and for their help. This
module does not load the command-line library.
"""

import errno
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from penstock import __version__
from penstock.broker.config.listeners import format_address
from penstock.broker.config.node_settings import InvalidSetting, NodeSettings, load_settings
from penstock.cli import imports_without_gc
from penstock.cli.errors import EXIT_USAGE, CommandError, report_error
from penstock.cli.os_process import notify_ready, penstock_command, raise_open_file_limit, stop_with_stdin

if TYPE_CHECKING:
    from penstock.broker.controller.bootstrap_user import BootstrapUser
    from penstock.broker.node import Node

Flags = dict[str, list[str]]  # the values given, by flag; a switch has no values

_WELCOME_TEMPLATE = """
  Penstock {version} is up. Data is in {data_dir}; Ctrl-C stops it cleanly.

  Try, in another terminal:

    {command} topic create orders --partitions 3
    echo 'hello' | {command} produce orders
    {command} consume orders
    {command} group list

  Any Kafka client works: bootstrap.servers={address}
"""


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
        "Address that clients connect to, if it differs from --listen.",
        "advertised.listeners",
        repeatable=True,
    ),
    Flag("--data-dir", "DIR", "Data directory; created if it does not exist.", "log.dirs"),
    Flag("--node-id", "N", "Id of this node in the cluster.", "node.id"),
    Flag("--roles", "ROLE,ROLE", "broker, controller, or both (the default).", "process.roles"),
    Flag(
        "--voters",
        "ID@HOST:PORT,...",
        "Initial controllers of a new cluster; the same value on all of them.",
        "controller.quorum.voters",
        repeatable=True,
    ),
    Flag(
        "--join",
        "HOST:PORT,...",
        "Nodes of a running cluster to join.",
        "controller.quorum.bootstrap.servers",
        repeatable=True,
    ),
    Flag("--rack", "NAME", "Rack or zone of this node. Default: its host.", "broker.rack"),
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
BOOTSTRAP_USER_FLAG = "--bootstrap-user"
PASSWORD_FILE_FLAG = "--bootstrap-password-file"
PASSWORD_VARIABLE = "PENSTOCK_BOOTSTRAP_PASSWORD"
STOP_WITH_STDIN_FLAG = "--stop-with-stdin"

SERVE_FLAGS = (
    *SETTING_FLAGS,
    Flag(
        WORKERS_FLAG, "N", "Run N nodes, one per core; ids, ports and directories count up from those given."
    ),
    Flag(
        STOP_WITH_STDIN_FLAG,
        None,
        "Stop when stdin ends, that is, when the process that started this one ends.",
    ),
    Flag(
        BOOTSTRAP_USER_FLAG,
        "NAME",
        "Create this SCRAM user if the cluster has none, before clients are served.",
    ),
    Flag(
        PASSWORD_FILE_FLAG,
        "FILE",
        f"The password of that user; else {PASSWORD_VARIABLE}, or it is asked for.",
    ),
    Flag("--welcome", None, "Print commands to try once the broker is up."),
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
    for number, text in enumerate(flags.get("--set", ()), start=1):
        name, equals, value = text.partition("=")
        if not equals:  # the text may be a password
            raise InvalidSetting(f"--set takes NAME=VALUE, and number {number} is not of this form")
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
        stop_with_stdin()
    if WORKERS_FLAG not in flags:
        return _start_node(flags, settings)
    if BOOTSTRAP_USER_FLAG in flags:
        hint = "start one node with it first, or use `penstock user create` later"
        why = f"{BOOTSTRAP_USER_FLAG} does not go with {WORKERS_FLAG}"
        return report_error(CommandError(why, hint=hint, exit_code=EXIT_USAGE))
    from penstock.cli.cluster.workers import start_workers  # a single node starts faster without it

    try:
        return start_workers(flags, settings)
    except CommandError as failure:
        return report_error(failure)


def _start_node(flags: Mapping[str, Sequence[str]], settings: NodeSettings) -> int:
    with imports_without_gc():
        from penstock.broker.environment import StartFailed
        from penstock.broker.process import serve

    try:
        user = _bootstrap_user(flags)
    except CommandError as failure:
        return report_error(failure)
    try:
        return serve(settings, lambda node: _print_ready(node, welcome="--welcome" in flags), user)
    except StartFailed as error:
        return report_error(CommandError(str(error), hint=error.hint))
    except OSError as error:
        return report_error(_data_dir_error(error, settings))


def _bootstrap_user(flags: Mapping[str, Sequence[str]]) -> "BootstrapUser | None":
    """Raises CommandError."""
    names = flags.get(BOOTSTRAP_USER_FLAG)
    if not names:
        return None
    # Imported here, because only the first start of a cluster needs them.
    from penstock.broker.controller.bootstrap_user import BootstrapUser
    from penstock.cli.access.passwords import read_password

    file = flags.get(PASSWORD_FILE_FLAG, [None])[-1]
    return BootstrapUser(names[-1], read_password(names[-1], file, PASSWORD_VARIABLE, PASSWORD_FILE_FLAG))


def _print_ready(node: "Node", *, welcome: bool) -> None:
    """Prints one line per listener, which scripts may wait for, then the welcome."""
    for listener in node.listeners:
        is_shared = node.settings.is_listener_shared
        purpose = (
            " for nodes" if listener.name == node.settings.inter_broker_listener and not is_shared else ""
        )
        print(f"listening{purpose} on {listener}", flush=True)
    if node.http is not None and node.settings.http_address is not None:
        address = format_address(node.settings.http_address[0], node.http.port)
        scheme = "https" if node.http_contexts is not None else "http"
        print(f"metrics on {scheme}://{address}/metrics", flush=True)
    if welcome:
        first = node.listeners[0]
        address = format_address("localhost" if first.is_wildcard else first.host, first.port)
        program = penstock_command()
        if first.port != 9092:
            program = f"PENSTOCK_BOOTSTRAP={address} {program}"
        data_dir = os.path.relpath(node.settings.data_dir)
        text = _WELCOME_TEMPLATE.format(
            version=__version__, data_dir=data_dir, command=program, address=address
        )
        print(text, flush=True)
    notify_ready()


def _data_dir_error(error: OSError, settings: NodeSettings) -> CommandError:
    """Address errors are StartFailed, so this error is about the data directory."""
    path = error.filename or settings.data_dir
    if error.errno in (errno.EEXIST, errno.ENOTDIR):
        return CommandError(f"{path} is not a directory", hint="--data-dir names another one")
    why = os.strerror(error.errno) if error.errno else str(error)
    return CommandError(f"cannot use {path}: {why}", hint="--data-dir names another directory")
