"""`--campaign schedule`: messages are delivered later, and nodes are killed; none is early, doubled or lost."""

from collections.abc import Sequence
from pathlib import Path

from tests.chaos import commands, siege_report
from tests.chaos.schedule.campaign import Campaign, Plan
from tests.chaos.siege import Outcome


def main(arguments: Sequence[str]) -> int:
    given = commands.parser(
        __doc__,
        (
            (
                "kills",
                25,
                "kill -9 of leaders of the topic and of the schedule, coordinators and controllers",
            ),
            ("work", 300, "messages sent and delivered to each group between two kills at least"),
            ("delay", 4000, "milliseconds that a message is held at most"),
            ("nodes", 3, "nodes of the cluster"),
        ),
    ).parse_args(arguments)

    def run(folder: Path, seed: int, say: commands.Say) -> Outcome:
        plan = Plan(
            kills=given.kills,
            work=given.work,
            delay_ms_max=given.delay,
            seed=seed,
            nodes=given.nodes,
            settings=commands.settings(given),
        )
        return Campaign(folder, plan, say).run()

    return commands.carry_out(given, run, siege_report.print_table, siege_report.as_document)
