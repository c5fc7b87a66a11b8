"""The settings of one node: where each came from, and its value.

A setting is taken from the first of: a flag, an environment variable, the TOML file, the default.
`num.partitions` is the variable PENSTOCK_NUM_PARTITIONS; our own `penstock.flush` is PENSTOCK_FLUSH.
"""

import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar, cast

from penstock.broker.listeners import (
    NODES,
    Listener,
    format_address,
    is_same_place,
    parse_address,
    parse_addresses,
    parse_advertised,
    parse_listeners,
    parse_voters,
)
from penstock.broker.settings_groups import group_bounds_flaw
from penstock.broker.settings_table import NODE_SETTINGS
from penstock.protocol.settings import InvalidSetting, Setting, SettingType, Value

__all__ = (
    "NODE_SETTINGS",
    "OTHER_VARIABLES",
    "InvalidSetting",
    "Listener",
    "Origin",
    "Settings",
    "load_settings",
    "variable_name",
)

# Variables that begin with PENSTOCK_ and are no settings of a node.
OTHER_VARIABLES: dict[str, str] = {
    "PENSTOCK_CONFIG": "the TOML file with settings, where --config is not given",
    "PENSTOCK_BOOTSTRAP": "HOST:PORT of the cluster that client commands talk to",
    "PENSTOCK_TEST_BOOTSTRAP": "points the test suite at a running cluster",
    "PENSTOCK_TEST_EXECUTABLE": "the program that the test suite starts as a broker",
}

# Kubernetes sets these for a service that has our name in its own.
_SERVICE_LINK = re.compile(r"PENSTOCK_(.+_)?(SERVICE_HOST|SERVICE_PORT.*|PORT|PORT_\d+_(TCP|UDP).*)")


class Origin(NamedTuple):
    """Where a value came from: kind is flag, environment, file or default."""

    kind: str
    detail: str

    def __str__(self) -> str:
        return f"{self.kind} {self.detail}".rstrip()


Parsed = TypeVar("Parsed")

_DEFAULT = Origin("default", "")
_SESSION_MIN, _SESSION_MAX = "group.min.session.timeout.ms", "group.max.session.timeout.ms"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    values: Mapping[str, Value]
    origins: Mapping[str, Origin]  # of what was set; all else is a default
    listeners: tuple[Listener, ...]
    advertised: tuple[Listener, ...]  # one for each listener, in the same order
    founders: Mapping[
        int, tuple[str, int]
    ]  # the controllers that found the cluster, by id; empty: this node alone
    bootstrap_servers: tuple[tuple[str, int], ...]  # where a running cluster is found
    #: The name of the listener that nodes use among themselves; None: this node talks to no others.
    inter_broker_listener: str | None

    def __getitem__(self, name: str) -> Value:
        return self.values[name]

    def source(self, name: str) -> Origin:
        assert name in self.values, name
        return self.origins.get(name, _DEFAULT)

    def integer(self, name: str) -> int:
        value = self.values[name]
        assert isinstance(value, int), (name, value)
        return value

    def number(self, name: str) -> float:
        value = self.values[name]
        assert isinstance(value, (int, float)), (name, value)
        return float(value)

    def boolean(self, name: str) -> bool:
        value = self.values[name]
        assert isinstance(value, bool), (name, value)
        return value

    def string(self, name: str) -> str:
        value = self.values[name]
        assert isinstance(value, str), (name, value)
        return value

    def strings(self, name: str) -> tuple[str, ...]:
        value = self.values[name]
        assert isinstance(value, tuple), (name, value)
        return value

    @property
    def node_id(self) -> int:
        return self.integer("node.id")

    @property
    def data_dir(self) -> str:
        return os.path.abspath(os.path.expanduser(self.string("log.dirs")))

    @property
    def rack(self) -> str | None:
        value = self.values["broker.rack"]
        return value if isinstance(value, str) and value else None

    @property
    def is_broker(self) -> bool:
        return "broker" in cast(tuple[str, ...], self.values["process.roles"])

    @property
    def is_controller(self) -> bool:
        return "controller" in cast(tuple[str, ...], self.values["process.roles"])

    @property
    def is_listener_shared(self) -> bool:
        """Clients use the listener for nodes too: requests between nodes are not fenced off."""
        only = len(self.listeners) == 1 and self.listeners[0].name == self.inter_broker_listener
        return only and self.is_broker

    @property
    def http_address(self) -> tuple[str, int] | None:
        text = self.string("penstock.http.listen")
        return parse_address(text) if text else None


def load_settings(
    flags: Mapping[str, str],
    environ: Mapping[str, str],
    toml_path: str | None = None,
    *,
    flag_names: Mapping[str, str] = MappingProxyType({}),
) -> Settings:
    """`flags` maps setting names to text; `flag_names` says which flag each was written as, if not --set."""
    values: dict[str, Value] = {name: setting.default for name, setting in NODE_SETTINGS.items()}
    origins: dict[str, Origin] = {}
    for origin, name, text in _given(flags, flag_names, environ, toml_path):
        values[name] = _parse(_known(name, origin), text, origin)
        origins[name] = origin
    return _checked(values, origins)


def variable_name(setting: str) -> str:
    """The environment variable of a setting."""
    return "PENSTOCK_" + setting.removeprefix("penstock.").replace(".", "_").upper()


def _given(
    flags: Mapping[str, str],
    flag_names: Mapping[str, str],
    environ: Mapping[str, str],
    toml_path: str | None,
) -> Iterator[tuple[Origin, str, str]]:
    """Everything that was set, the strongest last."""
    if toml_path is not None:
        yield from ((Origin("file", toml_path), name, text) for name, text in _read_toml(toml_path))
    yield from _from_environment(environ)
    for name, text in flags.items():
        yield Origin("flag", flag_names.get(name, "--set")), name, text


def _from_environment(environ: Mapping[str, str]) -> Iterator[tuple[Origin, str, str]]:
    names = {variable_name(name): name for name in NODE_SETTINGS}
    for variable, text in environ.items():
        if not variable.startswith("PENSTOCK_") or variable in OTHER_VARIABLES:
            continue
        if variable in names:
            yield Origin("environment", variable), names[variable], text
        elif not _SERVICE_LINK.fullmatch(variable):
            raise InvalidSetting(
                f"Unknown environment variable {variable}"
                + _did_you_mean(variable, [*names, *OTHER_VARIABLES])
            )


def _read_toml(path: str) -> Iterator[tuple[str, str]]:
    import tomllib  # 15 ms that a start without a file does not pay

    try:
        with open(path, "rb") as file:
            document = tomllib.load(file)
    except OSError as error:
        raise InvalidSetting(f"Cannot read {path}: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        hint = "; quote a name that is the beginning of another, as in 'max.connections' = 100"
        raise InvalidSetting(
            f"{path} is not valid TOML: {error}{hint if 'verwrite' in str(error) else ''}"
        ) from None
    except UnicodeDecodeError:
        raise InvalidSetting(f"{path} is not valid TOML: it is not UTF-8 text") from None
    yield from _flatten(document, "", path)


def _flatten(table: Mapping[str, Any], prefix: str, path: str) -> Iterator[tuple[str, str]]:
    for key, value in table.items():
        name = prefix + key
        match value:
            case dict():
                yield from _flatten(value, f"{name}.", path)
            case bool():
                yield name, "true" if value else "false"
            case str() | int() | float():
                yield name, str(value)
            case list() if all(isinstance(item, str) for item in value):
                yield name, ",".join(value)
            case _:
                raise InvalidSetting(f"{path}: {name} must be text, a number, true, false or a list of texts")


def _known(name: str, origin: Origin) -> Setting:
    setting = NODE_SETTINGS.get(name)
    if setting is None:
        raise InvalidSetting(f"Unknown setting {name} ({origin})" + _did_you_mean(name, list(NODE_SETTINGS)))
    return setting


def _parse(setting: Setting, text: str, origin: Origin) -> Value:
    try:
        value = setting.parse(text)
    except InvalidSetting as error:
        raise InvalidSetting(f"{error} ({origin})") from None
    if setting.type is SettingType.LIST and not value:
        raise InvalidSetting(f"{setting.name} must not be empty ({origin})")
    return value


def _did_you_mean(name: str, known: list[str]) -> str:
    import difflib  # only needed for a mistake

    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def _checked(values: Mapping[str, Value], origins: Mapping[str, Origin]) -> Settings:
    """The checks that need more than one value, or a form that is parsed once and kept."""

    def checked(name: str, parse: Callable[[str], Parsed]) -> Parsed:
        try:
            return parse(str(values[name] or ""))
        except ValueError as error:
            raise InvalidSetting(f"Invalid {name} ({origins.get(name, _DEFAULT)}): {error}") from None

    listeners = checked("listeners", parse_listeners)
    advertised = checked(
        "advertised.listeners", lambda text: parse_advertised(text, listeners, socket.gethostname())
    )
    checked("penstock.http.listen", lambda text: parse_address(text) if text else None)
    founders = checked("controller.quorum.voters", parse_voters)
    settings = Settings(
        values=MappingProxyType(values),
        origins=MappingProxyType(origins),
        listeners=listeners,
        advertised=advertised,
        founders=MappingProxyType(founders),
        bootstrap_servers=checked("controller.quorum.bootstrap.servers", parse_addresses),
        inter_broker_listener=None,
    )
    _check_place_in_cluster(settings)
    settings = _with_node_listener(settings)
    if settings.integer(_SESSION_MIN) > settings.integer(_SESSION_MAX):
        raise InvalidSetting(f"{_SESSION_MIN} must not be above {_SESSION_MAX}")
    if (flaw := group_bounds_flaw(values)) is not None:
        raise InvalidSetting(flaw)
    return settings


def _with_node_listener(settings: Settings) -> Settings:
    """Find the listener for nodes, or add it at the address that controller.quorum.voters gives this node."""
    names = [listener.name for listener in settings.listeners]
    if named := settings.values["inter.broker.listener.name"]:
        name = str(named).upper()
        if name not in names:
            raise InvalidSetting(f"inter.broker.listener.name: no listener is named {name}")
        return replace(settings, inter_broker_listener=name)
    if len(names) == 1 and not settings.is_broker:
        return replace(settings, inter_broker_listener=names[0])
    if names == [NODES]:
        raise InvalidSetting(
            f"The only listener, {settings.listeners[0]}, is for other nodes: add one for clients, as in "
            f"--listen localhost:9092; inter.broker.listener.name={NODES} shares it with them on purpose"
        )
    if NODES in names:
        return replace(settings, inter_broker_listener=NODES)
    others = settings.founders.keys() - {settings.node_id}
    if not others and not settings.bootstrap_servers:
        return settings
    return _with_listener_of_voter(settings)


def _with_listener_of_voter(settings: Settings) -> Settings:
    own = settings.founders.get(settings.node_id)
    listeners, advertised = settings.listeners, settings.advertised
    how = (
        f"add --listen {NODES}://HOST:PORT, which only other nodes need to reach; "
        f"inter.broker.listener.name={listeners[0].name} shares the clients' listener on purpose"
    )
    if own is None:
        raise InvalidSetting(
            f"Node {settings.node_id} of a cluster has no listener for the other nodes: {how}"
        )
    for pair in zip(listeners, advertised, strict=True):
        if any(is_same_place(listener, own) for listener in pair):
            if len(listeners) > 1:
                return replace(settings, inter_broker_listener=pair[0].name)
            raise InvalidSetting(
                f"controller.quorum.voters has node {settings.node_id} at {format_address(*own)}, which is its "
                f"listener for clients. Give it a port of its own there, on every node; or {how}"
            )
    host = listeners[0].host if listeners[0].is_wildcard else own[0]
    return replace(
        settings,
        listeners=(*listeners, Listener(NODES, host, own[1])),
        advertised=(*advertised, Listener(NODES, *own)),
        inter_broker_listener=NODES,
    )


def _check_place_in_cluster(settings: Settings) -> None:
    is_founder = settings.node_id in settings.founders
    if settings.founders and settings.is_controller and not settings.bootstrap_servers and not is_founder:
        raise InvalidSetting(
            f"controller.quorum.voters does not name node {settings.node_id}; a controller that joins later "
            "finds the cluster through controller.quorum.bootstrap.servers"
        )
    if not settings.is_controller and not (settings.founders or settings.bootstrap_servers):
        raise InvalidSetting(
            "A node that is no controller needs controller.quorum.bootstrap.servers to find its cluster"
        )
