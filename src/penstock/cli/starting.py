"""From positions that people write to an offset per partition, for `consume` and `group reset`."""

from collections.abc import Sequence

from penstock.cli.client import Cluster, Place
from penstock.cli.positions import Anchor, Position, resolve


def starting_offsets(cluster: Cluster, places: Sequence[Place], position: Position) -> dict[Place, int]:
    from confluent_kafka.admin import OffsetSpec

    first, end = cluster.ends(places)
    by_time: dict[Place, int] = {}
    if position.anchor is Anchor.TIMESTAMP:
        by_time = cluster.offsets(places, OffsetSpec.for_timestamp(position.value))
    return {
        place: resolve(position, first=first[place], end=end[place], at_timestamp=by_time.get(place))
        for place in places
    }
