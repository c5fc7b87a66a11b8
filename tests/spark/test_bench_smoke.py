"""The Spark benchmarks run, and all participants read and write the same rows."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks.brokers.kafka import PeerUnavailable
from benchmarks.spark.connector import fetch_connector

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def has_connector() -> bool:
    import pyspark

    try:
        fetch_connector(pyspark.__version__, "2.13")
    except PeerUnavailable:
        return False
    return True


@pytest.mark.slow
def test_a_smoke_run_has_figures_of_all_participants(tmp_path: Path, has_connector: bool) -> None:
    pytest.importorskip("matplotlib")
    command = [sys.executable, "-m", "benchmarks.spark", "--smoke", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (document,) = (json.loads(path.read_text()) for path in tmp_path.glob("*.json"))
    assert [path.stat().st_size > 0 for path in tmp_path.glob("*.png")] == [True]
    figures: dict[str, Any] = {each["name"]: each["median"] for each in document["results"]}
    peer = {"connector"} if has_connector else set()
    assert set(figures["read-100B-none"]) == {"penstock", "penstock-narrow", "parquet"} | peer
    assert set(figures["write-100B-none"]) == {"penstock", "penstock-exactly-once", "nowhere"} | peer
    assert set(figures["batches-to-nowhere"]) == {"penstock"} | peer
    costs = [
        who["cpu_s_per_million"]
        for name in ("read-100B-none", "write-100B-none")
        for who in figures[name].values()
    ]
    assert min(costs) > 0
