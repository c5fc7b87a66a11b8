"""Free ports for servers that tests start; they stay free while the server restarts."""

import secrets
import socket
from pathlib import Path

FIRST_PORT = 10_000
ATTEMPTS = 100
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port(host: str = "127.0.0.1") -> int:
    """Below those that the kernel gives to outgoing connections, which could take it while its server is down."""
    end = _first_ephemeral_port()
    for _ in range(ATTEMPTS):
        port = FIRST_PORT + secrets.randbelow(end - FIRST_PORT) if end > FIRST_PORT else 0
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise AssertionError(f"{host} has no free port: {ATTEMPTS} between {FIRST_PORT} and {end} are taken")


def free_address(host: str) -> tuple[str, int]:
    return host, free_port(host)


def _first_ephemeral_port() -> int:
    return int(_EPHEMERAL.read_text().split()[0]) if _EPHEMERAL.exists() else 32_768
