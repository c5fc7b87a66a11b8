"""`python -m tests.chaos --kills 200 --freezes 100 --cuts 100 --power 50 --rolling 5 --reassign 20 --seed S`.

Prints a table and one JSON line. What was found wrong keeps its folder: data, logs of the nodes and the history.
"""

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.chaos import report
from tests.chaos.campaign import Campaign, Plan


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    for name, default, words in (
        ("kills", 20, "kill -9 of leaders, controllers, pairs and all nodes"),
        ("freezes", 10, "SIGSTOP for a while"),
        ("cuts", 10, "partitions of the network, both ways and one way"),
        ("power", 10, "kill -9 and every file cut back to what was synced"),
        ("rolling", 1, "rolling restarts meanwhile"),
        ("reassign", 3, "reassignments of partitions meanwhile"),
        ("work", 1000, "acknowledged writes, and deliveries, between two faults at least"),
        ("nodes", 3, "nodes of the cluster"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{words} (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=None, help="choices repeat with it; timing does not")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of the nodes"
    )
    parser.add_argument("--folder", type=Path, default=None, help="where data, logs and history go, and stay")
    parser.add_argument("--quiet", action="store_true", help="do not tell each fault")
    return parser.parse_args()


def main() -> int:
    given = _arguments()
    seed = random.SystemRandom().randrange(1 << 32) if given.seed is None else given.seed
    folder = given.folder or Path(tempfile.mkdtemp(prefix="penstock-chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        print(f"{folder} is not empty", file=sys.stderr)
        return 2
    plan = Plan(
        kills=given.kills,
        freezes=given.freezes,
        cuts=given.cuts,
        powers=given.power,
        rolling=given.rolling,
        reassign=given.reassign,
        seed=seed,
        nodes=given.nodes,
        work=given.work,
        settings=dict(text.split("=", 1) for text in given.set),
    )
    began = time.monotonic()
    print(f"seed {seed}, folder {folder}", flush=True)

    def say(words: str) -> None:
        if not given.quiet:
            print(f"{time.monotonic() - began:8.1f} s  {words}", flush=True)

    result = Campaign(folder, plan, say).run()
    report.print_table(result)
    print(json.dumps(report.as_document(result)))
    if result.is_clean and given.folder is None:
        shutil.rmtree(folder)
    elif not result.is_clean:
        print(f"kept {folder}; seed {seed}", file=sys.stderr)
    return 0 if result.is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
