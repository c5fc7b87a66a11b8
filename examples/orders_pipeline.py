"""A pipeline with a contract: penstock pipeline run examples/orders_pipeline.py --once

It reads JSON from `orders` and writes each order exactly once to `orders.clean`. A record that does not parse becomes a
dead letter in `orders.dlq`. A record that fails later is retried through `orders.retry.1`.
"""

from penstock.spark import Errors, json_rows, pipeline, row_function


@row_function("id STRING, customer STRING, total DOUBLE")
def priced(order):
    if order["quantity"] <= 0:
        raise ValueError(f"a quantity of {order['quantity']}")
    total = order["quantity"] * order["price"]
    return {"id": order["id"], "customer": order["customer"], "total": total}


@pipeline(
    "clean-orders",
    source="orders",
    sink="orders.clean",
    delivery="exactly-once",
    parse=json_rows("id STRING, customer STRING, quantity INT, price DOUBLE"),
    rows=[priced],
    errors=Errors(attempts=2),
)
def clean(orders):
    return orders.where("total < 10000")
