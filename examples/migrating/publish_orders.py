"""Publishes orders for the migration: `python examples/migrating/publish_orders.py [HOST:PORT] [FIRST] [COUNT]`.

Each order has a message id, so that a repetition can be detected.
"""

import sys

from penstock.client import Penstock

given = dict(enumerate(sys.argv))
first, count = int(given.get(2, 0)), int(given.get(3, 10))

with Penstock(given.get(1, "localhost:9092")) as app:
    for number in range(first, first + count):
        order = {"id": number, "customer": f"c{number % 3}"}
        app.publish("shop.orders", order, key=order["customer"], headers={"message-id": f"order-{number}"})
