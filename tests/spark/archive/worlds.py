"""Runs worlds until one has a flaw."""

import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from tests.spark.archive.mutations import WITH_TOPIC, WITHOUT_TOPIC
from tests.spark.archive.world import World

from penstock.client.errors import ClientError


def first_flaw(seeds: range, mutation: str | None, *, counts_offsets: bool) -> str | None:
    """Return the flaw of the first world that has one."""
    known = WITH_TOPIC if counts_offsets else WITHOUT_TOPIC
    for seed in seeds:
        changed: Any = known[mutation]() if mutation else nullcontext()
        with tempfile.TemporaryDirectory(prefix="archive-world-") as folder:
            world = World(Path(folder), seed, counts_offsets=counts_offsets)
            try:
                with changed:
                    world.run()
                    world.check()
            except (AssertionError, ClientError) as error:
                story = "" if mutation else "\n".join(["", *world.stage.gates, *world.failures])
                return f"seed {seed}: {error}{story}"
    return None
