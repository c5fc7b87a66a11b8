"""`python -m tests.chaos --kills 200 --freezes 100 --cuts 100 --power 50 --rolling 5 --reassign 20 --seed S`.

Prints a table and one JSON line. What was found wrong keeps its folder: data, logs of the nodes and the history.
`--campaign NAME` runs another campaign, with flags of its own: see CAMPAIGNS.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.chaos import commands, report
from tests.chaos.campaign import Campaign, Plan, Result

NODES = "nodes"
# Modules with a `main` that takes the rest of the command line.
CAMPAIGNS = {
    NODES: __name__,
    "copier": "tests.chaos.copier.command",
    "rebalance": "tests.chaos.rebalance.command",
    "schedule": "tests.chaos.schedule.command",
    "share": "tests.chaos.share.command",
    "once": "tests.chaos.once.command",
    "contracts": "tests.chaos.contracts.command",
    "sink": "tests.spark.sink.campaign",
}


def main(arguments: Sequence[str]) -> int:
    given = commands.parser(
        __doc__,
        (
            ("kills", 20, "kill -9 of leaders, controllers, pairs and all nodes"),
            ("freezes", 10, "SIGSTOP for a while"),
            ("cuts", 10, "partitions of the network, both ways and one way"),
            ("power", 10, "kill -9 and every file cut back to what was synced"),
            ("rolling", 1, "rolling restarts meanwhile"),
            ("reassign", 3, "reassignments of partitions meanwhile"),
            ("work", 1000, "acknowledged writes, and deliveries, between two faults at least"),
            ("nodes", 3, "nodes of the cluster"),
        ),
    ).parse_args(arguments)

    def run(folder: Path, seed: int, say: commands.Say) -> Result:
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
            settings=commands.settings(given),
        )
        return Campaign(folder, plan, say).run()

    return commands.carry_out(given, run, report.print_table, report.as_document)


def choose(arguments: Sequence[str]) -> int:
    chooser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    chooser.add_argument("--campaign", choices=CAMPAIGNS, default=NODES)
    given, rest = chooser.parse_known_args(arguments)
    code: int = importlib.import_module(CAMPAIGNS[given.campaign]).main(rest)
    return code


if __name__ == "__main__":
    sys.exit(choose(sys.argv[1:]))
