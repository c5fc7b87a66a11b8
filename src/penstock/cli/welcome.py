"""What `penstock serve` says once it is ready: where it listens and, for a newcomer, what to try."""

import os
import sys

from penstock import __version__
from penstock.broker.listeners import format_address
from penstock.broker.node import Node
from penstock.cli import notify

_WELCOME = """
  Penstock {version} is up. Data is in {data_dir}; Ctrl-C stops it cleanly.

  Try, in another terminal:

    {command} topic create orders --partitions 3
    echo 'hello' | {command} produce orders
    {command} consume orders
    {command} group list

  Any Kafka client works: bootstrap.servers={address}
"""


def announce(node: Node, *, welcome: bool) -> None:
    """One line per listener, which scripts may wait for, then the welcome."""
    for listener in node.listeners:
        is_shared = node.settings.is_listener_shared
        whose = " for nodes" if listener.name == node.settings.inter_broker_listener and not is_shared else ""
        print(f"listening{whose} on {listener}", flush=True)
    if node.http is not None and node.settings.http_address is not None:
        address = format_address(node.settings.http_address[0] or "localhost", node.http.port)
        print(f"metrics on http://{address}/metrics", flush=True)
    if welcome:
        print(_welcome_text(node), flush=True)
    notify.ready()


def _welcome_text(node: Node) -> str:
    first = node.listeners[0]
    address = format_address("localhost" if first.is_wildcard else first.host, first.port)
    program = command()
    if first.port != 9092:
        program = f"PENSTOCK_BOOTSTRAP={address} {program}"
    data_dir = os.path.relpath(node.settings.data_dir)
    return _WELCOME.format(version=__version__, data_dir=data_dir, command=program, address=address)


def command() -> str:
    """How the user can call us from here: by name where the shell finds it, else by the shortest path."""
    import shutil

    program = os.path.abspath(sys.argv[0])
    if os.path.basename(program) == "__main__.py":
        return f"{sys.executable} -m penstock"
    if shutil.which("penstock") == program:
        return "penstock"
    return min(os.path.relpath(program), program, key=len)
