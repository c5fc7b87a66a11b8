"""The settings that a node was started with: the value of each, and where it came from.

A value comes from the first of these sources that has the setting: a flag, an environment variable, the TOML file, the
default. The variable for `num.partitions` is PENSTOCK_NUM_PARTITIONS; for our own `penstock.flush` it is
PENSTOCK_FLUSH.
"""

import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar, cast

from penstock.broker.config.access_settings import audit_topic_flaw
from penstock.broker.config.coordinator_definitions import group_bounds_flaw
from penstock.broker.config.definitions import NODE_SETTINGS
from penstock.broker.config.listener_security import (
    PREFIX,
    OverrideKey,
    key_flaw,
    listener_flaw,
    listener_protocols,
    override_keys,
)
from penstock.broker.config.listeners import (
    NODES_LISTENER,
    Listener,
    SecurityProtocol,
    format_address,
    is_same_address,
    parse_address,
    parse_addresses,
    parse_advertised,
    parse_listeners,
    parse_voters,
)
from penstock.protocol.config_def import InvalidSetting, Setting, SettingType, SettingValue

__all__ = (
    "CLIENT_VARIABLE_PREFIX",
    "NODE_SETTINGS",
    "OTHER_VARIABLES",
    "InvalidSetting",
    "Listener",
    "NodeSettings",
    "SettingOrigin",
    "is_secret",
    "load_settings",
    "variable_name",
)

# Variables that begin with PENSTOCK_ but are not node settings.
OTHER_VARIABLES: dict[str, str] = {
    "PENSTOCK_CONFIG": "the TOML file with settings, where --config is not given",
    "PENSTOCK_BOOTSTRAP": "HOST:PORT of the cluster that client commands talk to",
    "PENSTOCK_COMMAND_CONFIG": "a file with client settings for client commands",
    "PENSTOCK_CONTEXT": "the context of client commands, where --context is not given",
    "PENSTOCK_CONTEXTS": "the file that contains the contexts",
    "PENSTOCK_OUTBOX_DATABASE": "the database of `penstock outbox`, where --database is not given",
    "PENSTOCK_BOOTSTRAP_PASSWORD": "the password of `penstock serve --bootstrap-user`",
    "PENSTOCK_USER_PASSWORD": "the password that `penstock user` sets, where --password-file is not given",
    "PENSTOCK_TEST_BOOTSTRAP": "points the test suite at a running cluster",
    "PENSTOCK_TEST_EXECUTABLE": "the program that the test suite starts as a broker",
}

#: Variables that begin with this are client settings: PENSTOCK_CLIENT_SASL_PASSWORD is sasl.password.
CLIENT_VARIABLE_PREFIX = "PENSTOCK_CLIENT_"

# Kubernetes sets these variables for services whose name begins with "penstock".
_SERVICE_LINK = re.compile(r"PENSTOCK_(.+_)?(SERVICE_HOST|SERVICE_PORT.*|PORT|PORT_\d+_(TCP|UDP).*)")


class SettingOrigin(NamedTuple):
    """The source of a value: `kind` is flag, environment, file or default."""

    kind: str
    detail: str

    def __str__(self) -> str:
        return f"{self.kind} {self.detail}".rstrip()


Parsed = TypeVar("Parsed")

_DEFAULT = SettingOrigin("default", "")
_SESSION_MIN, _SESSION_MAX = "group.min.session.timeout.ms", "group.max.session.timeout.ms"
_SHED_START, _SHED_ALL = "penstock.shed.disk.free.ratio.start", "penstock.shed.disk.free.ratio.all"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class NodeSettings:
    values: Mapping[str, SettingValue]
    origins: Mapping[str, SettingOrigin]  # of the settings that were given; all others have their default
    listeners: tuple[Listener, ...]
    advertised: tuple[Listener, ...]  # one for each listener, in the same order
    initial_voters: Mapping[
        int, tuple[str, int]
    ]  # the controllers that form a new cluster, by id; empty: this node alone
    bootstrap_servers: tuple[tuple[str, int], ...]  # nodes of a running cluster
    #: The name of the listener for requests between nodes; None: this node communicates with no other node.
    inter_broker_listener: str | None
    #: The values of `listener.name.NAME.SETTING`.
    overrides: Mapping[OverrideKey, SettingValue]
    protocols: Mapping[str, SecurityProtocol]  # by the name of the listener

    def __repr__(self) -> str:
        """Show no values, because some are secrets."""
        return f"<NodeSettings of node {self.node_id}>"

    def __getitem__(self, name: str) -> SettingValue:
        return self.values[name]

    def source(self, name: str) -> SettingOrigin:
        assert name in self.values, name
        return self.origins.get(name, _DEFAULT)

    def listener_value(self, listener: str, name: str, mechanism: str | None = None) -> SettingValue:
        """Return the value for a listener and a SASL mechanism: the most specific one that is given."""
        for key in (OverrideKey(listener, mechanism, name), OverrideKey(listener, None, name)):
            if key in self.overrides:
                return self.overrides[key]
        return self.values[name]

    def protocol(self, listener: str) -> SecurityProtocol:
        return self.protocols.get(listener, SecurityProtocol.PLAINTEXT)

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
    def is_standalone(self) -> bool:
        """Whether the settings name no other node."""
        return not self.initial_voters.keys() - {self.node_id} and not self.bootstrap_servers

    @property
    def cluster_addresses(self) -> list[tuple[str, int]]:
        """The addresses of other nodes that may belong to this node's cluster."""
        return [
            *self.bootstrap_servers,
            *(at for id, at in self.initial_voters.items() if id != self.node_id),
        ]

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
    def controller_listener(self) -> str | None:
        """The listener of a controller that this node connects to."""
        named = self.strings("controller.listener.names")
        return named[0].upper() if named else self.inter_broker_listener

    @property
    def controller_listeners(self) -> tuple[str, ...]:
        """The listeners on which requests to the controller are served, if this node has them."""
        named = self._upper("controller.listener.names") or (self.inter_broker_listener or "",)
        return _without_repeats(*named, *self._upper("penstock.inter.broker.listeners"))

    @property
    def node_listeners(self) -> tuple[str, ...]:
        """The listeners on which nodes are served, if this node has them: as brokers, as controllers, or as both."""
        return _without_repeats(self.inter_broker_listener or "", *self.controller_listeners)

    def node_mechanism(self, listener: str) -> str | None:
        """The SASL mechanism with which this node logs in to others at a listener."""
        value = self.values["sasl.mechanism.inter.broker.protocol"]
        if listener in self._upper("controller.listener.names"):
            value = self.values["sasl.mechanism.controller.protocol"] or value
        return None if value is None else str(value)

    def _upper(self, name: str) -> tuple[str, ...]:
        return tuple(each.upper() for each in self.strings(name))

    @property
    def is_listener_shared(self) -> bool:
        """Whether clients use the inter-broker listener too, so that they can also send the requests between nodes."""
        only = len(self.listeners) == 1 and self.listeners[0].name == self.inter_broker_listener
        return only and self.is_broker

    @property
    def http_address(self) -> tuple[str, int] | None:
        """Without a host, this machine alone is served: by default the endpoint asks for no token."""
        text = self.string("penstock.http.listen")
        if not text:
            return None
        host, port = parse_address(text)
        return host or "127.0.0.1", port


def load_settings(
    flags: Mapping[str, str],
    environ: Mapping[str, str],
    toml_path: str | None = None,
    *,
    flag_names: Mapping[str, str] = MappingProxyType({}),
) -> NodeSettings:
    """Read and check all settings. Raises InvalidSetting.

    `flags` maps setting names to text; `flag_names` maps setting names to the flag that was used, if not --set.
    """
    values: dict[str, SettingValue] = {name: setting.default for name, setting in NODE_SETTINGS.items()}
    origins: dict[str, SettingOrigin] = {}
    listener_texts: list[tuple[SettingOrigin, str, str]] = []
    for origin, name, text in _given(flags, flag_names, environ, toml_path):
        if name.startswith((PREFIX, variable_name(PREFIX))):
            listener_texts.append((origin, name, text))
            continue
        values[name] = _parse(_known(name, origin), text, origin)
        origins[name] = origin
    settings = _checked(values, origins)
    return _with_security(settings, listener_texts)


def variable_name(setting: str) -> str:
    """Return the environment variable of a setting."""
    return "PENSTOCK_" + setting.removeprefix("penstock.").replace(".", "_").replace("-", "_").upper()


def is_secret(setting: str) -> bool:
    """Whether a setting, also one of a listener, has a value that must not be shown."""
    name = setting
    if setting.startswith(PREFIX):
        name = next((known for known in NODE_SETTINGS if setting.endswith(f".{known}")), setting)
    declared = NODE_SETTINGS.get(name)
    return declared is not None and declared.type is SettingType.PASSWORD


def _given(
    flags: Mapping[str, str],
    flag_names: Mapping[str, str],
    environ: Mapping[str, str],
    toml_path: str | None,
) -> Iterator[tuple[SettingOrigin, str, str]]:
    """Yield all given settings; a later value takes precedence over an earlier one."""
    if toml_path is not None:
        yield from ((SettingOrigin("file", toml_path), name, text) for name, text in _read_toml(toml_path))
    yield from _from_environment(environ)
    for name, text in flags.items():
        yield SettingOrigin("flag", flag_names.get(name, "--set")), name, text


def _from_environment(environ: Mapping[str, str]) -> Iterator[tuple[SettingOrigin, str, str]]:
    names = {variable_name(name): name for name in NODE_SETTINGS}
    for variable, text in environ.items():
        is_for_clients = variable.startswith(CLIENT_VARIABLE_PREFIX) or variable in OTHER_VARIABLES
        if not variable.startswith("PENSTOCK_") or is_for_clients:
            continue
        if variable in names:
            yield SettingOrigin("environment", variable), names[variable], text
        elif variable.startswith(variable_name(PREFIX)):
            yield SettingOrigin("environment", variable), variable, text
        elif not _SERVICE_LINK.fullmatch(variable):
            raise InvalidSetting(
                f"Unknown environment variable {variable}"
                + _did_you_mean(variable, [*names, *OTHER_VARIABLES])
            )


def _read_toml(path: str) -> Iterator[tuple[str, str]]:
    import tomllib  # imported here because it takes 15 ms, which a start without a file saves

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


def _known(name: str, origin: SettingOrigin) -> Setting:
    setting = NODE_SETTINGS.get(name)
    if setting is None:
        raise InvalidSetting(f"Unknown setting {name} ({origin})" + _did_you_mean(name, list(NODE_SETTINGS)))
    return setting


def _parse(setting: Setting, text: str, origin: SettingOrigin) -> SettingValue:
    try:
        value = setting.parse(text)
    except InvalidSetting as error:
        raise InvalidSetting(f"{error} ({origin})") from None
    if setting.type is SettingType.LIST and not value:
        raise InvalidSetting(f"{setting.name} must not be empty ({origin})")
    return value


def _did_you_mean(name: str, known: list[str]) -> str:
    import difflib  # only needed for this error message

    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def _checked(values: Mapping[str, SettingValue], origins: Mapping[str, SettingOrigin]) -> NodeSettings:
    """Parse the addresses, check settings that depend on each other, and return all. Raises InvalidSetting."""

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
    initial_voters = checked("controller.quorum.voters", parse_voters)
    settings = NodeSettings(
        values=MappingProxyType(values),
        origins=MappingProxyType(origins),
        listeners=listeners,
        advertised=advertised,
        initial_voters=MappingProxyType(initial_voters),
        bootstrap_servers=checked("controller.quorum.bootstrap.servers", parse_addresses),
        inter_broker_listener=None,
        overrides={},
        protocols={},
    )
    _check_cluster_membership(settings)
    settings = _with_inter_broker_listener(settings)
    _check_node_listeners(settings)
    if settings.integer(_SESSION_MIN) > settings.integer(_SESSION_MAX):
        raise InvalidSetting(f"{_SESSION_MIN} must not be above {_SESSION_MAX}")
    if settings.number(_SHED_ALL) > settings.number(_SHED_START):
        raise InvalidSetting(f"{_SHED_ALL} must not be above {_SHED_START}")
    for flaw in (group_bounds_flaw(values), audit_topic_flaw(values)):
        if flaw is not None:
            raise InvalidSetting(flaw)
    return settings


def _without_repeats(*names: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for name in names if name))


def _with_inter_broker_listener(settings: NodeSettings) -> NodeSettings:
    """Find the inter-broker listener, or add it at the address that controller.quorum.voters gives this node."""
    names = [listener.name for listener in settings.listeners]
    if named := settings.values["inter.broker.listener.name"]:
        if settings.values["security.inter.broker.protocol"] is not None:
            raise InvalidSetting(
                "inter.broker.listener.name and security.inter.broker.protocol must not both be set: "
                "listener.security.protocol.map gives the listener its protocol"
            )
        return replace(settings, inter_broker_listener=str(named).upper())
    if len(names) == 1 and not settings.is_broker:
        return replace(settings, inter_broker_listener=names[0])
    if names == [NODES_LISTENER]:
        raise InvalidSetting(
            f"The only listener, {settings.listeners[0]}, is for other nodes: add one for clients, as in "
            f"--listen localhost:9092; inter.broker.listener.name={NODES_LISTENER} shares it with them on purpose"
        )
    if NODES_LISTENER in names:
        return replace(settings, inter_broker_listener=NODES_LISTENER)
    if (protocol := settings.values["security.inter.broker.protocol"]) in names:
        return replace(settings, inter_broker_listener=str(protocol))
    others = settings.initial_voters.keys() - {settings.node_id}
    if not others and not settings.bootstrap_servers:
        return settings
    return _with_voter_listener(settings)


def _check_node_listeners(settings: NodeSettings) -> None:
    """Raises InvalidSetting if this node lacks a listener that its roles need."""
    needed = {"penstock.inter.broker.listeners"}
    if settings.is_broker:
        needed.add("inter.broker.listener.name")
    if settings.is_controller:
        needed.add("controller.listener.names")
    names = {listener.name for listener in settings.listeners}
    for setting in sorted(needed):
        value = settings.values[setting]
        wanted = value if isinstance(value, tuple) else (value,) if value else ()
        if unknown := {str(name).upper() for name in wanted} - names:
            raise InvalidSetting(f"{setting}: no listener is named {', '.join(sorted(unknown))}")


def _with_voter_listener(settings: NodeSettings) -> NodeSettings:
    own = settings.initial_voters.get(settings.node_id)
    listeners, advertised = settings.listeners, settings.advertised
    how = (
        f"add --listen {NODES_LISTENER}://HOST:PORT, which only other nodes need to reach; "
        f"inter.broker.listener.name={listeners[0].name} shares the clients' listener on purpose"
    )
    if own is None:
        raise InvalidSetting(
            f"Node {settings.node_id} of a cluster has no listener for the other nodes: {how}"
        )
    for pair in zip(listeners, advertised, strict=True):
        if any(is_same_address(listener, own) for listener in pair):
            if len(listeners) > 1:
                return replace(settings, inter_broker_listener=pair[0].name)
            raise InvalidSetting(
                f"controller.quorum.voters has node {settings.node_id} at {format_address(*own)}, which is its "
                f"listener for clients. Give it a port of its own there, on every node; or {how}"
            )
    host = listeners[0].host if listeners[0].is_wildcard else own[0]
    return replace(
        settings,
        listeners=(*listeners, Listener(NODES_LISTENER, host, own[1])),
        advertised=(*advertised, Listener(NODES_LISTENER, *own)),
        inter_broker_listener=NODES_LISTENER,
    )


def _with_security(
    settings: NodeSettings, listener_texts: Sequence[tuple[SettingOrigin, str, str]]
) -> NodeSettings:
    """Add the protocols and the own settings of listeners. Raises InvalidSetting."""
    own = [listener.name for listener in settings.listeners]
    # A node that is only a broker connects to a listener that only controllers have, and the other way round.
    names = list(_without_repeats(*own, *settings.node_listeners))
    settings = replace(
        settings,
        protocols=MappingProxyType(listener_protocols(settings.values, names)),
        overrides=MappingProxyType(_parse_overrides(names, listener_texts)),
    )
    if settings.boolean("penstock.http.tls") and (flaw := key_flaw(settings.values.__getitem__)) is not None:
        raise InvalidSetting(f"penstock.http.tls: {flaw}")
    for name in names:
        flaw = listener_flaw(
            name,
            settings.protocol(name),
            partial(settings.listener_value, name),
            settings.node_mechanism(name),
            is_for_nodes=name in settings.node_listeners,
            is_served=name in own,
        )
        if flaw is not None:
            listener = next((str(each) for each in settings.listeners if each.name == name), name)
            raise InvalidSetting(f"Listener {listener}: {flaw}")
    return settings


def _parse_overrides(
    listeners: Sequence[str], texts: Sequence[tuple[SettingOrigin, str, str]]
) -> dict[OverrideKey, SettingValue]:
    """Raises InvalidSetting."""
    if not texts:
        return {}
    by_name = {key.name: key for key in override_keys(listeners)}
    by_variable = {variable_name(name): key for name, key in by_name.items()}
    values: dict[OverrideKey, SettingValue] = {}
    for origin, name, text in texts:
        key = by_variable.get(name) or by_name.get(name.lower())
        if key is None:
            raise InvalidSetting(
                f"Unknown setting {name} ({origin}); the listeners are {', '.join(listeners)}"
                + _did_you_mean(name.lower(), list(by_name))
            )
        values[key] = _parse(NODE_SETTINGS[key.setting], text, origin)
    return values


def _check_cluster_membership(settings: NodeSettings) -> None:
    is_founder = settings.node_id in settings.initial_voters
    if (
        settings.initial_voters
        and settings.is_controller
        and not settings.bootstrap_servers
        and not is_founder
    ):
        raise InvalidSetting(
            f"controller.quorum.voters does not name node {settings.node_id}; a controller that joins later "
            "finds the cluster through controller.quorum.bootstrap.servers"
        )
    if not settings.is_controller and not (settings.initial_voters or settings.bootstrap_servers):
        raise InvalidSetting(
            "A node that is no controller needs controller.quorum.bootstrap.servers to find its cluster"
        )
