"""`penstock pipeline run`: from words on the command line to a runner, and from its outcome to an exit code."""

import logging
import sys
import warnings
from collections.abc import Sequence
from dataclasses import is_dataclass, replace
from importlib.util import find_spec
from typing import Any

from penstock.cli.client import reach
from penstock.cli.failure import FAILED, WRONG_USAGE, Failure, report
from penstock.cli.options import pairs
from penstock.cli.output import print_table
from penstock.client.errors import ClientError

NEEDED = ("pyspark", "pyarrow", "numba")


def run_target(
    target: str, settings: Sequence[str], *, bootstrap: str, master: str, checkpoints: str, once: bool,
    name: str | None, restarts: int | None, take_over: bool, properties: Sequence[str], conf: Sequence[str],
) -> int:  # fmt: skip
    _need_spark()
    reach(bootstrap)
    from penstock.spark.pipelines.runner import Launch

    launch = Launch(
        bootstrap=bootstrap,
        checkpoints=checkpoints,
        connection=pairs(properties, "--property"),
        master=master,
        conf=pairs(conf, "--conf"),
        once=once,
        restarts=restarts,
        take_over=take_over,
    )
    runnable = _load(target, pairs(settings, "a setting"), name)
    return _run(runnable, launch)


def _need_spark() -> None:
    missing = [each for each in NEEDED if find_spec(each) is None]
    if missing:
        raise Failure(
            f"pipelines need Spark, and {' and '.join(missing)} is not installed",
            hint="pip install 'penstock[spark]'",
        )


def _load(target: str, settings: dict[str, str], name: str | None) -> Any:
    from penstock.spark.pipelines.loading import load

    warnings.filterwarnings("ignore", category=FutureWarning, module=r"pyspark\.")
    try:
        runnable = load(target, settings)
        if name is None:
            return runnable
        if not is_dataclass(runnable) or isinstance(runnable, type):
            raise Failure(f"{target} cannot be given another name", exit_code=WRONG_USAGE)
        return replace(runnable, name=name)
    except ClientError as error:
        raise Failure(str(error), exit_code=WRONG_USAGE) from None


def _run(runnable: Any, launch: Any) -> int:
    from penstock.cli.pipeline_screen import screen_for
    from penstock.spark.pipelines.runner import Runner
    from penstock.spark.pipelines.status import State
    from penstock.spark.pipelines.telling import RunningAlready

    screen = screen_for(runnable, launch)
    _log_to(screen.warn)
    try:
        with screen:
            outcome = Runner(runnable, launch, listener=screen.show, note=screen.note, warn=screen.warn).run()
    except RunningAlready as error:
        raise Failure(
            str(error), hint=f"penstock pipeline stop {runnable.name} ends it; --take-over goes on anyway"
        ) from None
    except ClientError as error:
        raise Failure(str(error)) from None
    if outcome.trouble is not None:
        told = outcome.trouble
        return report(
            Failure(told.message if outcome.state is State.STOPPED else f"{told.kind}: {told.message}")
        )
    return 0 if outcome.state in (State.STOPPED, State.FINISHED) else FAILED


def _log_to(warn: Any) -> None:
    """What our own code warns of in this process; Spark has a log of its own."""

    class Notes(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            warn(f"{record.levelname.lower()}: {record.getMessage()}")

    # Both tell in many lines what the outcome tells in one.
    for name in ("py4j", "DataFrameQueryContextLogger", "SQLQueryContextLogger"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    logger = logging.getLogger("penstock")
    logger.addHandler(Notes(logging.WARNING))
    logger.propagate = False


def print_built_in() -> None:
    from penstock.spark.pipelines.builtin import BUILT_IN
    from penstock.spark.pipelines.loading import LoadingError, settings_usage

    rows = []
    for name, each in BUILT_IN.items():
        try:
            usage = settings_usage(name)
        except LoadingError as error:
            usage = f"({error})"
        rows.append([name, each.help, usage])
    print_table(["name", "what it does", "settings"], rows)
    sys.stdout.flush()
