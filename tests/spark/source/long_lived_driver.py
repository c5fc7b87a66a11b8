"""The driver of the long-running query: runs the commands on its stdin (JSON lines), and answers each with a line.

start: start a query from one topic to another, exactly once. stop: stop it as Spark does, even within a batch.
look: return its state.
"""

import json
import sys
from typing import Any

from penstock.spark.session import FILE_MANAGER_SETTING, FILE_MANAGER_WITHOUT_PROCESSES, session

SETTINGS = {
    "spark.log.level": "OFF",
    "spark.sql.shuffle.partitions": "2",
    "spark.driver.memory": "1g",
    FILE_MANAGER_SETTING: FILE_MANAGER_WITHOUT_PROCESSES,
}


class Driver:
    def __init__(self) -> None:
        self.spark = session("long-lived", master="local[2,4]", settings=SETTINGS)
        self.query: Any = None

    def start(self, source: dict[str, str], sink: dict[str, str], checkpoint: str) -> dict[str, Any]:
        frame = self.spark.readStream.format("penstock").options(**source).load().select("key", "value")
        writer = frame.writeStream.format("penstock").options(**sink)
        writer = writer.option("checkpointLocation", checkpoint)
        self.query = writer.trigger(processingTime="100 milliseconds").start()
        return self.look()

    def stop(self) -> dict[str, Any]:
        self.query.stop()
        return self.look()

    def look(self) -> dict[str, Any]:
        error, progress = self.query.exception(), self.query.lastProgress
        return {
            "error": None if error is None else str(error),
            "is_active": self.query.isActive,
            "batch": None if progress is None else progress.batchId,
        }


def main() -> None:
    driver = Driver()
    for line in sys.stdin:
        given = json.loads(line)
        print(json.dumps(getattr(driver, given.pop("do"))(**given)), flush=True)
    driver.spark.stop()


if __name__ == "__main__":
    main()
