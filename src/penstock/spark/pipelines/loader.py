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
    #: `module:function` of the factory. Settings on the command line are its parameters.
    factory: str
    help: str


BUILT_IN: Final = {
    "archive": BuiltIn("penstock.spark.archive:archive", "topic -> Delta table, every record once"),
    "dedupe": BuiltIn("penstock.spark.analytics:dedupe", "topic -> topic, without duplicates"),
    "hotkeys": BuiltIn("penstock.spark.analytics:hotkeys", "the heaviest keys of a topic's partitions"),
    "metrics": BuiltIn(
        "penstock.spark.analytics:metrics", "windowed rates, sizes, lag and errors -> topic, table"
    ),
    "replay": BuiltIn(
        "penstock.spark.replay:replay", "archive, range or dead letters -> topic, every record once"
    ),
}


Runnable = Pipeline | Job
#: Kinds of parameters that can be passed by name.
_NAMED: Final = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class LoadingError(ClientError):
    """The pipeline does not exist, or cannot be loaded."""


def load(target: str, settings: Mapping[str, str]) -> Runnable:
    """Load `file.py`, `file.py:name`, `package.module:name`, or a built-in pipeline by name. Raises LoadingError."""
    if target in BUILT_IN:
        module, _, name = BUILT_IN[target].factory.partition(":")
        return _build_runnable(getattr(_import(module), name), target, settings)
    location, colon, name = target.rpartition(":") if ":" in target else (target, "", "")
    if location.endswith(".py"):
        module_found = _load_file(Path(location))
    elif colon:
        module_found = _import_here(location)
    else:
        near = difflib.get_close_matches(target, BUILT_IN, n=1)
        advice = f"did you mean {near[0]}?" if near else f"the built-in pipelines are {', '.join(BUILT_IN)}"
        raise LoadingError(
            f"{target} is neither file.py, file.py:name, package.module:name nor a built-in pipeline; {advice}"
        )
    found = _named_runnable(module_found, location, name) if name else _only_runnable(module_found, location)
    return _build_runnable(found, target, settings)


# Files and modules


def _load_file(path: Path) -> ModuleType:
    """Load a file with the import path of `python file.py`. Its functions are pickled by value for workers."""
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
    """Add a folder to the import path of this process and of workers that it will start."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    known = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([str(folder), *known]))


def _pickle_by_value(module: ModuleType) -> None:
    try:
        from pyspark import cloudpickle
    except ImportError:
        return  # without Spark there are no workers
    cloudpickle.register_pickle_by_value(module)


def _import_here(name: str) -> ModuleType:
    """Import with the current folder on the import path, as `python -m` does."""
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
    """Turn an error in the loaded code into a LoadingError that names the line."""
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


# Pipelines in a module


def _only_runnable(module: ModuleType, location: str) -> Any:
    found = _runnables(module)
    if not found:
        raise LoadingError(f"{location} declares no pipeline: decorate a function with @pipeline(...)")
    if len(found) > 1:
        raise LoadingError(f"{location} declares {', '.join(found)}: select one with {location}:NAME")
    return next(iter(found.values()))


def _named_runnable(module: ModuleType, location: str, name: str) -> Any:
    """Find a pipeline by the name of its variable, or by its own name."""
    if hasattr(module, name):
        return getattr(module, name)
    found = _runnables(module)
    if name in found:
        return found[name]
    near = difflib.get_close_matches(name, [*found, *vars(module)], n=1)
    advice = f"did you mean {near[0]}?" if near else f"it has {', '.join(found) or 'no pipelines'}"
    raise LoadingError(f"{location} has no {name}; {advice}")


def _runnables(module: ModuleType) -> dict[str, Runnable]:
    """Return all pipelines and jobs by their own names. One may be in several variables."""
    return {each.name: each for each in vars(module).values() if _is_runnable(each)}


def _is_runnable(found: object) -> bool:
    return isinstance(found, Pipeline) or (isinstance(found, Job) and not inspect.isclass(found))


# Settings


def _build_runnable(found: Any, target: str, settings: Mapping[str, str]) -> Runnable:
    """Return the pipeline, or call the factory with the settings."""
    if _is_runnable(found):
        if settings:
            raise LoadingError(f"{target} takes no settings, and {min(settings)} is given")
        made: Runnable = found
        return made
    if not callable(found):
        raise LoadingError(f"{target} is not a pipeline but a {type(found).__name__}")
    made = found(**_arguments(found, target, settings))
    if not _is_runnable(made):
        raise LoadingError(f"{target} does not return a pipeline but a {type(made).__name__}")
    return made


def _arguments(factory: Callable[..., Any], target: str, settings: Mapping[str, str]) -> dict[str, str]:
    """Return the arguments of the factory. Raises LoadingError for missing and unknown settings."""
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
    """Return the settings of a built-in pipeline. Raises LoadingError."""
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
    """The parameter `from_` is the setting `from`, which is a keyword of Python."""
    return name.removesuffix("_")
