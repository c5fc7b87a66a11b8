"""`penstock app run`: run applications by their import path, and restart them when their files change."""

import importlib
import importlib.util
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer

import penstock
from penstock.cli import os_process
from penstock.cli.errors import EXIT_FAILURE, EXIT_USAGE, CommandError
from penstock.cli.output import note
from penstock.client.signals import SignalEvent, stop_on_signals

POLL_S = 0.3
#: How long to wait for a child to stop after a change, before it is killed.
STOP_TIMEOUT_S = 60.0
_IGNORED_DIRECTORIES = {".git", ".venv", "venv", "node_modules", "__pycache__", ".mypy_cache", ".ruff_cache"}
_PENSTOCK_DIRECTORY = str(Path(penstock.__file__).parent) + os.sep
_LOG_LEVELS = ("debug", "info", "warning", "error")

app = typer.Typer(help="Run applications of penstock.client.", no_args_is_help=True)


@app.callback()
def _app_options() -> None:
    """Makes typer keep `run` as a subcommand, although it is the only one."""


@app.command("run")
def run(
    targets: Annotated[
        list[str],
        typer.Argument(
            metavar="MODULE:APP",
            help="package.module:app or file.py:app; :app is optional if the module has one application. A function "
            "without arguments that returns an application works, too.",
        ),
    ],
    reload: Annotated[
        bool,
        typer.Option(
            "--reload",
            help="Restart gracefully when a .py file below --app-dir, or next to file.py, changes.",
        ),
    ] = False,
    app_dir: Annotated[
        Path, typer.Option("--app-dir", help="The directory to search first for modules.", metavar="DIR")
    ] = Path(),
    log_level: Annotated[
        str, typer.Option("--log-level", help=f"{', '.join(_LOG_LEVELS)}.", metavar="LEVEL")
    ] = "info",
    stop_with_stdin: Annotated[bool, typer.Option("--stop-with-stdin", hidden=True)] = False,
) -> None:
    """Run applications until SIGTERM or Ctrl-C. Records being processed are finished and committed first."""
    if log_level.lower() not in _LOG_LEVELS:
        raise CommandError(
            f"--log-level takes {', '.join(_LOG_LEVELS)}, not {log_level!r}", exit_code=EXIT_USAGE
        )
    if not app_dir.is_dir():
        raise CommandError(f"--app-dir {app_dir} is not a directory", exit_code=EXIT_USAGE)
    if reload:
        words = [*targets, "--app-dir", str(app_dir), "--log-level", log_level]
        raise typer.Exit(_run_with_reload(words, _watched_directories(targets, app_dir)))
    logging.basicConfig(
        level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stderr
    )
    if stop_with_stdin:
        os_process.stop_with_stdin()
    sys.path.insert(0, str(app_dir.resolve()))
    _run_applications([load_application(target) for target in targets])


# Finding applications


def load_application(target: str) -> Any:
    """Raises CommandError that says what is wrong with the target."""
    from penstock.client import Penstock
    from penstock.client.app.application import is_imported_to_run

    place, _, name = target.partition(":")
    before = is_imported_to_run.set(True)
    try:
        module = _import_target(place, target)
    finally:
        is_imported_to_run.reset(before)
    found = _named_object(module, name, target) if name else _single_application(module, target)
    if isinstance(found, type) or not callable(found):
        made = found
    else:
        made = _run_user_code(found, f"{target} cannot be called without arguments")
    if not isinstance(made, Penstock):
        raise CommandError(
            f"{target} is not an application but {type(made).__name__}",
            hint="name a Penstock(...), or a function that returns one",
            exit_code=EXIT_USAGE,
        )
    return made


def _import_target(place: str, target: str) -> ModuleType:
    if not place:
        raise CommandError(f"{target!r} names no module", hint="write module:app", exit_code=EXIT_USAGE)
    if place.endswith(".py"):
        return _import_file(Path(place))
    try:
        is_there = importlib.util.find_spec(place) is not None
    except (ImportError, ValueError):
        is_there = False
    if not is_there:
        hint = "modules are searched for in --app-dir (by default the current directory) and in Python's path"
        raise CommandError(f"module {place} does not exist", hint=hint, exit_code=EXIT_USAGE)
    imported: ModuleType = _run_user_code(
        lambda: importlib.import_module(place), f"{place} cannot be imported"
    )
    return imported


def _import_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path) if path.is_file() else None
    if spec is None or spec.loader is None:
        raise CommandError(f"file {path} does not exist", exit_code=EXIT_USAGE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.parent.resolve()))
    loader = spec.loader
    _run_user_code(lambda: loader.exec_module(module), f"{path} cannot be imported")
    return module


def _run_user_code(call: Callable[[], Any], what: str) -> Any:
    """Calls the user's code; an error names the line of that code which caused it."""
    try:
        return call()
    except CommandError:
        raise
    except SyntaxError as error:
        raise CommandError(f"{what}: {error.msg} ({error.filename}:{error.lineno})") from None
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        # Where penstock itself raised the error, name the user's line that called it, not ours.
        theirs = [each for each in frames if not each.filename.startswith(_PENSTOCK_DIRECTORY)]
        last = (theirs or frames)[-1]
        raise CommandError(
            f"{what}: {type(error).__name__}: {error} ({last.filename}:{last.lineno})"
        ) from None


def _named_object(module: ModuleType, name: str, target: str) -> Any:
    found: Any = module
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            there = _application_names(module)
            hint = f"{module.__name__} has {', '.join(there)}" if there else None
            raise CommandError(
                f"{target}: {module.__name__} has no {name}", hint=hint, exit_code=EXIT_USAGE
            ) from None
    return found


def _single_application(module: ModuleType, target: str) -> Any:
    there = _application_names(module)
    if len(there) != 1:
        words = f"has several: {', '.join(there)}" if there else "has none"
        raise CommandError(
            f"{target} names no application, and {module.__name__} {words}",
            hint=f"write {target}:{there[0] if there else 'app'}",
            exit_code=EXIT_USAGE,
        )
    return getattr(module, there[0])


def _application_names(module: ModuleType) -> list[str]:
    from penstock.client import Penstock

    return [name for name, value in vars(module).items() if isinstance(value, Penstock)]


# Running applications


def _run_applications(apps: Sequence[Any]) -> None:
    stop = SignalEvent()
    with stop_on_signals(stop.set):
        errors: list[BaseException] = []
        try:
            for each in apps:
                each.start()
                note(
                    "; ".join(
                        f"{sub.name}: {', '.join(sub.topics)} for {sub.group}" for sub in each.subscriptions
                    )
                )
            while not stop.wait(POLL_S) and all(each.is_running for each in apps):
                pass
        except Exception as error:
            errors.append(error)
        for each in apps:
            each.stop()
        for each in apps:
            try:
                each.close()
            except BaseException as error:
                errors.append(error)
    if errors:
        if not isinstance(errors[0], Exception):
            raise errors[0]
        raise CommandError(f"{errors[0]}", exit_code=EXIT_FAILURE)


# Restarting applications


def _watched_directories(targets: Sequence[str], app_dir: Path) -> list[Path]:
    """The directory of modules, and the directories of target files outside it."""
    files = [
        Path(place) for place in (target.partition(":")[0] for target in targets) if place.endswith(".py")
    ]
    inside = app_dir.resolve()
    return [app_dir, *{file.parent for file in files if not file.resolve().is_relative_to(inside)}]


def _run_with_reload(words: Sequence[str], folders: Sequence[Path]) -> int:
    """Runs until a signal. After a child ends by itself, for example because of an error, waits for a change."""
    stop = SignalEvent()
    with stop_on_signals(stop.set):
        while True:
            before = _modification_times(folders)
            # The child gets its own session, so that Ctrl-C in the terminal reaches only this process, which then stops
            # the child. The pipe stops the child when this process dies for any reason, such as a closed terminal.
            command = [sys.executable, "-m", "penstock", "app", "run", *words, "--stop-with-stdin"]
            with subprocess.Popen(command, start_new_session=True, stdin=subprocess.PIPE) as child:
                changed = _wait_for_change(folders, before, child, stop)
                code = _stop_child(child)
            if changed is None:
                return max(code, 0)
            note(f"{changed} has changed, restarting")


def _wait_for_change(
    folders: Sequence[Path], before: dict[Path, float], child: subprocess.Popen[bytes], stop: threading.Event
) -> Path | None:
    """The file that has changed; None after a signal to stop."""
    has_ended = False
    while not stop.wait(POLL_S):
        if not has_ended and child.poll() is not None:
            has_ended = True
            note(f"the application has ended with exit code {child.returncode}, waiting for a change")
        now = _modification_times(folders)
        if now != before:
            return min(path for path in {*now, *before} if now.get(path) != before.get(path))
    return None


def _modification_times(watched: Sequence[Path]) -> dict[Path, float]:
    found: dict[Path, float] = {}
    for place, folders, names in chain.from_iterable(os.walk(folder) for folder in watched):
        folders[:] = [name for name in folders if name not in _IGNORED_DIRECTORIES]
        for name in names:
            if name.endswith(".py"):
                path = Path(place, name)
                try:
                    found[path] = path.stat().st_mtime
                except FileNotFoundError:
                    continue  # gone meanwhile
    return found


def _stop_child(child: subprocess.Popen[bytes]) -> int:
    if child.poll() is None:
        child.send_signal(signal.SIGTERM)
    deadline_s = time.monotonic() + STOP_TIMEOUT_S
    while child.poll() is None and time.monotonic() < deadline_s:
        time.sleep(POLL_S / 3)
    if child.poll() is None:
        note(f"the application has not stopped within {STOP_TIMEOUT_S:g} s, killing it")
        child.kill()
    return child.wait()
