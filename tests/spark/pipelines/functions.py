"""Code as users write it: row functions and a sink, in a module that workers can import."""

import os
import random
from pathlib import Path

from penstock.spark.pipelines.declaration import DeadLetter, RowFunction, row_function


@row_function("id STRING, total DOUBLE")
def price(order):
    match order["id"]:
        case "broken":
            raise ValueError("no price for it")
        case "hopeless":
            raise DeadLetter("never")
        case "unwanted":
            return None
        case "misfit":
            return {"id": 5, "total": "x"}
    return {"id": order["id"], "total": order["amount"] * 2}


@row_function("id STRING")
def by_chance(order):
    if random.random() < 0.5:
        raise ValueError("bad luck")
    return {"id": order["id"]}


@row_function("id STRING")
def lacks_module(order):
    import no_such_module_of_anybody  # noqa: F401

    return {"id": order["id"]}


def until_there(path: str) -> RowFunction:
    """Rows called `late` succeed once a file exists. Rows called `never` always fail."""

    def call(order):
        if order["id"] == "never" or (order["id"] == "late" and not os.path.exists(path)):
            raise ConnectionError(f"{order['id']} cannot be had")
        return {"id": order["id"]}

    return RowFunction(call=call, schema="id STRING")


class Files:
    """A sink that stores each batch once, in its own folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def prepare(self, spark, run):
        self.spark = spark

    def describe(self):
        return str(self.folder)

    def write(self, rows, batch):
        target = self.folder / f"{batch.query}-{batch.number}"
        if not target.exists():
            rows.drop("_record").write.json(str(target))

    def rows(self):
        return self.spark.read.json(str(self.folder / "*")).collect()
