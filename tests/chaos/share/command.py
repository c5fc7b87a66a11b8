"""`--campaign share`: work is shared while workers and nodes are killed; each record comes to one end."""

from collections.abc import Sequence
from pathlib import Path

from tests.chaos import commands, siege_report
from tests.chaos.share.campaign import Campaign, Plan
from tests.chaos.siege import Outcome


def main(arguments: Sequence[str]) -> int:
    given = commands.parser(
        __doc__,
        (
            ("messages", 30_000, "messages to work on"),
            ("broker-kills", 25, "kill -9 of leaders, coordinators and controllers"),
            ("worker-kills", 25, "kill -9 of workers, apart from those who crash by their own hand"),
            ("workers", 4, "processes that share the work"),
            ("batch", 40, "messages that a worker takes at a time at most"),
            ("nodes", 3, "nodes of the cluster"),
        ),
    ).parse_args(arguments)

    def run(folder: Path, seed: int, say: commands.Say) -> Outcome:
        plan = Plan(
            messages=given.messages,
            broker_kills=given.broker_kills,
            worker_kills=given.worker_kills,
            workers=given.workers,
            batch=given.batch,
            seed=seed,
            nodes=given.nodes,
            settings=commands.settings(given),
        )
        return Campaign(folder, plan, say).run()

    return commands.carry_out(given, run, siege_report.print_table, siege_report.as_document)
