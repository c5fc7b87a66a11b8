"""The delivery contract that a topic asks of those who subscribe to it: its setting `penstock.delivery.contract`.

Applications and pipelines check it when they start. Brokers that do not know the setting, Apache Kafka's among them,
describe none, and then every contract is good enough.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from penstock.client.cluster import Cluster
from penstock.client.errors import ClientError, Refused, UnsupportedVersion
from penstock.client.topics import topic_settings

__all__ = ["CONTRACT_SETTING", "LesserContract", "check_topic_contracts", "keeps"]

CONTRACT_SETTING: Final = "penstock.delivery.contract"
_NONE: Final = "none"
_MOST, _LEAST, _EFFECTIVELY, _EXACTLY = (
    "at-most-once",
    "at-least-once",
    "effectively-once",
    "exactly-once",
)
#: Which contracts keep what another one promises. At most once loses and at least once repeats, so neither keeps the
#: other.
_KEEPS: Final = {
    _MOST: (_MOST, _EFFECTIVELY, _EXACTLY),
    _LEAST: (_LEAST, _EFFECTIVELY, _EXACTLY),
    _EFFECTIVELY: (_EFFECTIVELY, _EXACTLY),
    _EXACTLY: (_EXACTLY,),
}


class LesserContract(ClientError):
    """A subscription promises less than its topic asks for."""


def keeps(promised: str, asked: str) -> bool:
    """Whether whoever keeps the one contract keeps the other. Pure."""
    return asked not in _KEEPS or promised in _KEEPS[asked]


def check_topic_contracts(cluster: Cluster, topics: Iterable[str], promised: str, *, who: str) -> None:
    """Raises LesserContract, and Unavailable where no broker answers."""
    for topic in topics:
        try:
            asked = topic_settings(cluster, topic).get(CONTRACT_SETTING) or _NONE
        except (Refused, UnsupportedVersion):
            continue  # not everyone may look at settings
        if not keeps(promised, asked):
            raise LesserContract(
                f"{who}: topic {topic} asks for {asked} ({CONTRACT_SETTING}), and {promised} does not keep that; "
                f"subscribe with delivery={' or '.join(repr(each) for each in _KEEPS[asked])}"
            )
