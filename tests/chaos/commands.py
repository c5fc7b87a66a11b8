"""What the commands of campaigns share: a seed, a folder that stays if something is wrong, a table and a JSON line."""

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

Say = Callable[[str], None]


class Judged(Protocol):
    @property
    def is_clean(self) -> bool: ...


R = TypeVar("R", bound=Judged)


def parser(words: str | None, counts: Sequence[tuple[str, int, str]]) -> argparse.ArgumentParser:
    """`counts` are flags that take a number: name, default, meaning."""
    made = argparse.ArgumentParser(prog="python -m tests.chaos", description=words)
    for name, default, meaning in counts:
        made.add_argument(f"--{name}", type=int, default=default, help=f"{meaning} (default: %(default)s)")
    made.add_argument("--seed", type=int, default=None, help="choices repeat with it; timing does not")
    made.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of the nodes"
    )
    made.add_argument("--folder", type=Path, default=None, help="where data, logs and history go, and stay")
    made.add_argument("--quiet", action="store_true", help="do not tell each fault")
    return made


def settings(given: argparse.Namespace) -> dict[str, str]:
    return dict(text.split("=", 1) for text in given.set)


def carry_out(
    given: argparse.Namespace,
    run: Callable[[Path, int, Say], R],
    show: Callable[[R], None],
    as_document: Callable[[R], dict[str, Any]],
) -> int:
    """Run a campaign with its folder, its seed and someone to tell; returns the exit code of the command."""
    seed = random.SystemRandom().randrange(1 << 32) if given.seed is None else given.seed
    folder = given.folder or Path(tempfile.mkdtemp(prefix="penstock-chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        print(f"{folder} is not empty", file=sys.stderr)
        return 2
    print(f"seed {seed}, folder {folder}", flush=True)
    result = run(folder, seed, _teller(given.quiet))
    show(result)
    print(json.dumps(as_document(result)))
    if result.is_clean and given.folder is None:
        shutil.rmtree(folder)
    elif not result.is_clean:
        print(f"kept {folder}; seed {seed}", file=sys.stderr)
    return 0 if result.is_clean else 1


def _teller(is_quiet: bool) -> Say:
    began = time.monotonic()

    def say(words: str) -> None:
        if not is_quiet:
            print(f"{time.monotonic() - began:8.1f} s  {words}", flush=True)

    return say
