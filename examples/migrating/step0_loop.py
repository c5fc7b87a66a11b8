"""Step 0: a consumer loop. `python examples/migrating/step0_loop.py [HOST:PORT]`, Ctrl-C ends it.

It parses, retries while all later messages wait, writes failures to a topic and commits. docs/migrating.md lists what
can go wrong with it.
"""

import json
import signal
import sys
import time
from typing import Any

from confluent_kafka import Consumer, Producer

bootstrap = sys.argv[1] if len(sys.argv) > 1 else "localhost:9092"
running = True


def stop(*_: Any) -> None:
    global running
    running = False


def bill(order: dict[str, Any]) -> None:
    print(f"billed order {order['id']} of {order['customer']}", flush=True)


signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, stop)
dead_letters = Producer({"bootstrap.servers": bootstrap})
consumer = Consumer(
    {
        "bootstrap.servers": bootstrap,
        "group.id": "billing",
        "auto.offset.reset": "earliest",
        "enable.auto.commit": False,
    }
)
consumer.subscribe(["shop.orders"])
while running:
    message = consumer.poll(0.5)
    if message is None or message.error():
        continue
    for attempt in range(3):
        try:
            bill(json.loads(message.value()))
            break
        except Exception:
            time.sleep(0.1 * 2**attempt)
    else:
        dead_letters.produce("shop.orders.failed", message.value(), message.key())
        dead_letters.flush()
    consumer.commit(message, asynchronous=False)
consumer.close()
