"""The runner on a shared session: bounded runs, permanent failures, jobs."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from tests.spark.source.topics import Topics

from penstock.client.errors import Unavailable
from penstock.client.wire.cluster import Cluster
from penstock.protocol.backoff import ExponentialBackoff
from penstock.spark.internal_topics import DocumentStore
from penstock.spark.pipelines import runner
from penstock.spark.pipelines.checkpoints import CheckpointMoved
from penstock.spark.pipelines.declaration import BatchError, JobContext, Pipeline, Source, pipeline
from penstock.spark.pipelines.runner import LaunchSettings, Runner, RunOutcome
from penstock.spark.pipelines.status import PipelineState, PipelineStatus, RunProgress, read_statuses


@pytest.fixture
def topics(broker: Any) -> Topics:
    return Topics(broker.bootstrap_servers)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "RESTART_BACKOFF", ExponentialBackoff(base_ms=50, cap_ms=100))


@dataclass
class Sink:
    """Counts its rows, and fails as often as requested."""

    failures: list[Exception] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)

    def prepare(self, spark: Any, run: Any) -> None:
        pass

    def describe(self) -> str:
        return "a list"

    def write(self, rows: Any, batch: Any) -> None:
        if self.failures:
            raise self.failures.pop(0)
        self.counts.append(rows.count())


class World:
    """Runs pipelines once, and records what was shown."""

    def __init__(self, spark: Any, topics: Topics, checkpoints: Path) -> None:
        self._spark = spark
        self._topics = topics
        self.launch = LaunchSettings(bootstrap=topics.bootstrap, checkpoints=str(checkpoints), once=True)
        self.shown: list[PipelineStatus] = []
        self.notes: list[str] = []

    def run(self, runnable: Any, **launch: Any) -> RunOutcome:
        self.shown, self.notes = [], []
        made = Runner(
            runnable,
            replace(self.launch, **launch),
            listener=self.shown.append,
            note=self.notes.append,
            spark=self._spark,
        )
        return made.run()

    def on_board(self, name: str) -> PipelineStatus:
        with Cluster(self._topics.options(subscribe="unused").connection) as cluster:
            return read_statuses(DocumentStore(cluster))[name]

    def extents(self) -> list[RunProgress]:
        found = [each.extent for each in self.shown if each.extent is not None]
        return list(dict.fromkeys(found))


@pytest.fixture
def world(spark: Any, topics: Topics, tmp_path: Path) -> World:
    return World(spark, topics, tmp_path)


def declared(name: str, source: str, sink: Any, **options: str) -> Pipeline:
    return pipeline(name, source=Source(topics=(source,), options=options), sink=sink)(lambda rows: rows)


def test_a_bounded_run_shows_its_progress_and_ends(
    world: World, topics: Topics, unique: Callable[[str], str], tmp_path: Path
) -> None:
    name, source, sink = unique("p"), topics.create(unique("source")), Sink()
    topics.count(source, range(30))
    made = declared(name, source, sink, maxOffsetsPerTrigger="20")
    assert world.run(made) == RunOutcome(state=PipelineState.FINISHED)
    assert sink.counts == [20, 10]
    seen = world.extents()
    assert (seen[0], seen[-1]) == (RunProgress(done=0, total=30), RunProgress(done=30, total=30))
    # A batch that ends between two looks is not shown on its own.
    assert set(seen[1:-1]) <= {RunProgress(done=20, total=30)}
    last = world.on_board(name)
    assert (last.state, last.lag, last.batch, last.rows.rows_in) == (PipelineState.FINISHED, 0, 1, 30)

    # Records are not read again, and a checkpoint in another folder is refused.
    topics.count(source, range(5))
    with pytest.raises(CheckpointMoved, match=r"it would start over"):
        world.run(made, checkpoints=str(tmp_path / "elsewhere"))
    assert world.run(made).state is PipelineState.FINISHED
    assert sink.counts == [20, 10, 5]
    assert world.extents()[-1] == RunProgress(done=5, total=5)


def test_temporary_failures_are_retried_and_permanent_ones_are_not(
    world: World, topics: Topics, unique: Callable[[str], str]
) -> None:
    name, source = unique("p"), topics.create(unique("source"))
    topics.count(source, range(3))
    sink = Sink(failures=[BatchError("a bad day"), Unavailable("no broker answers")])
    assert world.run(declared(name, source, sink)).state is PipelineState.FINISHED
    assert sink.counts == [3]
    shown = [
        each.error.message for each in world.shown if each.state is PipelineState.RESTARTING and each.error
    ]
    assert list(dict.fromkeys(shown)) == ["a bad day", "no broker answers"]
    assert any("BatchError: a bad day; restart in" in each for each in world.notes)
    assert (world.on_board(name).restarts, world.on_board(name).error) == (2, None)

    sink.failures = [BatchError("a bad day")] * 9
    topics.count(source, range(1))
    outcome = world.run(declared(name, source, sink), restarts=1)
    assert (outcome.state, len(sink.failures)) == (PipelineState.FAILED, 7)
    assert outcome.trouble is not None
    assert outcome.trouble.message == "a bad day"
    assert world.on_board(name).state is PipelineState.FAILED

    wrong = pipeline(unique("wrong"), source=source, sink=unique("x"))(lambda rows: rows.select("no_such"))
    outcome = world.run(wrong)
    assert outcome.state is PipelineState.FAILED
    assert outcome.trouble is not None
    assert outcome.trouble.kind == "PipelineError"
    assert "no_such" in outcome.trouble.message
    assert all(each.state is not PipelineState.RESTARTING for each in world.shown)


@dataclass
class Counting:
    name: str
    #: Request a stop after this many steps.
    stops_at: int | None = None
    runner: Any = None

    def run(self, context: JobContext) -> None:
        assert context.spark is not None
        for done in range(1, 4):
            context.progress(done, 3)
            if done == self.stops_at:
                self.runner.stop("enough")
            if context.should_stop():
                return
        context.note("all counted")


def test_a_job_shows_its_progress_and_stops_on_request(world: World, unique: Callable[[str], str]) -> None:
    job = Counting(unique("job"))
    assert world.run(job) == RunOutcome(state=PipelineState.FINISHED)
    assert world.notes == ["all counted"]
    assert world.extents()[-1] == RunProgress(done=3, total=3)
    assert world.on_board(job.name).extent == RunProgress(done=3, total=3)

    job.stops_at = 2
    job.runner = Runner(
        job, world.launch, listener=world.shown.append, note=world.notes.append, spark=object()
    )
    assert job.runner.run() == RunOutcome(state=PipelineState.STOPPED)
    assert world.on_board(job.name).extent == RunProgress(done=2, total=3)
