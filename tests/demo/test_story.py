"""The whole demo with Spark: every part runs, it stops cleanly, and a second start continues."""

from pathlib import Path

import pytest
from tests.demo.conftest import Run
from tests.demo.demos import Demo
from tests.planted import PlantedSecrets
from tests.waiting import eventually

from penstock.demo.processes import missing_packages

pytestmark = pytest.mark.skipif(
    bool(missing_packages()), reason="no Spark here (pip install 'penstock[spark]')"
)

#: What flows, and who reads it.
TOTALS = (
    *("orders", "orders.clean", "orders.retry", "orders.dlq", "replay", "revenue", "lake/orders"),
    *("parcels", "parcels.retry", "parcels.dlq", "reship", "shipping"),
)
READERS = ("billing", "shipping", "clean-orders", "sum-up", "archive-orders")
#: For hangs. Spark gives its Python workers ten seconds to connect. Where a core has fifteen busy processes they take
#: longer, and pipelines start again, later each time.
WITHIN_S = 900.0


def untold(demo: Demo) -> list[str]:
    """What has not happened yet."""
    counts, lags = demo.counts, demo.lags
    return [name for name in TOTALS if not counts.get(name)] + [name for name in READERS if name not in lags]


def await_story(demo: Demo) -> None:
    try:
        eventually(lambda: not untold(demo), within_s=WITHIN_S)
    except AssertionError:
        raise AssertionError(f"{untold(demo)} did not happen:\n{demo.output}") from None


def archived(table: Path) -> list[tuple[int, int]]:
    """Partition and offset of every row."""
    from deltalake import DeltaTable

    rows = DeltaTable(str(table)).to_pyarrow_table(columns=["_partition", "_offset"])
    return list(zip(rows["_partition"].to_pylist(), rows["_offset"].to_pylist(), strict=True))


@pytest.mark.timeout(2000)
def test_every_part_of_the_story_happens_and_it_stops(run: Run) -> None:
    demo = run("--rate", "100")
    await_story(demo)
    assert "Traceback" not in demo.output
    stop(demo)


@pytest.mark.slow
@pytest.mark.timeout(2000)
def test_the_pipelines_of_a_secure_demo(run: Run, tmp_path: Path) -> None:
    """They log in, and nothing that the demo writes has a secret, not even the logs and checkpoints of Spark."""
    demo = run("--secure", "--rate", "100")
    eventually(lambda: demo.counts.get("lake/orders", 0) > 0, within_s=WITHIN_S, what="archived orders")
    data = tmp_path / "data"
    planted = PlantedSecrets()
    for name in ("admin.password", "sasl.secret"):
        planted.add(name, (data / "security" / name).read_text())
    for name in ("ca.key", "node-1.pem"):
        planted.add_key(name, data / "security" / name)
    planted.check("\n".join(demo.processes().values()), "the arguments of a process")
    stop(demo)
    planted.check(demo.output, "the output of the demo")
    for path in data.iterdir():
        if path.name != "security":
            planted.check_files(path)


@pytest.mark.slow
@pytest.mark.timeout(2000)
def test_a_second_start_goes_on_with_the_lake(run: Run, tmp_path: Path) -> None:
    first = run("--rate", "100")
    eventually(lambda: first.counts.get("lake/orders", 0) > 0, within_s=WITHIN_S, what="rows")
    stop(first)
    before = archived(tmp_path / "data" / "lake" / "orders")

    second = run("--rate", "100")
    more = len(before) + 1
    eventually(lambda: second.counts.get("lake/orders", 0) > more, within_s=WITHIN_S, what="more rows")
    stop(second)
    after = archived(tmp_path / "data" / "lake" / "orders")
    assert set(before) <= set(after)
    assert len(set(after)) == len(after), "a record is archived twice"


def stop(demo: Demo) -> None:
    assert demo.stop() == 0, demo.output
    assert demo.processes() == {}, "left behind"
