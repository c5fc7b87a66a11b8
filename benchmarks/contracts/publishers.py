"""Publishing, by hand and with the application layer: until every message is reported to be there."""

import itertools
from collections import deque
from typing import Any

from benchmarks.contracts.messages import headers, keys, values

_POLL_EVERY = 1_000
#: Futures that are kept at a time.
_OPEN_MAX = 50_000
_FLUSH_S = 60.0


class BareProducer:
    """`has_headers` for what our publisher gives every message: an id, and a trace."""

    def __init__(self, bootstrap: str, topic: str, value_bytes: int, *, has_headers: bool) -> None:
        from confluent_kafka import Producer

        self._producer = Producer({"bootstrap.servers": bootstrap, "enable.idempotence": True})
        self._topic = topic
        self._values, self._keys = values(value_bytes), keys()
        self._headers = headers() if has_headers else itertools.repeat(None)
        self._reported = 0

    def _report(self, error: Any, message: Any) -> None:
        if error is not None:
            raise RuntimeError(error.str())
        self._reported += 1

    def publish(self, count: int) -> None:
        produce, poll = self._producer.produce, self._producer.poll
        self._reported = 0
        for number, told in zip(range(count), self._headers, strict=False):
            value, key = self._values[number % len(self._values)], self._keys[number % len(self._keys)]
            while True:
                try:
                    produce(self._topic, value, key, headers=told, on_delivery=self._report)
                    break
                except BufferError:
                    poll(0.01)
            if number % _POLL_EVERY == 0:
                poll(0)
        self._producer.flush(_FLUSH_S)
        if self._reported != count:
            raise RuntimeError(f"{self._reported} of {count} were reported")

    def close(self) -> None:
        pass


class Publisher:
    def __init__(self, bootstrap: str, topic: str, value_bytes: int) -> None:
        from penstock.client import Penstock

        self._app = Penstock(bootstrap)
        self._topic = topic
        self._values, self._keys = values(value_bytes), keys()

    def publish(self, count: int) -> None:
        publish_soon, open_futures = self._app.publish_soon, deque[Any]()
        for number in range(count):
            value, key = self._values[number % len(self._values)], self._keys[number % len(self._keys)]
            open_futures.append(publish_soon(self._topic, value, key=key))
            if len(open_futures) > _OPEN_MAX:
                open_futures.popleft().result()
        for future in open_futures:
            future.result()

    def close(self) -> None:
        self._app.close()
