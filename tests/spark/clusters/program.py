"""A program as users write it, which knows only the address of Spark (arguments as JSON).

It writes and reads topics, copies one exactly once in a stream, runs a pipeline and the built-in ones, and prints what
it saw.
"""

import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

from penstock.spark import json_rows, pipeline, row_function
from penstock.spark.analytics import dedupe, metrics
from penstock.spark.archive import archive, history
from penstock.spark.pipelines.declaration import Pipeline
from penstock.spark.pipelines.runner import LaunchSettings, Runner
from penstock.spark.pipelines.status import PipelineState
from penstock.spark.replay import replay
from penstock.spark.session import session

WITHIN_S = 900
RESTARTS = 5
#: Spark Connect gives the Python process of `foreachBatch` ten seconds to start, and has no setting for this.
SLOW_START = "Python worker failed to connect back"
#: SQL for the number with which a record was written.
ID = "cast(get_json_object(cast(value as string), '$.id') as bigint)"


class Program:
    def __init__(self, given: dict[str, Any]) -> None:
        self.given = given
        self.spark = session("clusters", master=given["master"])
        self.at = {"kafka.bootstrap.servers": given["bootstrap"]}

    def checkpoint(self, name: str) -> str:
        return str(Path(self.given["folder"]) / name)

    def write(self, topic: str, rows: int) -> None:
        """Write with timestamps of an hour ago, a millisecond apart."""
        frame = self.spark.range(0, rows, 1, 4).selectExpr(
            "to_json(struct(id, if(id % 10 = 7, 'x', cast(id as string)) as amount)) as value",
            "cast(id as string) as key",
            "timestamp_millis(unix_millis(now()) - 3600000 + id) as event_time",
        )
        writer = frame.write.format("penstock").mode("append").options(**self.at, topic=topic)
        writer.options(contract="exactly-once", timestampColumn="event_time").save()

    def seen(self, rows: Any) -> list[int]:
        """Return of rows with an id: their number, the number of different ids, and the sum."""
        (found,) = rows.selectExpr("count(id)", "count(distinct id)", "coalesce(sum(id), 0)").collect()
        return list(found)

    def topic(self, name: str) -> Any:
        reader = self.spark.read.format("penstock").options(**self.at, subscribe=name)
        return reader.option("minPartitions", "4").load()

    def run(self, runnable: Any) -> None:
        """Run what is available now in this session. Only a slow machine may cause a restart."""
        restarts = RESTARTS if isinstance(runnable, Pipeline) else 0
        warnings: list[str] = []
        launch = LaunchSettings(
            bootstrap=self.given["bootstrap"],
            checkpoints=self.checkpoint("runs"),
            master=self.given["master"],
            once=True,
            restarts=restarts,
        )
        made = Runner(
            runnable,
            launch,
            listener=lambda _: None,
            note=lambda _: None,
            warn=warnings.append,
            spark=self.spark,
        )
        outcome = made.run()
        assert outcome.state is PipelineState.FINISHED, (runnable.name, outcome, warnings)
        assert all(SLOW_START in warning for warning in warnings), (runnable.name, warnings)

    def processes(self) -> int:
        """Return how many JVMs run tasks: the program's own, or executors."""
        return self.spark.range(0, 40, 1, 4).mapInArrow(machine, "pid bigint").distinct().count()

    def copy(self, source: str, target: str) -> None:
        reading = self.spark.readStream.format("penstock").options(**self.at, subscribe=source)
        frame = reading.options(
            startingOffsets="earliest", maxOffsetsPerTrigger=str(self.given["rows"] // 5), minPartitions="4"
        )
        # Keep the original timestamps, which determine the windows of metrics.
        frame = frame.load().select("key", "value", "timestamp")
        if self.given["deadly"]:
            frame = frame.mapInArrow(deadly(self.given["deadly"]), frame.schema)
        writer = frame.writeStream.format("penstock").options(**self.at, topic=target)
        writer = writer.options(contract="exactly-once", timestampColumn="timestamp")
        writer = writer.option("checkpointLocation", self.checkpoint("copy"))
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

        self.run(clean)

    def built_in(self, source: str, names: dict[str, str]) -> dict[str, Any]:
        """Run archive, replay, dedupe and metrics, and return their results."""
        lake = self.checkpoint("lake")
        self.run(archive(source, lake))
        self.run(replay(archive=lake, to=names["replayed"]))
        for _ in range(2):
            self.write(names["twice"], self.given["rows"] // 2)
        self.run(dedupe(names["twice"], names["once"], by="key", watermark="2 hours"))
        # Current records complete the windows before them.
        now = self.spark.range(1).selectExpr("'{}' as value")
        now.write.format("penstock").mode("append").options(**self.at, topic=source).save()
        self.run(
            metrics(topics=re.escape(source), to=names["metrics"], starting="earliest", name=names["metrics"])
        )
        windows = self.topic(names["metrics"]).selectExpr(
            "from_json(cast(value as string), 'kind string, records bigint') as row"
        )
        (counted,) = windows.where("row.kind = 'traffic'").selectExpr("sum(row.records)").collect()
        return {
            "archived": self.seen(history(self.spark, lake).selectExpr(f"{ID} as id")),
            "metrics": counted[0],
        }


def machine(batches: Any) -> Any:
    """Return the parent process of a task."""
    import pyarrow

    for _ in batches:
        yield pyarrow.record_batch({"pid": [java_machine()]})


def java_machine() -> int:
    """A JVM starts the daemon that forks tasks."""
    stat = Path(f"/proc/{os.getppid()}/stat").read_text()
    return int(stat.rpartition(")")[2].split()[1])


def deadly(flag: str) -> Any:
    """The first task that calls this kills its executor in the middle of its rows."""

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
    names = given["topics"]
    program.write(names["orders"], given["rows"])
    program.copy(names["orders"], names["copied"])
    program.clean(names["orders"], names["cleaned"])
    results = program.built_in(names["copied"], names)
    for name in ("orders", "copied", "cleaned", "replayed", "once"):
        results[name] = program.seen(program.topic(names[name]).selectExpr(f"{ID} as id"))
    print(json.dumps({"read": results, "processes": program.processes()}), flush=True)
    program.spark.stop()


if __name__ == "__main__":
    main()
