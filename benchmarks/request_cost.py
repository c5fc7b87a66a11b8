"""What a login, access rules and quotas add to a small Produce request: python -m benchmarks.request_cost [ROUNDS]

A node for each kind of security, all in one process; clients in processes of their own send one record at a time. The
nodes take turns, a few hundred requests each, so that all of them see the same machine. Printed as JSON is the
processor time of the node's thread for a request, in microseconds: the least and the median of all rounds. Not a test:
the times are those of the machine.
"""

from __future__ import annotations

import asyncio
import gc
import json
import multiprocessing
import statistics
import struct
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

from benchmarks.wire.access import LOAD, Access
from penstock.broker.config.node_settings import load_settings
from penstock.broker.node import Node
from penstock.client.admin.acls import create_acls
from penstock.client.admin.quotas import alter_quotas
from penstock.client.wire.cluster import Cluster
from penstock.client.wire.settings import ConnectionSettings
from penstock.client.wire.topics import NewTopic, create_topics
from penstock.protocol.acls import AclBinding, Operation, PatternType, Permission, ResourceType
from penstock.protocol.record_batch import Record, encode_batch
from penstock.protocol.wire import encode_uvarint

_KINDS: Final = ("none", "login", "login, rules", "login, quotas", "login, rules, quotas")
_OPEN, _SASL = 0, 1  # listeners
_TOPIC: Final = "t"
_REQUESTS: Final = 300
_ROUNDS: Final = 100
#: Never reached, so that each request is counted and none is throttled.
_QUOTAS: Final = {"producer_byte_rate": 1e12, "consumer_byte_rate": 1e12, "request_percentage": 1e6}
_JAAS: Final = f'org.apache.kafka.common.security.plain.PlainLoginModule required user_{LOAD}="{LOAD}";'


def _produce_request(acks: int) -> bytes:
    record = Record(0, int(time.time() * 1000), None, bytes(100))
    records = bytes(encode_batch([record]))
    header = struct.pack(">hhih", 0, 9, 1, 1) + b"c\0"
    partition = struct.pack(">i", 0) + encode_uvarint(len(records) + 1) + records + b"\0"
    topic = encode_uvarint(len(_TOPIC) + 1) + _TOPIC.encode() + b"\x02" + partition + b"\0"
    request = header + b"\0" + struct.pack(">hi", acks, 30_000) + b"\x02" + topic + b"\0"
    return struct.pack(">i", len(request)) + request


def _client(address: tuple[str, int], user: str | None, request: bytes, orders: Connection) -> None:
    with Access(user=user).open(address, None) as connection:
        while count := orders.recv():
            for _ in range(count):
                connection.sendall(request)
                connection.recv(4096)
            orders.send(count)


async def _start(folder: Path, kind: str) -> Node:
    settings = {
        "listeners": "PLAINTEXT://127.0.0.1:0,SASL_PLAINTEXT://127.0.0.1:0",
        "log.dirs": str(folder / kind.replace(", ", "-")),
        "sasl.enabled.mechanisms": "PLAIN",
        "listener.name.sasl_plaintext.plain.sasl.jaas.config": _JAAS,
        "super.users": "User:ANONYMOUS",
    }
    if "rules" in kind:
        settings["authorizer.class.name"] = "StandardAuthorizer"
    node = Node(load_settings(settings, {}))
    await node.start()
    await asyncio.to_thread(_prepare, node.listeners[_OPEN].port, kind)
    return node


def _prepare(port: int, kind: str) -> None:
    with Cluster(ConnectionSettings.parse({"bootstrap.servers": f"127.0.0.1:{port}"})) as cluster:
        create_topics(cluster, [NewTopic(name=_TOPIC)])
        if "rules" in kind:
            rule = AclBinding(
                ResourceType.TOPIC,
                _TOPIC,
                PatternType.LITERAL,
                f"User:{LOAD}",
                "*",
                Operation.WRITE,
                Permission.ALLOW,
            )
            create_acls(cluster, [rule])
        if "quotas" in kind:
            alter_quotas(cluster, {"user": LOAD}, _QUOTAS)


async def _measure(acks: int, rounds: int) -> dict[str, dict[str, float]]:
    loop = asyncio.get_running_loop()
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        nodes = {kind: await _start(Path(folder), kind) for kind in _KINDS}
        orders: dict[str, Connection] = {}
        for kind, node in nodes.items():
            listener = node.listeners[_OPEN if kind == "none" else _SASL]
            orders[kind], theirs = spawn.Pipe()
            user = None if kind == "none" else LOAD
            address = ("127.0.0.1", listener.port)
            spawn.Process(
                target=_client, args=(address, user, _produce_request(acks), theirs), daemon=True
            ).start()
        found: dict[str, list[float]] = {kind: [] for kind in _KINDS}
        gc.disable()
        for number in range(rounds + 1):
            for kind in _KINDS:
                done = asyncio.Event()
                loop.add_reader(orders[kind].fileno(), done.set)
                began = time.thread_time()
                orders[kind].send(_REQUESTS)
                await done.wait()
                took = time.thread_time() - began
                loop.remove_reader(orders[kind].fileno())
                orders[kind].recv()
                if number:  # the first round warms up
                    found[kind].append(took / _REQUESTS * 1e6)
        gc.enable()
        for kind, node in nodes.items():
            orders[kind].send(0)
            await node.stop()
    return {kind: _summary(times, found["none"]) for kind, times in found.items()}


def _summary(times: list[float], without: list[float]) -> dict[str, float]:
    least, median = min(times), statistics.median(times)
    return {
        "least_us": round(least, 2),
        "median_us": round(median, 2),
        "ratio_of_least": round(least / min(without), 3),
        "ratio_of_medians": round(median / statistics.median(without), 3),
    }


def main() -> None:
    import uvloop

    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else _ROUNDS
    result = {f"acks={acks}": uvloop.run(_measure(acks, rounds)) for acks in (1, -1)}
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
