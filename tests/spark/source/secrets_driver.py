"""A program with its own session that shows of its queries whatever Spark can show: plans, errors, its log, the UI.

Arguments: a folder, and a JSON file with `options` of format("penstock"), `wrong` ones, and the `topic`.
"""

import json
import sys
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

from pyspark.errors import PySparkException

from penstock.spark.session import session

WAITING = "waiting for a line of input"
#: Pages and the REST API of Spark's UI.
PAGES = ("/SQL/", "/jobs/", "/stages/", "/environment/", "/executors/", "/StreamingQuery/")
API = (
    "",
    "/sql?details=true&planDescription=true&length=1000",
    "/jobs",
    "/stages?details=true",
    "/environment",
)


def show_plans(frame: Any) -> None:
    for mode in ("extended", "formatted", "codegen", "cost"):
        frame.explain(mode=mode)
    print(frame, repr(frame), frame.schema)


def run(spark: Any, options: dict[str, str], topic: str, folder: Path) -> None:
    """A batch and a stream, both with source and sink."""
    rows = spark.range(3).selectExpr("cast(id as string) as value")
    rows.write.format("penstock").mode("append").options(**options, topic=topic).save()
    frame = spark.read.format("penstock").options(**options, subscribe=topic).load()
    show_plans(frame)
    print("rows:", frame.count(), frame.selectExpr("cast(value as string)").collect())
    frame.createOrReplaceTempView("seen")
    spark.sql("explain extended select count(*) from seen").show(truncate=False)
    listed = ", ".join(f"`{name}` '{value}'" for name, value in {**options, "subscribe": topic}.items())
    with suppress(PySparkException):
        spark.sql(f"create temporary view named using penstock options ({listed})")
        spark.sql("explain extended select * from named").show(truncate=False)
        spark.sql("describe extended named").show(truncate=False)
        spark.sql("select count(*) from named").show()
    stream = spark.readStream.format("penstock").options(**options, subscribe=topic)
    reading = stream.option("startingOffsets", "earliest").load()
    reading.explain(extended=True)
    writer = reading.select("value").writeStream.format("penstock").options(**options, topic=topic + "-copy")
    running = (
        writer.option("checkpointLocation", str(folder / "checkpoint")).trigger(availableNow=True).start()
    )
    running.awaitTermination(100)
    running.explain(extended=True)
    assert running.exception() is None
    print(running.lastProgress, running.recentProgress, running.status, running.exception(), running)


def fail(spark: Any, options: dict[str, str], topic: str, folder: Path) -> None:
    for number in range(2):
        try:
            if number:
                reading = spark.readStream.format("penstock").options(**options, subscribe=topic).load()
                running = reading.writeStream.format("noop").trigger(availableNow=True)
                running.option("checkpointLocation", str(folder / "wrong")).start().awaitTermination(100)
            else:
                spark.read.format("penstock").options(**options, subscribe=topic).load().collect()
        except PySparkException as error:
            print("failed as it should:", error, repr(error), error.getMessageParameters())
            with suppress(Exception):
                print(error.desc, error.stackTrace)


def show_ui(spark: Any) -> None:
    url = spark.sparkContext.uiWebUrl
    applications = f"{url}/api/v1/applications"
    found = json.loads(_page(applications))
    assert found
    for path in [url + page for page in PAGES] + [f"{applications}/{found[0]['id']}{each}" for each in API]:
        print(path, _page(path))
    count = len(json.loads(_page(f"{applications}/{found[0]['id']}/sql?length=1000")))
    for number in range(count):
        print(_page(f"{url}/SQL/execution/?id={number}"))
    print("executions shown:", count)


def _page(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as answer:
        text: str = answer.read().decode()
    return text


def main(folder: Path, given: dict[str, Any]) -> None:
    events = folder / "events"
    events.mkdir()
    spark = session(
        "secrets",
        master="local[2]",
        settings={
            "spark.eventLog.enabled": "true",
            "spark.eventLog.dir": events.as_uri(),
            "spark.log.level": "INFO",
            "spark.sql.shuffle.partitions": "1",
            "spark.ui.enabled": "true",
            "spark.ui.port": "0",
        },
    )
    run(spark, given["options"], given["topic"], folder)
    fail(spark, given["wrong"], given["topic"], folder)
    show_ui(spark)
    print(spark.sparkContext.getConf().getAll())
    print(WAITING, flush=True)
    input()  # until the test has looked at the processes
    spark.stop()
    print("stopped")


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text()))
