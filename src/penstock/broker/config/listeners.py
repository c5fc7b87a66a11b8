"""Addresses in settings: listeners, advertised listeners, voters and bootstrap servers.

A listener is `NAME://HOST:PORT`, `HOST:PORT`, `[::1]:9092` or `:9092`.
"""

from enum import IntEnum
from typing import NamedTuple

DEFAULT_LISTENER_NAME = "PLAINTEXT"
#: A listener of this name is for other nodes, unless inter.broker.listener.name names another one.
NODES_LISTENER = "NODES"
_WILDCARDS = frozenset({"", "0.0.0.0", "::"})


class SecurityProtocol(IntEnum):
    """Numbered as in the metadata that nodes register."""

    PLAINTEXT = 0
    SSL = 1
    SASL_PLAINTEXT = 2
    SASL_SSL = 3

    @property
    def uses_tls(self) -> bool:
        return self in (SecurityProtocol.SSL, SecurityProtocol.SASL_SSL)

    @property
    def uses_sasl(self) -> bool:
        return self in (SecurityProtocol.SASL_PLAINTEXT, SecurityProtocol.SASL_SSL)


class Listener(NamedTuple):
    """Port 0 means any free port; in an advertised address it means the port that was bound."""

    name: str
    host: str
    port: int

    @property
    def is_wildcard(self) -> bool:
        return self.host in _WILDCARDS

    def __str__(self) -> str:
        return f"{self.name}://{format_address(self.host, self.port)}"


def format_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_address(text: str) -> tuple[str, int]:
    """Parse HOST:PORT. Raises ValueError with a message that says what is wrong."""
    host, colon, port = text.strip().rpartition(":")
    if not colon or not port.isascii() or not port.isdigit():
        raise ValueError(f"{text!r} is not HOST:PORT")
    if int(port) > 65535:
        raise ValueError(f"{text!r} has a port above 65535")
    if host.startswith("[") and host.endswith("]"):
        return host[1:-1], int(port)
    if ":" in host:
        raise ValueError(f"{text!r} needs brackets around its IPv6 address, as in [::1]:9092")
    return host, int(port)


def parse_addresses(text: str) -> tuple[tuple[str, int], ...]:
    """Parse a comma-separated list of HOST:PORT, which may be empty. Raises ValueError."""
    return tuple(parse_address(part) for part in text.split(",") if part.strip())


def parse_voters(text: str) -> dict[int, tuple[str, int]]:
    """Parse a comma-separated list of ID@HOST:PORT, which may be empty. Raises ValueError."""
    voters: dict[int, tuple[str, int]] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        number, at, address = part.partition("@")
        if not at or not number.isascii() or not number.isdigit():
            raise ValueError(f"{part!r} is not ID@HOST:PORT")
        if int(number) in voters:
            raise ValueError(f"node {int(number)} is named twice")
        voters[int(number)] = parse_address(address)
    return voters


def parse_listener(text: str, default_name: str = DEFAULT_LISTENER_NAME) -> Listener:
    name, scheme, address = text.strip().rpartition("://")
    if scheme and not name.replace("_", "").replace("-", "").replace(".", "").isalnum():
        raise ValueError(f"{text!r} needs a name of letters and digits before ://")
    host, port = parse_address(address)
    return Listener(name.upper() or default_name, host, port)


def parse_listeners(text: str) -> tuple[Listener, ...]:
    listeners = tuple(parse_listener(part) for part in text.split(",") if part.strip())
    if not listeners:
        raise ValueError("at least one listener is needed")
    names = [listener.name for listener in listeners]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(
                f"two listeners are named {name}; give each a name of its own, as in INTERNAL://HOST:PORT"
            )
    return listeners


def parse_protocol_map(text: str) -> dict[str, SecurityProtocol]:
    """Parse a comma-separated list of NAME:PROTOCOL, which may be empty. Raises ValueError."""
    protocols: dict[str, SecurityProtocol] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        name, colon, protocol = (word.strip().upper() for word in part.partition(":"))
        if not colon or not name:
            raise ValueError(f"{part!r} is not NAME:PROTOCOL")
        if protocol not in SecurityProtocol.__members__:
            raise ValueError(
                f"{part!r} needs one of {', '.join(SecurityProtocol.__members__)} after the colon"
            )
        if name in protocols:
            raise ValueError(f"listener {name} has two protocols")
        protocols[name] = SecurityProtocol[protocol]
    return protocols


def is_same_address(listener: Listener, address: tuple[str, int]) -> bool:
    """Whether a listener would accept connections to `address`."""
    host, port = address
    return listener.port == port and (
        listener.is_wildcard or _normalized_host(listener.host) == _normalized_host(host)
    )


def _normalized_host(text: str) -> str:
    return "127.0.0.1" if text.lower() in ("localhost", "::1") else text.lower()


def parse_advertised(text: str, listeners: tuple[Listener, ...], hostname: str) -> tuple[Listener, ...]:
    """Return one advertised address for each listener, in the same order. Raises ValueError."""
    given: dict[str, Listener] = {}
    for part in text.split(","):
        if part.strip():
            listener = parse_listener(part, listeners[0].name)
            if listener.is_wildcard:
                raise ValueError(f"{part.strip()!r} is not an address that clients can connect to")
            given[listener.name] = listener
    if unknown := given.keys() - {listener.name for listener in listeners}:
        raise ValueError(f"no listener is named {', '.join(sorted(unknown))}")
    return tuple(
        given.get(listener.name) or (listener._replace(host=hostname) if listener.is_wildcard else listener)
        for listener in listeners
    )
