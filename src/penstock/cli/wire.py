"""Single requests that the client library has no call for, in the newest version that both sides know."""

from typing import Any, NamedTuple

from penstock.protocol.schemas import schema_class

Address = tuple[str, int]

TIMEOUT_S = 5.0
ANSWER_BYTES_MAX = 64 << 20


class NotUnderstood(OSError):
    """The broker does not know this kind of request."""


class Feature(NamedTuple):
    """At which level it is in this cluster (0: not at all), and between which it may be."""

    level: int
    level_min: int
    level_max: int


def features(address: Address) -> dict[str, Feature]:
    """Those that this broker supports; empty where it does not tell."""
    # Before version 4, those that may be at level 0 are left out.
    answer = ask(
        address,
        schema_class("api_versions.v4.request:ApiVersionsRequest")(
            client_software_name="penstock-cli", client_software_version="1"
        ),
    )
    levels = {str(entry.name): int(entry.max_version_level) for entry in answer.finalized_features}
    return {
        str(entry.name): Feature(
            levels.get(str(entry.name), 0), int(entry.min_version), int(entry.max_version)
        )
        for entry in answer.supported_features
    }


def stored_bytes(address: Address) -> int:
    """What the partitions on this broker take on disk."""
    return sum(partition_bytes(address).values())


def partition_bytes(address: Address) -> dict[tuple[str, int], int]:
    """What each partition on this broker takes on disk."""
    request = schema_class("describe_log_dirs.v4.request:DescribeLogDirsRequest")(topics=None)
    return {
        (str(topic.name), int(partition.partition_index)): int(partition.partition_size)
        for folder in ask(address, request).results
        for topic in folder.topics
        for partition in topic.partitions
    }


def ask(address: Address, request: Any, *, timeout_s: float = TIMEOUT_S) -> Any:
    """The answer in its own version's class. `request` is of the newest version that is wanted.

    Raises OSError when the broker does not answer, or not in a way that can be read; NotUnderstood when it cannot.
    """
    from penstock.client.connection import Connection
    from penstock.client.errors import ClientError, UnsupportedVersion
    from penstock.client.settings import ConnectionSettings

    settings = ConnectionSettings(
        bootstrap=(address,),
        client_id="penstock-cli",
        connect_timeout_ms=int(timeout_s * 1000),
        request_timeout_ms=int(timeout_s * 1000),
        answer_bytes_max=ANSWER_BYTES_MAX,
    )
    try:
        with Connection(address, settings) as connection:
            return connection.call(request)
    except UnsupportedVersion as error:
        raise NotUnderstood(str(error)) from None
    except ClientError as error:
        raise OSError(str(error)) from None
