"""A test that hangs in Spark closes only its own session, as an inner run of pytest shows."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
INNER = """
import pytest

def test_starts_the_session(spark):
    assert spark.range(3).count() == 3

@pytest.fixture
def clings(spark):
    yield
    spark.range(1).count()  # as fixtures do that stop queries: must not hang either

@pytest.mark.timeout(2)
def test_hangs_in_py4j(spark, clings):
    spark.sparkContext._jvm.java.lang.Thread.sleep(86_400_000)

def test_has_a_session_of_its_own(spark):
    assert spark.range(10).selectExpr("sum(id) as total").collect()[0].total == 45
"""


def test_the_test_after_a_timed_out_test_gets_a_new_session(tmp_path):
    (tmp_path / "test_inner.py").write_text(INNER)
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "--rootdir", str(tmp_path), "-c", os.devnull]
    command += ["-p", "tests.spark.conftest", "-p", "no:cacheprovider", str(tmp_path / "test_inner.py")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("PYTEST_ADDOPTS", None)
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert "PASSED test_inner.py::test_starts_the_session" in done.stdout, done.stdout + done.stderr
    assert "FAILED test_inner.py::test_hangs_in_py4j" in done.stdout
    assert "PASSED test_inner.py::test_has_a_session_of_its_own" in done.stdout, done.stdout[-6000:]
