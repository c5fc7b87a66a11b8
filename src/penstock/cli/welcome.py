"""What `penstock serve` prints when it is ready: the addresses it listens on and, with `--welcome`, commands to
try. Loaded together with the node.
"""

import os
import sys

from penstock import __version__
from penstock.broker.config.listeners import format_address
from penstock.broker.node import Node
from penstock.cli import os_process

_WELCOME_TEMPLATE = """
  Penstock {version} is up. Data is in {data_dir}; Ctrl-C stops it cleanly.

  Try, in another terminal:

    {command} topic create orders --partitions 3
    echo 'hello' | {command} produce orders
    {command} consume orders
    {command} group list

  Any Kafka client works: bootstrap.servers={address}
"""


def print_ready(node: Node, *, welcome: bool) -> None:
    """Prints one line per listener, which scripts may wait for, then the welcome."""
    for listener in node.listeners:
        is_shared = node.settings.is_listener_shared
        whose = " for nodes" if listener.name == node.settings.inter_broker_listener and not is_shared else ""
        print(f"listening{whose} on {listener}", flush=True)
    if node.http is not None and node.settings.http_address is not None:
        address = format_address(node.settings.http_address[0] or "localhost", node.http.port)
        print(f"metrics on http://{address}/metrics", flush=True)
    if welcome:
        print(_welcome_text(node), flush=True)
    os_process.notify_ready()


def _welcome_text(node: Node) -> str:
    first = node.listeners[0]
    address = format_address("localhost" if first.is_wildcard else first.host, first.port)
    program = penstock_command()
    if first.port != 9092:
        program = f"PENSTOCK_BOOTSTRAP={address} {program}"
    data_dir = os.path.relpath(node.settings.data_dir)
    return _WELCOME_TEMPLATE.format(version=__version__, data_dir=data_dir, command=program, address=address)


def penstock_command() -> str:
    """How to run this program from the current directory: by name if the shell finds it, else by the shortest path."""
    import shutil

    program = os.path.abspath(sys.argv[0])
    if os.path.basename(program) == "__main__.py":
        return f"{sys.executable} -m penstock"
    if shutil.which("penstock") == program:
        return "penstock"
    return min(os.path.relpath(program), program, key=len)
