"""`--campaign copier`: messages are copied in transactions while nodes and copiers are killed; each is there once."""

from collections.abc import Sequence
from pathlib import Path

from tests.chaos import commands
from tests.chaos.copier import report
from tests.chaos.copier.campaign import Campaign, Plan, Result
from tests.chaos.copier.worker import LIBRARIES


def main(arguments: Sequence[str]) -> int:
    parser = commands.parser(
        __doc__,
        (
            ("messages", 100_000, "messages to copy"),
            ("broker-kills", 25, "kill -9 of leaders, coordinators and controllers"),
            ("client-kills", 25, "kill -9 of copiers"),
            ("copiers", 4, "processes that copy"),
            ("batch", 100, "messages of a transaction at most"),
            ("nodes", 3, "nodes of the cluster"),
        ),
    )
    parser.add_argument("--library", choices=LIBRARIES, default="confluent", help="what the copiers use")
    parser.add_argument("--protocol", choices=("classic", "consumer"), default="classic", help="of the group")
    given = parser.parse_args(arguments)

    def run(folder: Path, seed: int, say: commands.Say) -> Result:
        plan = Plan(
            messages=given.messages,
            broker_kills=given.broker_kills,
            client_kills=given.client_kills,
            copiers=given.copiers,
            library=given.library,
            protocol=given.protocol,
            batch=given.batch,
            seed=seed,
            nodes=given.nodes,
            settings=commands.settings(given),
        )
        return Campaign(folder, plan, say).run()

    return commands.carry_out(given, run, report.print_table, report.as_document)
