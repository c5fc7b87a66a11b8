"""The worlds by name: what each is made of, drawn from its seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from simulation import consumer_world, schedule_world, share_world, small, transaction_world
from simulation.cluster import Cluster
from simulation.workload import Workload
from simulation.world import World

Build = Callable[[World], tuple[Cluster, Workload]]

WORLDS: Final[dict[str, Build]] = {
    "small": small.build,
    "transactions": transaction_world.build,
    "consumer": consumer_world.build,
    "share": share_world.build,
    "schedule": schedule_world.build,
}
