"""Open transactions as people see them: whose they are, what they hold back, since when, and what ends them."""

import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from penstock.client.cluster import Cluster
from penstock.client.errors import ClientError
from penstock.client.metadata import Isolation, Place
from penstock.client.positions import LATEST, list_offsets
from penstock.client.transactions import TransactionInfo, open_transactions
from penstock.spark.pipelines.board import Board
from penstock.spark.pipelines.leftovers import owner_of
from penstock.spark.pipelines.status import Status, statuses

_PIPELINE = "pipeline "


def holding_back(cluster: Cluster, places: Sequence[Place]) -> list[dict[str, Any]]:
    """Open transactions because of which readers of committed records do not get to the end of these partitions.

    Brokers that do not tell of transactions hold nothing back as far as we know.
    """
    with suppress(ClientError):
        edges = dict.fromkeys(places, LATEST)
        ends = list_offsets(cluster, edges)
        stable = list_offsets(cluster, edges, isolation=Isolation.READ_COMMITTED)
        behind = {place for place in places if _offset(stable[place]) < _offset(ends[place])}
        if not behind:
            return []
        found = [each for each in open_transactions(cluster) if behind.intersection(each.partitions)]
        return documents(found, statuses(Board(cluster)), behind)
    return []


def _offset(found: Any) -> int:
    return found.offset if found is not None else 0


def documents(
    found: Iterable[TransactionInfo], known: dict[str, Status], places: set[Place] | None = None
) -> list[dict[str, Any]]:
    """For scripts; only these partitions where they are given."""
    now_s = time.time()
    return [
        {
            "transactional_id": each.transactional_id,
            "owner": owner_of(each.transactional_id, known),
            "since_ms": each.start_ms,
            "open_s": round(max(now_s - each.start_ms / 1000, 0.0), 1),
            "timeout_ms": each.timeout_ms,
            "partitions": [
                {"topic": topic, "partition": partition}
                for topic, partition in each.partitions
                if places is None or (topic, partition) in places
            ],
        }
        for each in found
    ]


def sentence(rows: Sequence[dict[str, Any]]) -> str | None:
    """Of the one that has been open longest, and how many more there are."""
    if not rows:
        return None
    first = max(rows, key=lambda row: float(row["open_s"]))
    who = first["owner"] or f"transaction {first['transactional_id']}"
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(first["since_ms"] / 1000))
    more = f" and {len(rows) - 1} more" if len(rows) > 1 else ""
    return f"{who}{more}, since {since} ({first['open_s']:.0f} s): {remedy(first)}"


def remedy(row: dict[str, Any]) -> str:
    owner = row["owner"]
    if owner is None:
        return f"penstock transaction abort {row['transactional_id']}"
    name = owner.removeprefix(_PIPELINE).removeprefix("query ")
    return f"ends when it runs, or by penstock pipeline release {name}"


def topics_of(rows: Iterable[dict[str, Any]]) -> str:
    return ", ".join(sorted({place["topic"] for row in rows for place in row["partitions"]}))
