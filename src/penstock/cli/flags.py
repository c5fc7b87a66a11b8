"""The flags that set a node's settings, declared once: for `serve`, for `config`, and for their help."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from penstock.broker.settings import InvalidSetting, Settings, load_settings

Flags = dict[str, list[str]]  # what was written, by flag; a switch has no values


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

WORKERS = "--workers"
LIFELINE = "--stop-with-stdin"

SERVE_FLAGS = (
    *SETTING_FLAGS,
    Flag(WORKERS, "N", "Run N nodes, one per core: ids, ports and folders count up from this one's."),
    Flag(LIFELINE, None, "Stop when stdin ends: together with the process that started this one."),
    Flag("--welcome", None, "Print what to try next once the broker is up."),
)


def read_quickly(words: Sequence[str]) -> Flags | None:
    """The flags of `serve`, or None where the words need a closer look: help, a mistake."""
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


def settings_from(flags: Mapping[str, Sequence[str]], environ: Mapping[str, str]) -> Settings:
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
