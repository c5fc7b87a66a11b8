"""After a run: is what the broker kept exactly what it acknowledged?"""

from collections.abc import Callable, Sequence

from benchmarks.load.raw import SessionReader
from benchmarks.wire.raw_client import Address, BrokerError, Connection, Topic, end_offsets
from penstock.protocol.record_batch import checksum, decode_records, read_header

CheckBatch = Callable[[memoryview], None]
#: Batches of a run of varying batches that are decoded record by record.
_DECODED_BATCHES = 200
_DECOMPRESSED_BYTES_MAX = 16 * 2**20


def verify_topic(topic: Topic, records: int, check: CheckBatch) -> int:
    """Read the whole topic again: offsets without gaps, every batch checked, as many records as acknowledged.

    Returns the bytes of all its batches.
    """
    held = stored_bytes = 0
    for leader, partitions in topic.leaders.items():
        reader = _read_all(topic, leader, partitions, check)
        held += reader.records
        stored_bytes += reader.bytes
    if held != records:
        raise BrokerError(f"{topic.name} holds {held} records, {records} were acknowledged")
    return stored_bytes


def _read_all(topic: Topic, leader: Address, partitions: Sequence[int], check: CheckBatch) -> SessionReader:
    with Connection(leader, access=topic.access) as connection:
        end = sum(end_offsets(connection, topic.name, partitions))
        reader = SessionReader(connection, topic.id, partitions)
        while reader.records < end:
            if not reader.fetch():
                raise BrokerError(f"{topic.name} ends after {reader.records} of {end} records")
            for batch in reader.batches:
                check(batch)
        return reader


def same_batch(sent: bytes) -> CheckBatch:
    """Every batch must have the sent one's content: the checksum covers all but offset and epoch."""
    expected_crc = read_header(sent).crc

    def check(batch: memoryview) -> None:
        if (
            len(batch) != len(sent)
            or checksum(batch) != expected_crc
            or read_header(batch).crc != expected_crc
        ):
            raise BrokerError("a stored batch is not the one that was sent")

    return check


def values_from(pool: list[bytes]) -> CheckBatch:
    """Every batch must match its own checksum; the first few are decoded and their values looked up."""
    known = frozenset(pool)
    left = _DECODED_BATCHES

    def check(batch: memoryview) -> None:
        nonlocal left
        if checksum(batch) != read_header(batch).crc:
            raise BrokerError("a stored batch does not match its checksum")
        if left:
            left -= 1
            if not known.issuperset(
                record.value for record in decode_records(batch, _DECOMPRESSED_BYTES_MAX)
            ):
                raise BrokerError("a stored record has a value that was never sent")

    return check
