"""`--campaign contracts`: applications are killed at seeded points; each contract keeps what it promises.

`--mutations` breaks each contract on purpose instead, and expects the judge to complain of those and of no other.
"""

from collections.abc import Sequence
from pathlib import Path

from tests.chaos import commands, siege_report
from tests.chaos.contracts.campaign import Campaign, Plan
from tests.chaos.contracts.jobs import CLAIMED, CONTRACTS, LEDGERED
from tests.chaos.contracts.mutations import MUTATIONS
from tests.chaos.contracts.results import DATABASES, SQLITE
from tests.chaos.siege import Outcome

ALL = "all"
#: Names without blanks, for the command line.
NAMES = {name.replace(" with a ", "+"): name for name in CONTRACTS}
assert set(NAMES.values()) >= {CLAIMED, LEDGERED}


def main(arguments: Sequence[str]) -> int:
    parser = commands.parser(
        __doc__,
        (
            ("points", 300, "kills and freezes at points, of each contract"),
            ("broker-kills", 10, "kill -9 of nodes"),
            ("calm-rounds", 3, "rounds without kills, in which nothing may be lost or come twice"),
            ("lanes", 4, "groups at a time, of each contract"),
            ("nodes", 1, "nodes of the cluster"),
        ),
    )
    parser.add_argument("--delivery", choices=(*NAMES, ALL), default=ALL, help="which contract")
    parser.add_argument("--database", choices=DATABASES, default=SQLITE, help="of results, marks, positions")
    parser.add_argument("--mutations", action="store_true", help="break every contract, and see it noticed")
    given = parser.parse_args(arguments)

    def run(folder: Path, seed: int, say: commands.Say) -> Outcome:
        plan = Plan(
            contracts=CONTRACTS if given.delivery == ALL else (NAMES[given.delivery],),
            points=given.points,
            broker_kills=given.broker_kills,
            calm_rounds=given.calm_rounds,
            lanes=given.lanes,
            database=given.database,
            mutations=tuple(MUTATIONS) if given.mutations else (),
            controls=given.mutations,
            seed=seed,
            nodes=given.nodes,
            settings=commands.settings(given),
        )
        return Campaign(folder, plan, say).run()

    return commands.carry_out(given, run, siege_report.print_table, siege_report.as_document)
