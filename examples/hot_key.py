"""A hot key: `python examples/hot_key.py [HOST:PORT]` spreads one key over several partitions and counts it again.

`salt=8` turns one key into eight, which hash to different partitions. The cost is order: events of the customer are in
order only within each of the eight. `salt_by` keeps events in order that belong together, here those of one cart. The
handler gets the original key from `message.unsalted_key`.
"""

import sys
import time
from collections import Counter
from threading import Lock

from penstock.client import Message, Penstock

app = Penstock(sys.argv[1] if len(sys.argv) > 1 else "localhost:9092", name="hot-key")
CARTS, STEPS, SALT = 40, 5, 8
totals: Counter[bytes | None] = Counter()
partitions: set[int] = set()
steps: dict[int, list[int]] = {}
lock = Lock()


@app.subscribe("clicks", group="click-totals", concurrency=4)
def add(click: dict[str, int], message: Message) -> None:
    with lock:
        totals[message.unsalted_key] += 1
        partitions.add(message.partition)
        steps.setdefault(click["cart"], []).append(click["step"])


def main() -> None:
    with app:
        app.create_topic("clicks", partitions=6)
        for step in range(STEPS):
            for cart in range(CARTS):
                click = {"cart": cart, "step": step}
                app.publish_soon("clicks", click, key="big-customer", salt=SALT, salt_by=f"cart-{cart}")
        app.flush()
        app.start()
        while sum(totals.values()) < CARTS * STEPS:
            time.sleep(0.05)
    print(f"{totals[b'big-customer']} clicks of big-customer were in {len(partitions)} partitions")
    print("the steps of every cart are in order:", all(each == sorted(each) for each in steps.values()))


if __name__ == "__main__":
    main()
