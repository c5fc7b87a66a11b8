"""A program as users write it, which knows of Spark only the address that it is given (arguments as JSON).

It writes a topic, reads it, copies it exactly once in a stream, and runs a pipeline; what it saw goes to stdout.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from penstock.spark import json_rows, pipeline, row_function
from penstock.spark.pipelines.assembly import start
from penstock.spark.pipelines.settings import RunSettings
from penstock.spark.session import session

WITHIN_S = 300


class Program:
    def __init__(self, given: dict[str, Any]) -> None:
        self.given = given
        self.spark = session("clusters", master=given["master"])
        self.at = {"kafka.bootstrap.servers": given["bootstrap"]}

    def checkpoint(self, name: str) -> str:
        return str(Path(self.given["folder"]) / name)

    def write(self, topic: str, rows: int) -> None:
        frame = self.spark.range(0, rows, 1, 4).selectExpr(
            "to_json(struct(id, if(id % 10 = 7, 'x', cast(id as string)) as amount)) as value",
            "cast(id as string) as key",
        )
        writer = frame.write.format("penstock").mode("append").options(**self.at, topic=topic)
        writer.option("contract", "exactly-once").save()

    def read(self, topic: str) -> list[int]:
        reader = self.spark.read.format("penstock").options(**self.at, subscribe=topic)
        rows = reader.option("kafka.isolation.level", "read_committed").option("minPartitions", "4").load()
        return sorted(
            row.id
            for row in rows.selectExpr(
                "cast(get_json_object(cast(value as string), '$.id') as int) as id"
            ).collect()
        )

    def processes(self) -> int:
        """How many Java machines do tasks: this program's own, or executors."""
        return self.spark.range(0, 40, 1, 4).mapInArrow(machine, "pid bigint").distinct().count()

    def copy(self, source: str, target: str) -> None:
        reading = self.spark.readStream.format("penstock").options(**self.at, subscribe=source)
        frame = reading.options(startingOffsets="earliest", maxOffsetsPerTrigger="40", minPartitions="4")
        frame = frame.load().select("key", "value")
        if self.given["deadly"]:
            frame = frame.mapInArrow(deadly(self.given["deadly"]), frame.schema)
        writer = frame.writeStream.format("penstock").options(**self.at, topic=target)
        writer = writer.options(contract="exactly-once", checkpointLocation=self.checkpoint("copy"))
        running = writer.trigger(availableNow=True).start()
        assert running.awaitTermination(WITHIN_S)

    def clean(self, source: str, target: str) -> None:
        @row_function("id BIGINT, half DOUBLE")
        def halve(order: dict[str, Any]) -> dict[str, Any]:
            return {"id": order["id"], "half": float(order["amount"]) / 2}

        @pipeline(
            self.given["pipeline"],
            source=source,
            sink=target,
            delivery="exactly-once",
            every=None,
            parse=json_rows("id BIGINT, amount STRING"),
            rows=[halve],
        )
        def clean(orders: Any) -> Any:
            return orders.where("half >= 0")

        run = RunSettings(
            bootstrap=self.given["bootstrap"],
            checkpoint=self.checkpoint("pipeline"),
            master=self.given["master"],
        )
        for query in start(self.spark, clean, run):
            assert query.awaitTermination(WITHIN_S)


def machine(batches: Any) -> Any:
    """The process that is behind a task."""
    import pyarrow

    for _ in batches:
        yield pyarrow.record_batch({"pid": [java_machine()]})


def java_machine() -> int:
    """Tasks are forked by a daemon that a Java machine has started."""
    stat = Path(f"/proc/{os.getppid()}/stat").read_text()
    return int(stat.rpartition(")")[2].split()[1])


def deadly(flag: str) -> Any:
    """The first task that comes here dies with the executor that it is in, in the middle of its rows."""

    def passed(batches: Any) -> Any:
        for batch in batches:
            yield batch
            try:
                Path(flag).touch(exist_ok=False)
            except FileExistsError:
                continue
            os.kill(java_machine(), signal.SIGKILL)

    return passed


def main() -> None:
    given = json.loads(sys.argv[1])
    program = Program(given)
    orders, copied, cleaned = given["topics"]
    program.write(orders, given["rows"])
    program.copy(orders, copied)
    program.clean(orders, cleaned)
    told = {name: program.read(name) for name in given["topics"]}
    print(json.dumps({"read": told, "processes": program.processes()}), flush=True)
    program.spark.stop()


if __name__ == "__main__":
    main()
