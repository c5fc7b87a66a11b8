"""Loads the pipeline or job that a user names on the command line: from a file or a module, or a built-in one."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NamedTuple

from penstock.client.errors import ClientError
from penstock.spark.pipelines.declaration import Job, Pipeline


class BuiltIn(NamedTuple):
    #: `module:function` of what makes it. Settings are its parameters.
    factory: str
    help: str


BUILT_IN: Final = {
    "archive": BuiltIn("penstock.spark.archive:archive", "topic -> Delta table, every record once"),
    "dedupe": BuiltIn("penstock.spark.analytics:dedupe", "topic -> topic, less what comes again"),
    "hotkeys": BuiltIn("penstock.spark.analytics:hotkeys", "the heaviest keys of a topic's partitions"),
    "metrics": BuiltIn(
        "penstock.spark.analytics:metrics", "windowed rates, sizes, lag and errors -> topic, table"
    ),
    "replay": BuiltIn(
        "penstock.spark.replay:replay", "archive, range or dead letters -> topic, every record once"
    ),
}


Runnable = Pipeline | Job
#: What of Python's parameters is a setting by name.
_NAMED: Final = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class LoadingError(ClientError):
    """What is named is not there, or is no pipeline."""


def load(target: str, settings: Mapping[str, str]) -> Runnable:
    """`file.py`, `file.py:name`, `package.module:name`, or the name of a built-in one. Raises LoadingError."""
    if target in BUILT_IN:
        module, _, name = BUILT_IN[target].factory.partition(":")
        return _build_runnable(getattr(_import(module), name), target, settings)
    place, colon, name = target.rpartition(":") if ":" in target else (target, "", "")
    if place.endswith(".py"):
        module_found = _load_file(Path(place))
    elif colon:
        module_found = _import_here(place)
    else:
        raise LoadingError(_unknown_target(target))
    found = _named_runnable(module_found, place, name) if name else _only_runnable(module_found, place)
    return _build_runnable(found, target, settings)


def _unknown_target(target: str) -> str:
    near = difflib.get_close_matches(target, BUILT_IN, n=1)
    advice = f"did you mean {near[0]}?" if near else f"built in are {', '.join(BUILT_IN)}"
    return f"{target} is neither file.py, file.py:name, package.module:name nor built in; {advice}"


# Files and modules


def _load_file(path: Path) -> ModuleType:
    """As `python file.py` would find what it imports; its functions travel to workers by value."""
    if not path.is_file():
        raise LoadingError(f"there is no file {path}")
    _add_import_path(path.resolve().parent)
    name = path.stem if path.stem not in sys.modules else f"{path.stem}_pipelines"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with _errors_with_line(str(path)):
            spec.loader.exec_module(module)
    except (ClientError, ModuleNotFoundError) as error:
        del sys.modules[name]
        raise (error if isinstance(error, ClientError) else LoadingError(f"{path}: {error}")) from None
    _pickle_by_value(module)
    return module


def _add_import_path(folder: Path) -> None:
    """Here and in workers that this process will start."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    known = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([str(folder), *known]))


def _pickle_by_value(module: ModuleType) -> None:
    try:
        from pyspark import cloudpickle
    except ImportError:
        return  # nothing travels without Spark
    cloudpickle.register_pickle_by_value(module)


def _import_here(name: str) -> ModuleType:
    """With the folder that we are in, as `python -m` does it."""
    here = Path.cwd()
    _add_import_path(here)
    module = _import(name)
    if module.__file__ is not None and Path(module.__file__).is_relative_to(here):
        _pickle_by_value(module)
    return module


def _import(name: str) -> ModuleType:
    try:
        with _errors_with_line(name):
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise LoadingError(f"there is no module {name}") from None
        raise LoadingError(f"{name}: {error}") from None


@contextmanager
def _errors_with_line(what: str) -> Iterator[None]:
    """An error in what is loaded, in one sentence with the line that it comes from."""
    try:
        yield
    except (ModuleNotFoundError, ClientError):
        raise
    except SyntaxError as error:
        raise LoadingError(f"{what}, line {error.lineno}: {error.msg}") from None
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        line = next((each.lineno for each in reversed(frames) if each.filename.endswith(what)), None)
        where = what if line is None else f"{what}, line {line}"
        raise LoadingError(f"{where}: {type(error).__name__}: {error}") from None


# What is in them


def _only_runnable(module: ModuleType, place: str) -> Any:
    found = _runnables(module)
    if not found:
        raise LoadingError(f"{place} declares no pipeline: put @pipeline(...) over a function")
    if len(found) > 1:
        raise LoadingError(f"{place} declares {', '.join(found)}: say which one, as {place}:NAME")
    return next(iter(found.values()))


def _named_runnable(module: ModuleType, place: str, name: str) -> Any:
    """By the name of the variable, or by its own."""
    if hasattr(module, name):
        return getattr(module, name)
    found = _runnables(module)
    if name in found:
        return found[name]
    near = difflib.get_close_matches(name, [*found, *vars(module)], n=1)
    advice = f"did you mean {near[0]}?" if near else f"it has {', '.join(found) or 'no pipelines'}"
    raise LoadingError(f"{place} has no {name}; {advice}")


def _runnables(module: ModuleType) -> dict[str, Runnable]:
    """By their own names, each once however many variables it has."""
    return {each.name: each for each in vars(module).values() if _is_runnable(each)}


def _is_runnable(found: object) -> bool:
    return isinstance(found, Pipeline) or (isinstance(found, Job) and not inspect.isclass(found))


# Settings


def _build_runnable(found: Any, target: str, settings: Mapping[str, str]) -> Runnable:
    """The thing itself, or what a function makes of the settings."""
    if _is_runnable(found):
        if settings:
            raise LoadingError(
                f"{target} is declared as it is, and takes no settings such as {min(settings)}"
            )
        made: Runnable = found
        return made
    if not callable(found):
        raise LoadingError(f"{target} is no pipeline but a {type(found).__name__}")
    made = found(**_arguments(found, target, settings))
    if not _is_runnable(made):
        raise LoadingError(f"{target} makes no pipeline but a {type(made).__name__}")
    return made


def _arguments(factory: Callable[..., Any], target: str, settings: Mapping[str, str]) -> dict[str, str]:
    """Raises LoadingError for settings that are missing or unknown, with all that there are."""
    parameters = inspect.signature(factory).parameters.values()
    known = {_setting_name(each.name): each for each in parameters if each.kind in _NAMED}
    given = {name.replace("-", "_"): value for name, value in settings.items()}
    unknown = sorted(given.keys() - known.keys())
    missing = [name for name, each in known.items() if each.default is each.empty and name not in given]
    if unknown or missing:
        flaws = [*(f"has no setting {name}" for name in unknown), *(f"needs {name}=..." for name in missing)]
        raise LoadingError(f"{target} {' and '.join(flaws)}; it takes {usage(known.values())}")
    return {known[name].name: value for name, value in given.items()}


def settings_usage(name: str) -> str:
    """What a built-in one takes. Raises LoadingError."""
    module, _, function = BUILT_IN[name].factory.partition(":")
    parameters = inspect.signature(getattr(_import(module), function)).parameters.values()
    return usage(each for each in parameters if each.kind in _NAMED)


def usage(parameters: Iterable[inspect.Parameter]) -> str:
    return " ".join(_usage(each) for each in parameters) or "no settings"


def _usage(parameter: inspect.Parameter) -> str:
    name = _setting_name(parameter.name)
    if parameter.default is parameter.empty:
        return f"{name}=..."
    return f"[{name}={'...' if parameter.default is None else parameter.default}]"


def _setting_name(name: str) -> str:
    """`from_` stands for `from`, which Python keeps for itself."""
    return name.removesuffix("_")
