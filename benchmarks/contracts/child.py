"""One turn, in a process of its own: asked for by JSON on the command line, answered by a line of JSON."""

import json
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from benchmarks.brokers import procfs
from benchmarks.contracts import bare
from benchmarks.contracts.publishers import BareProducer, Publisher
from benchmarks.contracts.subscriber import Subscriber

_LOOK_S = 0.005
#: Longer than this without a message, and something is wrong.
_IDLE_S = 60.0


class Reader(Protocol):
    """Reads in a thread; `count` goes up with every batch."""

    count: int

    @property
    def thread(self) -> Any: ...
    def start(self) -> None: ...
    def stop(self) -> None: ...


class Sample(NamedTuple):
    count: int
    wall_s: float
    client_s: float
    thread_s: float
    broker_s: float
    machine_s: float


def main() -> None:
    asked = json.loads(sys.argv[1])
    answer = (_publish if "publish" in asked else _consume)(asked)
    print(json.dumps(answer), flush=True)


def _consume(asked: dict[str, Any]) -> dict[str, float]:
    reader = _reader(asked)
    reader.start()
    _await(reader, asked["warm"])
    clock = time.pthread_getcpuclockid(reader.thread.ident)
    before = _sample(reader.count, asked["broker_pid"], clock)
    _await(reader, asked["messages"])
    after = _sample(reader.count, asked["broker_pid"], clock)
    reader.stop()
    return _between(before, after)


def _await(reader: Reader, count: int) -> None:
    moved_s, seen = time.monotonic(), 0
    while reader.count < count:
        time.sleep(_LOOK_S)
        now_s = time.monotonic()
        if reader.count > seen:
            moved_s, seen = now_s, reader.count
        elif now_s - moved_s > _IDLE_S:
            raise RuntimeError(f"no message for {_IDLE_S:.0f} s after {seen}")


def _reader(asked: dict[str, Any]) -> Reader:
    places = asked["bootstrap"], asked["topic"], asked["group"]
    if "handler" in asked:
        return Subscriber(*places, asked["handler"], asked["how"])
    kinds: dict[str, Callable[..., bare.BareLoop]] = {
        "after": bare.BareLoop,
        "first": bare.BareFirst,
        "transactions": bare.BareTransactions,
    }
    loop = kinds[asked["commits"]](
        *places, _touch(asked["touch"]), commit_every_s=asked["commit_every_s"], settings=asked["settings"]
    )
    if isinstance(loop, bare.BareTransactions):
        loop.to = asked["to"]
    return loop


def _touch(name: str) -> bare.Touch:
    plain: dict[str, bare.Touch] = {
        "nothing": bare.untouched,
        "message": bare.as_messages,
        "bytes": bare.as_bytes,
    }
    return plain[name] if name in plain else bare.as_orders()


def _publish(asked: dict[str, Any]) -> dict[str, float]:
    places = asked["bootstrap"], asked["topic"], asked["value_bytes"]
    publisher: Publisher | BareProducer = (
        Publisher(*places)
        if asked["publish"] == "ours"
        else BareProducer(*places, has_headers=asked["publish"] == "bare-headers")
    )
    publisher.publish(asked["warm"])
    clock = time.CLOCK_THREAD_CPUTIME_ID
    before = _sample(0, asked["broker_pid"], clock)
    publisher.publish(asked["messages"])
    after = _sample(asked["messages"], asked["broker_pid"], clock)
    publisher.close()
    return _between(before, after)


def _sample(count: int, broker_pid: int, clock: int) -> Sample:
    return Sample(
        count=count,
        wall_s=time.monotonic(),
        client_s=time.process_time(),
        thread_s=time.clock_gettime(clock),
        broker_s=procfs.cpu_seconds(broker_pid),
        machine_s=procfs.machine_cpu_seconds(),
    )


def _between(before: Sample, after: Sample) -> dict[str, float]:
    return {name: late - early for name, early, late in zip(Sample._fields, before, after, strict=True)}


if __name__ == "__main__":
    main()
