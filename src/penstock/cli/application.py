"""`penstock app run`: applications by their import path, with a restart whenever their files change."""

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
from penstock.cli import lifeline
from penstock.cli.failure import FAILED, WRONG_USAGE, Failure
from penstock.cli.output import note
from penstock.client.signals import SignalEvent, ended_by_signals

LOOK_S = 0.3
#: A child that does not end by itself after a change is waited for so long.
END_S = 60.0
_NOT_WATCHED = {".git", ".venv", "venv", "node_modules", "__pycache__", ".mypy_cache", ".ruff_cache"}
_OURS = str(Path(penstock.__file__).parent) + os.sep
_LEVELS = ("debug", "info", "warning", "error")

app = typer.Typer(help="Run applications of penstock.client.", no_args_is_help=True)


@app.callback()
def _verbs() -> None:
    """Keeps `run` a verb of its own, though it is the only one."""


@app.command("run")
def run(
    targets: Annotated[
        list[str],
        typer.Argument(
            metavar="MODULE:APP...",
            help="package.module:app, file.py:app, or without :app where there is only one. A function that takes "
            "nothing and returns an application will do, too.",
        ),
    ],
    reload: Annotated[
        bool,
        typer.Option(
            "--reload", help="Restart gracefully when a .py file below --app-dir, or beside file.py, changes."
        ),
    ] = False,
    app_dir: Annotated[
        Path, typer.Option("--app-dir", help="Where modules are looked for first.", metavar="DIR")
    ] = Path(),
    log_level: Annotated[
        str, typer.Option("--log-level", help=f"{', '.join(_LEVELS)}.", metavar="LEVEL")
    ] = "info",
    stop_with_stdin: Annotated[bool, typer.Option("--stop-with-stdin", hidden=True)] = False,
) -> None:
    """Run applications until SIGTERM or Ctrl-C: what is in hand is finished and committed."""
    if log_level.lower() not in _LEVELS:
        raise Failure(f"--log-level {log_level} is none of {', '.join(_LEVELS)}", exit_code=WRONG_USAGE)
    if not app_dir.is_dir():
        raise Failure(f"--app-dir {app_dir} is no folder", exit_code=WRONG_USAGE)
    if reload:
        words = [*targets, "--app-dir", str(app_dir), "--log-level", log_level]
        raise typer.Exit(_reloading(words, _watched(targets, app_dir)))
    logging.basicConfig(
        level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stderr
    )
    if stop_with_stdin:
        lifeline.stop_with_stdin()
    sys.path.insert(0, str(app_dir.resolve()))
    _run_all([load(target) for target in targets])


# Finding applications


def load(target: str) -> Any:
    """Raises Failure, in a sentence about what is wrong with the target."""
    from penstock.client import Penstock
    from penstock.client.app.penstock import is_run_elsewhere

    place, _, name = target.partition(":")
    before = is_run_elsewhere.set(True)
    try:
        module = _module(place, target)
    finally:
        is_run_elsewhere.reset(before)
    found = _named(module, name, target) if name else _only(module, target)
    if isinstance(found, type) or not callable(found):
        made = found
    else:
        made = _told(found, f"{target} cannot be called without arguments")
    if not isinstance(made, Penstock):
        raise Failure(
            f"{target} is no application but {type(made).__name__}",
            hint="name a Penstock(...), or a function that returns one",
            exit_code=WRONG_USAGE,
        )
    return made


def _module(place: str, target: str) -> ModuleType:
    if not place:
        raise Failure(f"{target!r} names no module: say module:app", exit_code=WRONG_USAGE)
    if place.endswith(".py"):
        return _of_file(Path(place))
    try:
        is_there = importlib.util.find_spec(place) is not None
    except (ImportError, ValueError):
        is_there = False
    if not is_there:
        hint = "modules are looked for in the current folder (--app-dir) and where Python finds others"
        raise Failure(f"there is no module {place}", hint=hint, exit_code=WRONG_USAGE)
    imported: ModuleType = _told(lambda: importlib.import_module(place), f"{place} cannot be imported")
    return imported


def _of_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path) if path.is_file() else None
    if spec is None or spec.loader is None:
        raise Failure(f"there is no file {path}", exit_code=WRONG_USAGE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.parent.resolve()))
    loader = spec.loader
    _told(lambda: loader.exec_module(module), f"{path} cannot be imported")
    return module


def _told(call: Callable[[], Any], what: str) -> Any:
    """What goes wrong in the user's code is said with the line that it comes from."""
    try:
        return call()
    except Failure:
        raise
    except SyntaxError as error:
        raise Failure(f"{what}: {error.msg} ({error.filename}:{error.lineno})") from None
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        # What we refuse is said with the line that asked for it, not with ours.
        theirs = [each for each in frames if not each.filename.startswith(_OURS)]
        last = (theirs or frames)[-1]
        raise Failure(f"{what}: {type(error).__name__}: {error} ({last.filename}:{last.lineno})") from None


def _named(module: ModuleType, name: str, target: str) -> Any:
    found: Any = module
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            there = _applications(module)
            hint = f"{module.__name__} has {', '.join(there)}" if there else None
            raise Failure(
                f"{target}: {module.__name__} has no {name}", hint=hint, exit_code=WRONG_USAGE
            ) from None
    return found


def _only(module: ModuleType, target: str) -> Any:
    there = _applications(module)
    if len(there) != 1:
        words = f"has several: {', '.join(there)}" if there else "has none"
        raise Failure(
            f"{target} names no application, and {module.__name__} {words}",
            hint=f"say {target}:{there[0] if there else 'app'}",
            exit_code=WRONG_USAGE,
        )
    return getattr(module, there[0])


def _applications(module: ModuleType) -> list[str]:
    from penstock.client import Penstock

    return [name for name, value in vars(module).items() if isinstance(value, Penstock)]


# Running them


def _run_all(apps: Sequence[Any]) -> None:
    stop = SignalEvent()
    with ended_by_signals(stop.set):
        errors: list[BaseException] = []
        try:
            for each in apps:
                each.start()
                note(
                    "; ".join(
                        f"{sub.name}: {', '.join(sub.topics)} for {sub.group}" for sub in each.subscriptions
                    )
                )
            while not stop.wait(LOOK_S) and all(each.is_running for each in apps):
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
        raise Failure(f"{errors[0]}", exit_code=FAILED)


# Restarting them


def _watched(targets: Sequence[str], app_dir: Path) -> list[Path]:
    """The folder of modules, and those of files that lie elsewhere."""
    files = [
        Path(place) for place in (target.partition(":")[0] for target in targets) if place.endswith(".py")
    ]
    inside = app_dir.resolve()
    return [app_dir, *{file.parent for file in files if not file.resolve().is_relative_to(inside)}]


def _reloading(words: Sequence[str], folders: Sequence[Path]) -> int:
    """Until a signal. One that has ended by itself, for example by a mistake in its file, waits for a change."""
    stop = SignalEvent()
    with ended_by_signals(stop.set):
        while True:
            before = _files(folders)
            # A session of its own: Ctrl-C of the terminal comes here, and goes on from here. The pipe ends it with this
            # process, whatever ends that: a terminal that is closed would leave it running.
            command = [sys.executable, "-m", "penstock", "app", "run", *words, "--stop-with-stdin"]
            with subprocess.Popen(command, start_new_session=True, stdin=subprocess.PIPE) as child:
                changed = _await_change(folders, before, child, stop)
                code = _end(child)
            if changed is None:
                return max(code, 0)
            note(f"{changed} has changed: restarting")


def _await_change(
    folders: Sequence[Path], before: dict[Path, float], child: subprocess.Popen[bytes], stop: threading.Event
) -> Path | None:
    """The file that has changed; None when it is time to end."""
    has_ended = False
    while not stop.wait(LOOK_S):
        if not has_ended and child.poll() is not None:
            has_ended = True
            note(f"the application has ended with code {child.returncode}: waiting for a change")
        now = _files(folders)
        if now != before:
            return min(path for path in {*now, *before} if now.get(path) != before.get(path))
    return None


def _files(watched: Sequence[Path]) -> dict[Path, float]:
    found: dict[Path, float] = {}
    for place, folders, names in chain.from_iterable(os.walk(folder) for folder in watched):
        folders[:] = [name for name in folders if name not in _NOT_WATCHED]
        for name in names:
            if name.endswith(".py"):
                path = Path(place, name)
                try:
                    found[path] = path.stat().st_mtime
                except FileNotFoundError:
                    continue  # gone meanwhile
    return found


def _end(child: subprocess.Popen[bytes]) -> int:
    if child.poll() is None:
        child.send_signal(signal.SIGTERM)
    deadline_s = time.monotonic() + END_S
    while child.poll() is None and time.monotonic() < deadline_s:
        time.sleep(LOOK_S / 3)
    if child.poll() is None:
        note("the application does not end, and is killed")
        child.kill()
    return child.wait()
