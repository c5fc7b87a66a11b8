"""`--campaign rebalance`: a KIP-848 group is shaken, and no partition may ever have two owners that are not fenced."""

from collections.abc import Sequence
from pathlib import Path

from tests.chaos import commands
from tests.chaos.rebalance import report
from tests.chaos.rebalance.campaign import Campaign, Plan, Result


def main(arguments: Sequence[str]) -> int:
    given = commands.parser(
        __doc__,
        (
            ("rebalances", 1000, "epochs of the group"),
            ("coordinator-kills", 15, "kill -9 of the group's coordinator"),
            ("hosts", 4, "processes with members"),
            ("members", 3, "members of each process at most"),
            ("nodes", 3, "nodes of the cluster"),
        ),
    ).parse_args(arguments)

    def run(folder: Path, seed: int, say: commands.Say) -> Result:
        plan = Plan(
            rebalances=given.rebalances,
            coordinator_kills=given.coordinator_kills,
            hosts=given.hosts,
            members=given.members,
            seed=seed,
            nodes=given.nodes,
            settings=commands.settings(given),
        )
        return Campaign(folder, plan, say).run()

    return commands.carry_out(given, run, report.print_table, report.as_document)
