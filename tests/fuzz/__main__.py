"""`python -m tests.fuzz --frames N --seed S`: throw frames at a real node and see that it only ever says no.

A process of its own, because the worst failure is one that takes the process with it. Prints one JSON line.
`--state` sends valid requests with hostile values instead, to one node and to three (tests/fuzz/state.py). `--secure`
attacks TLS, logins and access rules (tests/fuzz/secure.py).
"""

import argparse
import asyncio
import json
import logging
import math
import random
import resource
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tests.fuzz.messages import Requests
from tests.unit.broker.raw_client import new_node

from penstock.broker.network.connection import Connection
from penstock.broker.network.node_principals import NodePrincipals
from penstock.broker.node import Node

MEMORY_GROWTH_MAX_KB = 300 * 1024
FRAMES_PER_CONNECTION = 20
REQUESTS_PER_BURST = 2_000
SECURE_FRAMES_PER_BURST = 20_000
SETTINGS = {
    "offsets.topic.num.partitions": "2",
    "penstock.create.topics.partitions.max": "10",
    "penstock.flush": "never",
    "socket.request.max.bytes": "1048576",
}


class Wire:
    """The transport of a connection whose peer is this program."""

    def __init__(self) -> None:
        self.is_cut = False
        self.is_paused = False

    def write(self, data: Any) -> None:
        pass

    def writelines(self, buffers: list[Any]) -> None:
        pass

    def get_extra_info(self, name: str) -> tuple[str, int] | None:
        return ("127.0.0.1", 1) if name == "peername" else None

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False

    def abort(self) -> None:
        self.is_cut = True

    close = abort


async def throw(node: Node, requests: Requests, frames: int) -> Counter[str]:
    seen: Counter[str] = Counter()
    chance = random.Random(requests.chance.random())
    left = frames
    while left > 0:
        wire = Wire()
        connection = Connection(node.server, "PLAINTEXT", nodes=NodePrincipals(node.settings, "PLAINTEXT"))
        connection.connection_made(wire)  # type: ignore[arg-type]
        for _ in range(min(FRAMES_PER_CONNECTION, left)):
            left -= 1
            feed(connection, requests.frame(), chance, wire)
            if wire.is_cut:
                seen["refused"] += 1
                break
        seen["connections"] += 1
        await asyncio.sleep(0)
        connection.connection_lost(None)
    seen["frames"] = frames
    return seen


def feed(connection: Connection, frame: bytes, chance: random.Random, wire: Wire) -> None:
    """In pieces, as a network would."""
    position = 0
    while position < len(frame) and not wire.is_cut and not wire.is_paused:
        into = connection.get_buffer(-1)
        size = min(len(into), len(frame) - position)
        if chance.random() < 0.2:
            size = chance.randint(1, size)
        into[:size] = frame[position : position + size]
        connection.buffer_updated(size)
        position += size


async def run(frames: int, seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        node = new_node(Path(folder), **SETTINGS)
        await node.start()
        # Handlers, schemas and buffers are loaded by the first frames: growth is counted from there.
        await throw(node, Requests(seed + 1), min(frames, 5_000))
        before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        seen = await throw(node, Requests(seed), frames)
        growth_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb
        answers = await is_serving(node)
        in_use = node.server.buffers.bytes_in_use
        await node.stop()
    return {
        "seed": seed,
        **seen,
        "answered": sum(sum(histogram.counts) for histogram in node.metrics.requests.values()),
        "malformed": node.metrics.malformed_frames,
        "internal_errors": node.metrics.internal_errors,
        "memory_growth_kb": growth_kb,
        "buffer_bytes_in_use": in_use,
        "still_serving": answers,
    }


async def is_serving(node: Node) -> bool:
    reader, writer = await asyncio.open_connection("127.0.0.1", node.listeners[0].port)
    writer.write(b"\x00\x00\x00\x0a\x00\x12\x00\x00\x00\x00\x00\x07\xff\xff")
    reply = await asyncio.wait_for(reader.readexactly(8), 10)
    writer.close()
    return reply[4:] == b"\x00\x00\x00\x07"


def attack_state(counts: list[int], requests: int, seed: int, minutes: float) -> int:
    """Prints one JSON line for each number of nodes; 1 when a well-behaved client was harmed."""
    from tests.fuzz import state

    for nodes in counts:
        share = requests // len(counts)
        bursts, seconds = max(1, share // REQUESTS_PER_BURST), 60 * minutes / len(counts)
        attack = partial(
            state.run, nodes=nodes, requests=share, seed=seed, bursts=bursts, seconds_max=seconds
        )
        code = report_of(seed, attack, nodes=nodes)
        if code:
            return code
    return 0


def attack_security(frames: int, seed: int, minutes: float) -> int:
    from tests.fuzz import secure

    logging.getLogger("asyncio").setLevel(logging.ERROR)  # it tells that the node has closed a connection
    bursts = max(1, frames // SECURE_FRAMES_PER_BURST)
    return report_of(
        seed, partial(secure.run, frames=frames, seed=seed, bursts=bursts, seconds_max=60 * minutes)
    )


def report_of(seed: int, attack: Callable[[Path], dict[str, Any]], **about: int) -> int:
    """Print the report of an attack on nodes in a new folder, or the harm that it did."""
    folder = tempfile.mkdtemp()
    try:
        report = attack(Path(folder) / "nodes")
    except AssertionError as error:
        print(json.dumps({"seed": seed, **about, "harm": str(error), "kept_in": folder}))
        return 1
    shutil.rmtree(folder)
    print(json.dumps(report), flush=True)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="with --state and --secure: end after this long"
    )
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--state", action="store_true", help="valid requests with hostile values")
    kinds.add_argument(
        "--secure", action="store_true", help="TLS, logins, access rules and what changes them"
    )
    parser.add_argument(
        "--nodes", type=int, choices=(1, 3), action="append", help="with --state; both by default"
    )
    given = parser.parse_args()
    print(f"seed {given.seed}", file=sys.stderr, flush=True)
    if given.state:
        return attack_state(given.nodes or [1, 3], given.frames, given.seed, given.minutes)
    if given.secure:
        return attack_security(given.frames, given.seed, given.minutes)
    logging.basicConfig(level=logging.ERROR)
    from penstock.broker.process import new_event_loop

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        result = runner.run(run(given.frames, given.seed))
    print(json.dumps(result))
    good = (
        result["still_serving"]
        and result["internal_errors"] == 0
        and result["buffer_bytes_in_use"] == 0
        and result["memory_growth_kb"] < MEMORY_GROWTH_MAX_KB
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
