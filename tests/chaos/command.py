"""The command line of a campaign: options from its plan, a seed, a folder kept on failure, a table, a JSON line."""

import argparse
import dataclasses
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

Say = Callable[[str], None]
T = TypeVar("T")


def silent(words: str) -> None:
    """For campaigns that tests run."""


def option(default: T, meaning: str, *, flag: str = "", **how: Any) -> T:
    """A field of a plan that the command line sets with `--field-name`. `how` goes to `ArgumentParser.add_argument`."""
    metadata = {"flag": flag, "how": {"help": f"{meaning} (default: %(default)s)", **how}}
    made: T = field(default=default, metadata=metadata)
    return made


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much of what a campaign does. Subclasses add fields, those with `option` also to the command line."""

    seed: int = 0


class _AddSetting(argparse.Action):
    def __call__(self, parser: Any, given: Any, text: Any, flag: Any = None) -> None:
        name, _, value = text.partition("=")
        setattr(given, self.dest, {**getattr(given, self.dest), name: value})


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPlan(Plan):
    nodes: int = option(3, "nodes of the cluster")
    settings: Mapping[str, str] = field(
        default_factory=dict,
        metadata={
            "flag": "set",
            "how": {"action": _AddSetting, "metavar": "NAME=VALUE", "help": "a setting of the nodes"},
        },
    )


class Result(Protocol):
    @property
    def is_clean(self) -> bool: ...
    def print_table(self) -> None: ...
    def as_document(self) -> dict[str, Any]: ...


class Campaign(Protocol):
    def run(self) -> Result: ...


P = TypeVar("P", bound=Plan)


def parser(plan: type[Plan], words: str | None, program: str) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog=program, description=words, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for each in dataclasses.fields(plan):
        if "how" not in each.metadata:
            continue
        name = each.metadata["flag"] or each.name.replace("_", "-")
        default = {} if each.default is dataclasses.MISSING else each.default
        how: dict[str, Any] = {"dest": each.name, "default": default, **each.metadata["how"]}
        if "action" not in how and isinstance(default, int):
            how.setdefault("type", int)
        made.add_argument(f"--{name}", **how)
    made.add_argument("--seed", type=int, default=None, help="choices repeat with it; timing does not")
    made.add_argument("--folder", type=Path, default=None, help="where data, logs and history go, and stay")
    made.add_argument("--quiet", action="store_true", help="do not print each fault")
    return made


def run_command(
    arguments: Sequence[str],
    plan: type[P],
    campaign: Callable[[Path, P, Say], Campaign],
    words: str | None,
    program: str = "python -m tests.chaos",
) -> int:
    """Run a campaign as the arguments say; returns the exit code of the command."""
    given = vars(parser(plan, words, program).parse_args(arguments))
    seed, kept, is_quiet = given.pop("seed"), given.pop("folder"), given.pop("quiet")
    seed = random.SystemRandom().randrange(1 << 32) if seed is None else seed
    folder = kept or Path(tempfile.mkdtemp(prefix="penstock-chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        print(f"{folder} is not empty", file=sys.stderr)
        return 2
    print(f"seed {seed}, folder {folder}", flush=True)
    result = campaign(folder, plan(**given, seed=seed), silent if is_quiet else _timed_printer()).run()
    result.print_table()
    print(json.dumps(result.as_document()))
    if result.is_clean and kept is None:
        shutil.rmtree(folder)
    elif not result.is_clean:
        print(f"kept {folder}; seed {seed}", file=sys.stderr)
    return 0 if result.is_clean else 1


def _timed_printer() -> Say:
    began = time.monotonic()
    return lambda words: print(f"{time.monotonic() - began:8.1f} s  {words}", flush=True)
