"""`penstock transaction`: list and describe transactions, abort one, and find and abort hanging ones.

Transaction coordinators describe transactional ids; partition leaders describe producers with an open transaction.
"""

import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Annotated, Any, Final, NamedTuple

import typer

from penstock.cli.cluster_client import (
    COORDINATOR_TIMEOUT_S,
    TRANSACTION_COORDINATOR,
    Address,
    LibrdkafkaCluster,
    PartitionName,
    find_coordinator,
    raise_for_error,
    request_from_all_brokers,
    request_from_coordinator,
    send_request,
)
from penstock.cli.errors import CommandError
from penstock.cli.options import DEFAULT_BOOTSTRAP, AsJson, Bootstrap, Yes
from penstock.cli.output import confirm, note, plural, print_facts, print_json, print_table
from penstock.protocol.errors import ErrorCode
from penstock.protocol.schemas import schema_class

#: The request needs a timeout, but this command opens no transaction; the next producer of the id sends its own.
_FENCE_TIMEOUT_MS: Final = 60_000
_FENCE_WAIT_S: Final = 30.0
_RETRY_S: Final = 0.1
_RETRIABLE_ERRORS: Final = (
    ErrorCode.concurrent_transactions,
    ErrorCode.coordinator_load_in_progress,
    ErrorCode.not_coordinator,
)
_NO_PRODUCER: Final = -1
_EMPTY_STATE: Final = "Empty"
_DESCRIBE_ATTEMPTS_MAX: Final = 3


class TransactionDescription(NamedTuple):
    transactional_id: str
    state: str
    producer_id: int
    #: These are known only after the first transaction has begun.
    epoch: int | None = None
    timeout_ms: int | None = None
    start_ms: int | None = None
    places: tuple[PartitionName, ...] = ()


class OpenProducer(NamedTuple):
    """A producer with an open transaction in a partition, as the partition's leader sees it."""

    place: PartitionName
    producer_id: int
    epoch: int
    coordinator_epoch: int
    start_offset: int
    last_ms: int


def list_all_transactions(cluster: LibrdkafkaCluster) -> list[TransactionDescription]:
    return sorted(request_from_all_brokers(cluster, _transactions_on_broker))


def _transactions_on_broker(address: Address) -> list[TransactionDescription]:
    """Retries: an id whose state becomes Empty between the two requests has a description that cannot be decoded."""
    for _ in range(_DESCRIBE_ATTEMPTS_MAX - 1):
        with suppress(OSError):
            return _try_transactions_on_broker(address)
    return _try_transactions_on_broker(address)


def _try_transactions_on_broker(address: Address) -> list[TransactionDescription]:
    request = schema_class("list_transactions.v1.request:ListTransactionsRequest")(
        state_filters=(), producer_id_filters=(), duration_filter=_NO_PRODUCER
    )
    answer = send_request(address, request)
    raise_for_error(answer, "transactions")
    # Empty ids have no transaction yet. Their start time is negative, which cannot be decoded.
    empty = [found for found in answer.transaction_states if found.transaction_state == _EMPTY_STATE]
    names = [found.transactional_id for found in answer.transaction_states if found not in empty]
    request = schema_class("describe_transactions.v0.request:DescribeTransactionsRequest")(
        transactional_ids=tuple(names)
    )
    described = send_request(address, request).transaction_states
    return [
        *(
            TransactionDescription(str(found.transactional_id), _EMPTY_STATE, int(found.producer_id))
            for found in empty
        ),
        *(_parse_transaction(found) for found in described if found.error_code.value == 0),
    ]


def describe_transaction(cluster: LibrdkafkaCluster, name: str) -> TransactionDescription:
    """Raises CommandError."""
    coordinator = find_coordinator(cluster, name, TRANSACTION_COORDINATOR)
    try:
        found = [
            each for each in _transactions_on_broker(coordinator.address) if each.transactional_id == name
        ]
    except OSError as error:
        raise CommandError(f"node {coordinator.node} does not answer: {error}") from None
    if not found:
        raise CommandError(
            f"nobody has used the transactional id {name} lately",
            hint="penstock transaction list shows those that are known",
        )
    return found[0]


def _parse_transaction(found: Any) -> TransactionDescription:
    return TransactionDescription(
        str(found.transactional_id),
        str(found.transaction_state),
        int(found.producer_id),
        int(found.producer_epoch),
        int(found.transaction_timeout / timedelta(milliseconds=1)),
        int(found.transaction_start_time.timestamp() * 1000),
        tuple(
            sorted(
                PartitionName(str(topic.topic), int(index))
                for topic in found.topics
                for index in topic.partitions
            )
        ),
    )


def fence_producer(cluster: LibrdkafkaCluster, name: str) -> None:
    """Takes over the id as a new producer would, which aborts its open transaction. Raises CommandError."""
    request = schema_class("init_producer_id.v4.request:InitProducerIdRequest")(
        transactional_id=name,
        transaction_timeout=timedelta(milliseconds=_FENCE_TIMEOUT_MS),
        producer_id=_NO_PRODUCER,
        producer_epoch=_NO_PRODUCER,
    )
    deadline = time.monotonic() + _FENCE_WAIT_S
    while True:
        answer = request_from_coordinator(cluster, name, TRANSACTION_COORDINATOR, request)
        if answer.error_code not in _RETRIABLE_ERRORS or time.monotonic() > deadline:
            raise_for_error(answer, f"transactional id {name}")
            return
        time.sleep(_RETRY_S)


def list_open_producers(cluster: LibrdkafkaCluster) -> list[OpenProducer]:
    """Covers all partitions that have a leader."""
    metadata = cluster.metadata()
    addresses = {int(broker.id): (str(broker.host), int(broker.port)) for broker in metadata.brokers.values()}
    led: defaultdict[Address, list[PartitionName]] = defaultdict(list)
    for name, topic in metadata.topics.items():
        for index, partition in topic.partitions.items():
            if int(partition.leader) in addresses:
                led[addresses[int(partition.leader)]].append(PartitionName(name, index))
    return sorted(
        found for address, places in led.items() for found in _open_producers_on_leader(address, places)
    )


def _open_producers_on_leader(address: Address, places: Iterable[PartitionName]) -> Iterable[OpenProducer]:
    module = "describe_producers.v0.request"
    by_topic: defaultdict[str, list[int]] = defaultdict(list)
    for place in places:
        by_topic[place.topic].append(place.partition)
    topics = tuple(
        schema_class(f"{module}:TopicRequest")(name=name, partition_indexes=tuple(indexes))
        for name, indexes in by_topic.items()
    )
    answer = _request_from_leader(address, schema_class(f"{module}:DescribeProducersRequest")(topics=topics))
    return [
        OpenProducer(
            PartitionName(str(topic.name), int(part.partition_index)),
            int(producer.producer_id),
            int(producer.producer_epoch),
            int(producer.coordinator_epoch),
            int(producer.current_txn_start_offset),
            int(producer.last_timestamp),
        )
        for topic in answer.topics
        for part in topic.partitions
        for producer in part.active_producers
        if int(producer.current_txn_start_offset) >= 0
    ]


def write_abort_marker(cluster: LibrdkafkaCluster, found: OpenProducer) -> None:
    """Writes an abort marker to this partition only, as a coordinator would. Raises CommandError."""
    module = "write_txn_markers.v1.request"
    topic = schema_class(f"{module}:WritableTxnMarkerTopic")(
        name=found.place.topic, partition_indexes=(found.place.partition,)
    )
    marker = schema_class(f"{module}:WritableTxnMarker")(
        producer_id=found.producer_id,
        producer_epoch=found.epoch,
        transaction_result=False,
        topics=(topic,),
        coordinator_epoch=max(found.coordinator_epoch, 0),
    )
    request = schema_class(f"{module}:WriteTxnMarkersRequest")(markers=(marker,))
    metadata = cluster.metadata()
    leader = metadata.brokers[metadata.topics[found.place.topic].partitions[found.place.partition].leader]
    answer = _request_from_leader((str(leader.host), int(leader.port)), request)
    outcome = answer.markers[0].topics[0].partitions[0]
    if outcome.error_code.name == "cluster_authorization_failed":
        raise CommandError(
            f"{found.place}: the broker takes markers only on its listener for nodes",
            hint="-b gives the address of that listener, NODES in the node's settings",
        )
    raise_for_error(outcome, str(found.place))


def _request_from_leader(address: Address, request: Any) -> Any:
    """Raises CommandError."""
    try:
        return send_request(address, request, timeout_s=COORDINATOR_TIMEOUT_S)
    except OSError as error:
        raise CommandError(f"the broker at {address[0]}:{address[1]} does not answer: {error}") from None


#: The default maximum of transaction timeouts: a transaction that no coordinator knows after that time is really lost.
_HANGING_AFTER_S = 900.0
#: The prefix of the transactional ids of Spark sinks.
_SINK_ID_PREFIX = "penstock-sink-"

app = typer.Typer(help="List, describe and abort transactions.", no_args_is_help=True)

TransactionalId = Annotated[str, typer.Argument(metavar="TRANSACTIONAL_ID", show_default=False)]


@app.command("list")
def list_transactions(
    only_open: Annotated[bool, typer.Option("--open", help="Only those that are not over.")] = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    as_json: AsJson = False,
) -> None:
    """List transactional ids with the state of their transactions, longest open first."""
    found = [_transaction_document(each) for each in list_all_transactions(LibrdkafkaCluster(bootstrap))]
    _fill_owners(bootstrap, found)
    rows = sorted(found, key=lambda row: -(row["open_s"] or 0.0))
    if only_open:
        rows = [row for row in rows if row["open_s"] is not None]
    if as_json:
        print_json(rows)
    elif rows:
        cells = ([*list(row.values())[:-1], _topic_names(row)] for row in rows)
        print_table([column.replace("_", " ") for column in rows[0]], cells)
    else:
        note("no open transactions" if only_open else "no transactional ids yet")


@app.command()
def describe(
    name: TransactionalId, bootstrap: Bootstrap = DEFAULT_BOOTSTRAP, as_json: AsJson = False
) -> None:
    """Show the state of a transactional id, and the partitions in its open transaction."""
    document = _transaction_document(describe_transaction(LibrdkafkaCluster(bootstrap), name))
    _fill_owners(bootstrap, [document])
    if as_json:
        print_json(document)
        return
    places = document.pop("partitions")
    print_facts([(key.replace("_", " "), value) for key, value in document.items()])
    if places:
        print()
        print_table(list(places[0]), (list(place.values()) for place in places))


def _transaction_document(found: TransactionDescription) -> dict[str, Any]:
    open_s = None if found.start_ms is None else round(max(time.time() - found.start_ms / 1000, 0.0), 1)
    is_over = found.state.startswith(("Complete", "Empty"))
    return {
        "transactional_id": found.transactional_id,
        "state": found.state,
        "producer_id": found.producer_id,
        "epoch": found.epoch,
        "timeout_ms": found.timeout_ms,
        "open_s": None if is_over else open_s,
        "owner": None,
        "partitions": [{"topic": place.topic, "partition": place.partition} for place in found.places],
    }


def _topic_names(row: dict[str, Any]) -> str:
    return ", ".join(sorted({place["topic"] for place in row["partitions"]}))


def _fill_owners(bootstrap: str, rows: list[dict[str, Any]]) -> None:
    """Fills in the pipeline or Spark query that each transaction belongs to."""
    if not any(str(row["transactional_id"]).startswith(_SINK_ID_PREFIX) for row in rows):
        return
    from penstock.cli.pipeline.status import open_status_store  # loads much that other commands do not need
    from penstock.spark.pipelines.open_transactions import transaction_owner
    from penstock.spark.pipelines.status import read_statuses

    with open_status_store(bootstrap, None) as store:
        known = read_statuses(store)
    for row in rows:
        row["owner"] = transaction_owner(row["transactional_id"], known)


@app.command()
def abort(name: TransactionalId, yes: Yes = False, bootstrap: Bootstrap = DEFAULT_BOOTSTRAP) -> None:
    """Abort the open transaction of a transactional id, and fence its producer.

    A producer that is still alive cannot continue with it, and has to be created again. A transaction that is
    already being committed is not aborted: the command waits for the commit.
    """
    cluster = LibrdkafkaCluster(bootstrap)
    found = describe_transaction(cluster, name)
    _reject_sink_transaction(bootstrap, _transaction_document(found))
    confirm(f"Abort what is open under {name} ({found.state}) and fence its producer?", yes=yes)
    fence_producer(cluster, name)
    note(f"{name}: nothing is open, and its producer is fenced")


def _reject_sink_transaction(bootstrap: str, row: dict[str, Any]) -> None:
    """Raises CommandError for a transaction of a pipeline, which may have decided to commit it and would lose rows."""
    _fill_owners(bootstrap, [row])
    if row["owner"] is None or row["open_s"] is None:
        return
    from penstock.cli.pipeline.status import remedy_text

    raise CommandError(
        f"{row['transactional_id']} belongs to {row['owner']}, which may have decided to commit it",
        hint=remedy_text(row),
    )


@app.command()
def hanging(
    silent_s: Annotated[
        float,
        typer.Option(
            "--silent", metavar="SECONDS", min=0, help="Only where the producer has been silent for so long."
        ),
    ] = _HANGING_AFTER_S,
    abort_them: Annotated[bool, typer.Option("--abort", help="Write abort markers for all of them.")] = False,
    yes: Yes = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    as_json: AsJson = False,
) -> None:
    """Find transactions that are open in a partition but unknown to all coordinators, so that nothing ends them."""
    cluster = LibrdkafkaCluster(bootstrap)
    found = _find_hanging(cluster, silent_s)
    rows = [_hanging_document(each) for each in found]
    if as_json and not abort_them:
        print_json(rows)
    elif rows and not as_json:
        print_table([column.replace("_", " ") for column in rows[0]], (list(row.values()) for row in rows))
    elif not rows:
        note(
            "no hanging transactions; penstock transaction list --open shows those that somebody may still end"
        )
    if not (abort_them and found):
        return
    confirm(f"Abort {plural(len(found), 'hanging transaction')}?", yes=yes)
    for each in found:
        write_abort_marker(cluster, each)
    if as_json:
        print_json([{**row, "aborted": True} for row in rows])
    else:
        note(f"{plural(len(found), 'hanging transaction')} aborted")


def _find_hanging(cluster: LibrdkafkaCluster, silent_s: float) -> list[OpenProducer]:
    """Transactions that no coordinator knows and that are open both before and after the coordinators were asked."""
    latest_ms = (time.time() - silent_s) * 1000
    before = [each for each in list_open_producers(cluster) if each.last_ms <= latest_ms]
    if not before:
        return []
    known = {(each.producer_id, place) for each in list_all_transactions(cluster) for place in each.places}
    suspects = {_producer_identity(each) for each in before if (each.producer_id, each.place) not in known}
    return (
        [each for each in list_open_producers(cluster) if _producer_identity(each) in suspects]
        if suspects
        else []
    )


def _producer_identity(found: OpenProducer) -> tuple[object, ...]:
    return found.place, found.producer_id, found.start_offset


def _hanging_document(found: OpenProducer) -> dict[str, Any]:
    return {
        "topic": found.place.topic,
        "partition": found.place.partition,
        "producer_id": found.producer_id,
        "epoch": found.epoch,
        "start_offset": found.start_offset,
        "silent_s": round(max(time.time() - found.last_ms / 1000, 0.0), 1),
    }
