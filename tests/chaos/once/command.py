"""`--campaign once`: members, processes and nodes are killed at every place of the protocol; nothing comes twice."""

from collections.abc import Sequence
from pathlib import Path

from tests.chaos import commands, siege_report
from tests.chaos.once.campaign import Campaign, Plan
from tests.chaos.siege import Outcome


def main(arguments: Sequence[str]) -> int:
    given = commands.parser(
        __doc__,
        (
            ("points", 10_000, "kill points, those of processes and nodes among them"),
            ("broker-kills", 50, "kill -9 of leaders, coordinators and controllers"),
            ("process-kills", 200, "kill -9 of processes of share consumers"),
            ("calm-rounds", 5, "rounds without any kill, in which nothing may be lost"),
            ("lanes", 24, "members made by hand at a time"),
            ("processes", 4, "processes of share consumers at a time"),
            ("nodes", 3, "nodes of the cluster"),
        ),
    ).parse_args(arguments)

    def run(folder: Path, seed: int, say: commands.Say) -> Outcome:
        plan = Plan(
            points=given.points,
            broker_kills=given.broker_kills,
            process_kills=given.process_kills,
            calm_rounds=given.calm_rounds,
            lanes=given.lanes,
            processes=given.processes,
            seed=seed,
            nodes=given.nodes,
            settings=commands.settings(given),
        )
        return Campaign(folder, plan, say).run()

    return commands.carry_out(given, run, siege_report.print_table, siege_report.as_document)
