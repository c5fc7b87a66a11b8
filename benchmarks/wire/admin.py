"""Admin calls that only some scenarios need: settings of topics and groups, coordinators, more partitions."""

import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from enum import IntEnum

from kio.schema.create_partitions.v3 import request as partitions_request
from kio.schema.create_partitions.v3 import response as partitions_response
from kio.schema.create_topics.v5 import request as create_request
from kio.schema.create_topics.v5 import response as create_response
from kio.schema.find_coordinator.v4 import request as coordinator_request
from kio.schema.find_coordinator.v4 import response as coordinator_response
from kio.schema.incremental_alter_configs.v1 import request as alter_request
from kio.schema.incremental_alter_configs.v1 import response as alter_response

from benchmarks.wire.raw_client import BrokerError, Connection

_SET = 0
_COORDINATOR_WAIT_S = 60.0
_TOPICS_AT_ONCE = 500


class Resource(IntEnum):
    TOPIC = 2
    GROUP = 32


class Coordinated(IntEnum):
    GROUP = 0
    TRANSACTION = 1


def alter_configs(connection: Connection, kind: Resource, name: str, configs: Mapping[str, str]) -> None:
    resource = alter_request.AlterConfigsResource(
        resource_type=kind,
        resource_name=name,
        configs=tuple(
            alter_request.AlterableConfig(name=key, config_operation=_SET, value=value)
            for key, value in configs.items()
        ),
    )
    request = alter_request.IncrementalAlterConfigsRequest(resources=(resource,), validate_only=False)
    (result,) = connection.call(request, alter_response.IncrementalAlterConfigsResponse).responses
    if result.error_code.value:
        raise BrokerError(f"cannot set {dict(configs)} of {name}: {result.error_message}")


def await_coordinator(connection: Connection, kind: Coordinated, key: str) -> None:
    """Asking is what makes the internal topic; the one broker is the coordinator of everything."""
    deadline = time.monotonic() + _COORDINATOR_WAIT_S
    request = coordinator_request.FindCoordinatorRequest(key_type=kind, coordinator_keys=(key,))
    while True:
        (found,) = connection.call(request, coordinator_response.FindCoordinatorResponse).coordinators
        if not found.error_code.value:
            return
        if time.monotonic() > deadline:
            raise BrokerError(f"no coordinator for {key}: {found.error_code.name}")
        time.sleep(0.05)


def create_topics(connection: Connection, names: Sequence[str]) -> None:
    """Of one partition each."""
    for first in range(0, len(names), _TOPICS_AT_ONCE):
        topics = tuple(
            create_request.CreatableTopic(
                name=name, num_partitions=1, replication_factor=1, assignments=(), configs=()
            )
            for name in names[first : first + _TOPICS_AT_ONCE]
        )
        request = create_request.CreateTopicsRequest(topics=topics, timeout=timedelta(seconds=60))
        for result in connection.call(request, create_response.CreateTopicsResponse).topics:
            if result.error_code.value:
                raise BrokerError(f"cannot create {result.name}: {result.error_code.name}")


def create_partitions(connection: Connection, topic: str, count: int) -> None:
    request = partitions_request.CreatePartitionsRequest(
        topics=(partitions_request.CreatePartitionsTopic(name=topic, count=count, assignments=None),),
        timeout=timedelta(seconds=30),
        validate_only=False,
    )
    (result,) = connection.call(request, partitions_response.CreatePartitionsResponse).results
    if result.error_code.value:
        raise BrokerError(f"cannot add partitions to {topic}: {result.error_code.name}")
