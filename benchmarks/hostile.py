"""What one hostile client costs its neighbour: `python -m benchmarks.hostile [ATTACK ...]`.

Starts a broker on loopback, measures a well-behaved producer (one record at a time, acks=all) alone and then beside an
attack, and prints both with the broker's memory, and the goals that were reached or missed. Exits with 1 if any was
missed. Every attack is bounded in connections, requests and seconds.

metadata:   many connections, each with a burst of pipelined requests for all topics, that close after a second.
drip:       connections that announce frames of 100 MB and send a byte every few seconds; the neighbour sends 1 MB.
bombs:      small batches that decompress to the bound, sent to a compacted topic.
records:    the same, of as many records as fit, each of which has to have a key.
partitions: Produce requests of 19,990 partitions without records.
"""

import argparse
import json
import multiprocessing
import os
import select
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.brokers.broker import PenstockBroker
from benchmarks.reports.goals import HOSTILE_GOALS, check_goals
from benchmarks.reports.report import goal_documents, goals_table
from benchmarks.reports.results_file import add_json_argument, run_facts, write_results
from benchmarks.reports.stats import percentile
from benchmarks.wire.admin import create_topics
from benchmarks.wire.frames import Ring
from benchmarks.wire.raw_client import Connection, Shape, create_topic
from penstock.protocol.compression import Codec, compress
from penstock.protocol.record_batch import Record, encode_batch, pack_new_batch
from penstock.protocol.wire import encode_varint

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_ALL_TOPICS = struct.pack(">i", -1) + b"\x00"
_PROBE = "neighbour"
_BOMBED = "bombed"
#: A request that is not answered for this long ends the measurement.
_STALL_S = 30.0
#: How long an attack may take until its first request is answered.
_READY_S = 120.0
_SIZE = struct.Struct(">i")
_SMALLEST_RECORD_BYTES_MAX = 16


class Prober:
    """One record after the other, each acknowledged before the next is sent after a short rest."""

    def __init__(self, address: tuple[str, int], value_bytes: int = 100, rest_s: float = 0.005) -> None:
        self._connection = Connection(address, _STALL_S)
        batch = bytes(encode_batch([Record(0, 0, None, bytes(value_bytes))]))
        self._ring = Ring(_PROBE, [0], batch, 1)
        self._rest_s = rest_s

    def run(self, seconds: float) -> list[float]:
        latencies: list[float] = []
        end = time.monotonic() + seconds
        while (began := time.monotonic()) < end:
            try:
                self._connection.send(self._ring.take(1))
                self._connection.read_frame()
            except TimeoutError:
                latencies.append(_STALL_S * 1000)
                break
            latencies.append((time.monotonic() - began) * 1000)
            time.sleep(self._rest_s)
        return latencies


def metadata_flood(address: tuple[str, int], options: argparse.Namespace, stop: Event, ready: Event) -> None:
    """A wave of connections each second, each with its burst, all closed before the next wave."""
    message = struct.pack(">hhih", 3, 4, 1, 4) + b"evil" + _ALL_TOPICS
    burst = (struct.pack(">i", len(message)) + message) * options.pipelined
    for _ in range(options.waves):
        wave: list[socket.socket] = []
        for _ in range(options.connections):
            with suppress(OSError):
                peer = socket.create_connection(address, timeout=5)
                peer.sendall(burst)
                wave.append(peer)
        ready.set()
        stop.wait(1.0)
        for peer in wave:
            peer.close()
        if stop.is_set():
            return


def drip(address: tuple[str, int], options: argparse.Namespace, stop: Event, ready: Event) -> None:
    """Three frames of 100 MB are announced, and a byte of each is sent now and then."""
    peers = [socket.create_connection(address, timeout=5) for _ in range(3)]
    for peer in peers:
        peer.sendall(struct.pack(">ihhih", 100 * 2**20 - 64, 0, 7, 1, -1))
    ready.set()
    while not stop.wait(1.0):
        for peer in peers:
            with suppress(OSError):
                peer.sendall(b"\x00")
    for peer in peers:
        peer.close()


def bombs(address: tuple[str, int], options: argparse.Namespace, stop: Event, ready: Event) -> None:
    """Each connection keeps one bomb under way after the other."""
    value = bytes(options.bomb_bytes // options.bomb_records)
    records = [Record(number, 0, b"k", value) for number in range(options.bomb_records)]
    _throw(bytes(encode_batch(records, codec=Codec[options.codec.upper()])), address, options, stop, ready)


def bombs_of_records(
    address: tuple[str, int], options: argparse.Namespace, stop: Event, ready: Event
) -> None:
    codec = Codec[options.codec.upper()]
    count, body = _smallest_records(options.bomb_bytes)
    batch = pack_new_batch(compress(codec, body), count, 0, attributes=codec)
    _throw(bytes(batch), address, options, stop, ready)


def _smallest_records(size: int) -> tuple[int, bytes]:
    """The number and the bytes of so many records, with a key of one byte each, that they take about `size` bytes."""
    body = bytearray()
    count = 0
    while len(body) < size - _SMALLEST_RECORD_BYTES_MAX:
        delta = encode_varint(count)
        # Attributes, timestamp delta, offset delta, the key, an empty value and no headers.
        content = b"\x00\x00" + delta + b"\x02k\x00\x00"
        body += encode_varint(len(content)) + content
        count += 1
    return count, bytes(body)


def _throw(
    batch: bytes, address: tuple[str, int], options: argparse.Namespace, stop: Event, ready: Event
) -> None:
    _keep_under_way(
        bytes(Ring(_BOMBED, [0], batch, 1).take(1)), options.bombs_pipelined, address, options, stop, ready
    )


def partitions(address: tuple[str, int], options: argparse.Namespace, stop: Event, ready: Event) -> None:
    head = struct.pack(">hhih", 0, 7, 1, 4) + b"evil" + struct.pack(">hhii", -1, 1, 1000, 1)
    topic = struct.pack(">h", len(_PROBE)) + _PROBE.encode() + struct.pack(">i", options.partitions)
    empty = b"".join(struct.pack(">ii", index, -1) for index in range(options.partitions))
    message = head + topic + empty
    frame = struct.pack(">i", len(message)) + message
    _keep_under_way(frame, 1, address, options, stop, ready)


def _keep_under_way(
    frame: bytes,
    pipelined: int,
    address: tuple[str, int],
    options: argparse.Namespace,
    stop: Event,
    ready: Event,
) -> None:
    """Each connection sends the frame again for all that it gets."""
    peers = [socket.create_connection(address, timeout=30) for _ in range(options.bomb_connections)]
    for peer in peers:
        peer.settimeout(None)  # with a timeout, recv may return less than it is to wait for
        peer.sendall(frame * pipelined)
    while not stop.is_set():
        answered, _, _ = select.select(peers, [], [], 0.2)
        if answered:
            ready.set()
        for peer in answered:
            size = peer.recv(_SIZE.size, socket.MSG_WAITALL)
            if len(size) == _SIZE.size:
                peer.recv(_SIZE.unpack(size)[0], socket.MSG_WAITALL)
                peer.sendall(frame)
            else:
                peers.remove(peer)
    for peer in peers:
        peer.close()


_ATTACKS: Mapping[str, Callable[[tuple[str, int], argparse.Namespace, Event, Event], None]] = {
    "metadata": metadata_flood,
    "drip": drip,
    "bombs": bombs,
    "records": bombs_of_records,
    "partitions": partitions,
}


def main() -> int:
    options = _parse()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        facts = run_facts("hostile", Path(folder), rounds=1)
        results = []
        for attack in options.attacks or _ATTACKS:
            results.append({"name": attack, **_measure(Path(folder) / attack, attack, options)})
            print(json.dumps(results[-1]), flush=True)
    figures = {each["name"]: each for each in results}
    verdicts = check_goals({"penstock": figures}, "penstock", None, HOSTILE_GOALS)
    Console().print(goals_table(verdicts))
    if options.json is not None:
        write_results(options.json, {**facts, "goals": goal_documents(verdicts), "results": results})
    return 0 if all(verdict.reached for verdict in verdicts) else 1


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("attacks", nargs="*", choices=[*_ATTACKS, []])
    parser.add_argument("--seconds", type=float, default=8.0, help="of each measurement")
    parser.add_argument("--topics", type=int, default=2000)
    parser.add_argument("--connections", type=int, default=200)
    parser.add_argument("--pipelined", type=int, default=64)
    parser.add_argument("--waves", type=int, default=1000, help="of connections, one each second")
    parser.add_argument("--bomb-bytes", type=int, default=63 * 2**20)
    parser.add_argument("--bomb-records", type=int, default=1)
    parser.add_argument("--bomb-connections", type=int, default=40)
    parser.add_argument("--bombs-pipelined", type=int, default=1)
    parser.add_argument("--partitions", type=int, default=19_990, help="of a Produce request")
    parser.add_argument("--codec", default="zstd", choices=["gzip", "snappy", "lz4", "zstd"])
    parser.add_argument("--folder", default=None, help="where the broker keeps its data")
    add_json_argument(parser)
    return parser.parse_args()


def _measure(folder: Path, attack: str, options: argparse.Namespace) -> dict[str, Any]:
    with PenstockBroker(folder) as broker:
        broker.start()
        with broker.connect() as connection:
            create_topic(connection, _PROBE, Shape(), broker.topic_configs(fsync=True))
            if attack in ("bombs", "records"):
                compacted = {"cleanup.policy": "compact", "max.message.bytes": str(2**24)}
                create_topic(connection, _BOMBED, Shape(), compacted)
            if attack == "metadata":
                create_topics(connection, [f"topic-{number:06}" for number in range(options.topics)])
        # A large frame needs memory of the bound that a drip takes; a small one never does.
        value_bytes = 900_000 if attack == "drip" else 100
        prober = Prober(broker.address, value_bytes)
        prober.run(1.0)
        alone = prober.run(options.seconds)
        memory_before, _ = broker.memory_bytes()
        # A process of its own, so that it takes no time from the one that measures.
        processes = multiprocessing.get_context("spawn")
        stop, ready = processes.Event(), processes.Event()
        attacker = processes.Process(target=_ATTACKS[attack], args=(broker.address, options, stop, ready))
        watch = _MemoryWatch(broker)
        attacker.start()
        watch.start()
        try:
            if not ready.wait(_READY_S):
                raise RuntimeError(f"{attack}: nothing was answered in {_READY_S:.0f} s")
            attacked = prober.run(options.seconds)
        finally:
            stop.set()
            attacker.join()
            watch.join()
        return {
            "alone": _summary(alone),
            "attacked": _summary(attacked),
            "p99_ratio": round(_p(attacked, 99) / _p(alone, 99), 2),
            "rss_before_mb": memory_before >> 20,
            "rss_peak_mb": watch.peak >> 20,
            "rss_growth_mb": max(watch.peak - memory_before, 0) >> 20,
        }


class _MemoryWatch(threading.Thread):
    def __init__(self, broker: PenstockBroker) -> None:
        super().__init__()
        self._broker = broker
        self._over = threading.Event()
        self.peak = 0

    def run(self) -> None:
        while not self._over.wait(0.05):
            # Cheaper for the broker than the sums of its mappings.
            pages = int(Path(f"/proc/{self._broker.pid}/statm").read_text().split()[1])
            self.peak = max(self.peak, pages * _PAGE_BYTES)

    def join(self, timeout: float | None = None) -> None:
        self._over.set()
        super().join(timeout)


def _summary(latencies: list[float]) -> dict[str, float]:
    return {
        "requests": len(latencies),
        **{f"p{p}_ms": round(_p(latencies, p), 2) for p in (50, 99)},
        "max_ms": round(max(latencies), 2),
    }


def _p(latencies: list[float], percent: float) -> float:
    return percentile(sorted(latencies), percent)


if __name__ == "__main__":
    sys.exit(main())
