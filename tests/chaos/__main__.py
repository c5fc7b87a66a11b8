"""`python -m tests.chaos [--campaign NAME] [options]`: a campaign of faults against real nodes and real clients.

Prints a table and one JSON line. A campaign that finds something wrong keeps its folder: data, logs and history.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence

from tests.chaos.command import run_command

NODES = "nodes"
#: Modules with a `Campaign`, and a `Plan` that the rest of the command line sets.
CAMPAIGNS = {
    **{
        name: f"tests.chaos.{name}.campaign"
        for name in (NODES, "copier", "rebalance", "schedule", "share", "once", "contracts")
    },
    "sink": "tests.spark.sink.campaign",
}


def main(arguments: Sequence[str]) -> int:
    chooser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    chooser.add_argument("--campaign", choices=CAMPAIGNS, default=NODES)
    given, rest = chooser.parse_known_args(arguments)
    # Only the chosen campaign is imported: some need Spark.
    module = importlib.import_module(CAMPAIGNS[given.campaign])
    return run_command(rest, module.Plan, module.Campaign, module.__doc__)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
