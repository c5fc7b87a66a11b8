"""Spark sessions in a Python environment that is not activated: one that the user creates, and ours."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.spark.class_archive import QUICK_JAVA
from tests.spark.source.topics import Topics

from penstock.spark.session import find_java, home_for_spark

IMPORTED_FIRST = """
import penstock.spark
from pyspark.sql import SparkSession

spark = SparkSession.builder.master("local[2]").getOrCreate()
"""
REGISTERED_LATE = """
from pyspark.sql import SparkSession

spark = SparkSession.builder.master("local[2]").getOrCreate()

import penstock.spark
penstock.spark.register(spark)
"""
OURS = """
from penstock.spark.session import session

spark = session()
"""
READS = """
import sys

topic = spark.read.format("penstock").option("kafka.bootstrap.servers", sys.argv[1]).option("subscribe", sys.argv[2])
print(topic.load().count(), len(topic.load().take(1)))
spark.stop()
"""


@pytest.mark.parametrize(
    "program", [IMPORTED_FIRST, REGISTERED_LATE, OURS], ids=["imported first", "registered", "ours"]
)
def test_the_session_finds_the_format_and_its_workers_find_the_module(
    program: str, broker: Any, unique: Callable[[str], str], tmp_path: Path
) -> None:
    """`python3` on the PATH is another Python, without Penstock and PySpark."""
    (tmp_path / "python3").write_text("#!/bin/sh\necho this is no Python of ours >&2\nexit 1\n")
    (tmp_path / "python3").chmod(0o755)
    topics = Topics(broker.bootstrap_servers)
    name = topics.create(unique("plain"), 2)
    topics.count(name, range(5))
    environment = {
        **QUICK_JAVA,
        "HOME": str(tmp_path),
        "JAVA_HOME": str(home_for_spark(find_java())),
        "PATH": f"{tmp_path}:/usr/bin:/bin",
    }
    done = subprocess.run(
        [sys.executable, "-c", program + READS, broker.bootstrap_servers, name],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout == "5 1\n"
    assert "BrokenPipeError" not in done.stderr
