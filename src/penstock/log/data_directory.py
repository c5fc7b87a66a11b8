"""What a data directory contains, and the small files that describe it.

Files and directories are named as Kafka names them. `meta.properties` says which node and cluster own the
directory, `partition.metadata` holds the topic id of a partition, `penstock-voter-id` the id under which the node
votes once it no longer votes under its directory id.

`.boot` records the boot id of the machine and the broker epoch of each run. A killed process leaves its writes in
the page cache; only a machine that goes down can lose them. With the boot id, the next start knows which of the two
happened. A run is recorded only after the controller has received the previous record, so that a start that fails
half-way does not hide an earlier loss.
"""

import json
import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from pathlib import Path
from typing import Final, NamedTuple
from uuid import UUID, uuid4

from penstock.log.config import INT64_MAX
from penstock.protocol.durable_files import replace_durably

LOG_SUFFIX: Final = ".log"
OFFSET_INDEX_SUFFIX: Final = ".index"
TIME_INDEX_SUFFIX: Final = ".timeindex"
TRANSACTION_INDEX_SUFFIX: Final = ".txnindex"
PRODUCER_SNAPSHOT_SUFFIX: Final = ".snapshot"

#: The files of one segment. The log file comes last, because its rename commits the change.
SEGMENT_FILE_SUFFIXES: Final = (OFFSET_INDEX_SUFFIX, TIME_INDEX_SUFFIX, TRANSACTION_INDEX_SUFFIX, LOG_SUFFIX)

DELETED_SUFFIX: Final = ".deleted"
CLEANED_SUFFIX: Final = ".cleaned"
SWAP_SUFFIX: Final = ".swap"

LEADER_EPOCH_CHECKPOINT_FILE: Final = "leader-epoch-checkpoint"
PARTITION_METADATA_FILE: Final = "partition.metadata"
#: In the folder of a log that was ever compacted: offsets may be missing in it without any loss.
COMPACTED_MARKER_FILE: Final = "penstock-compacted"

#: The longest name of a file or folder that common file systems accept.
FILE_NAME_BYTES_MAX: Final = 255

_OFFSET_FILE_PATTERN: Final = re.compile(r"([0-9]{20})(\.[a-z]+)(\.[a-z]+)?")
_LOG_DIR_PATTERN: Final = re.compile(r"(.+)-(0|[1-9][0-9]*)", re.DOTALL)
_LOG_DELETE_DIR_PATTERN: Final = re.compile(r".+\.[0-9a-f]{32}-delete", re.DOTALL)


def offset_file_name(offset: int, kind: str, suffix: str = "") -> str:
    return f"{offset:020d}{kind}{suffix}"


def parse_offset_file_name(name: str) -> tuple[int, str, str] | None:
    """Returns the offset, kind and suffix of a file that is named after an offset; None for any other file."""
    match = _OFFSET_FILE_PATTERN.fullmatch(name)
    if match is None or int(match[1]) > INT64_MAX:
        return None
    return int(match[1]), match[2], match[3] or ""


def log_dir_name(topic: str, index: int) -> str:
    return f"{topic}-{index}"


def parse_log_dir_name(name: str) -> tuple[str, int] | None:
    match = _LOG_DIR_PATTERN.fullmatch(name)
    return None if match is None else (match[1], int(match[2]))


def log_delete_dir_name(topic: str, index: int, unique_hex: str) -> str:
    return _shortened_dir_name(topic, f"-{index}.{unique_hex}-delete")


def log_stray_dir_name(topic: str, index: int, unique_hex: str) -> str:
    """For data that no longer belongs to a topic; only an operator removes it."""
    return _shortened_dir_name(topic, f"-{index}.{unique_hex}-stray")


def _shortened_dir_name(topic: str, tail: str) -> str:
    """Shortens the topic's name if the whole name would not fit a file name."""
    return topic[: FILE_NAME_BYTES_MAX - len(tail)] + tail


def is_log_delete_dir_name(name: str) -> bool:
    return _LOG_DELETE_DIR_PATTERN.fullmatch(name) is not None


META_PROPERTIES_FILE: Final = "meta.properties"
#: Holds the id under which this folder votes, if that is no longer its directory id.
VOTER_ID_FILE: Final = "penstock-voter-id"


class InconsistentMetaProperties(Exception):
    """The folder belongs to another node or cluster, or its `meta.properties` is unusable."""


class MetaProperties(NamedTuple):
    """`cluster_id` is empty while the node looks for its cluster."""

    cluster_id: str
    node_id: int
    directory_id: UUID


def load_or_create_meta_properties(
    directory: Path, *, node_id: int, cluster_id: str | None, founding: bool = True
) -> MetaProperties:
    """Returns the owner named in the folder; a folder without an owner becomes this node's.

    A `founding` node gives its cluster an id at once; any other node takes the id of the cluster that it joins.
    Raises InconsistentMetaProperties.
    """
    path = directory / META_PROPERTIES_FILE
    if not path.exists():
        meta_properties = MetaProperties(
            cluster_id=cluster_id or "", node_id=node_id, directory_id=_new_directory_id()
        )
        return (
            _write_meta_properties(directory, meta_properties)
            if meta_properties.cluster_id or not founding
            else assign_cluster_id(directory, meta_properties)
        )
    meta_properties = _parse_meta_properties(path)
    if meta_properties.node_id != node_id:
        raise InconsistentMetaProperties(
            f"{directory} belongs to node {meta_properties.node_id}, this is node {node_id}"
        )
    if not meta_properties.cluster_id and (cluster_id or founding):
        return assign_cluster_id(directory, meta_properties, cluster_id)
    if cluster_id is not None and meta_properties.cluster_id != cluster_id:
        raise InconsistentMetaProperties(
            f"{directory} belongs to cluster {meta_properties.cluster_id}, not to {cluster_id}"
        )
    return meta_properties


def read_meta_properties(directory: Path) -> MetaProperties:
    """Raises InconsistentMetaProperties."""
    if not (directory / META_PROPERTIES_FILE).exists():
        raise InconsistentMetaProperties(f"{directory} has no {META_PROPERTIES_FILE}")
    return _parse_meta_properties(directory / META_PROPERTIES_FILE)


def assign_cluster_id(
    directory: Path, meta_properties: MetaProperties, cluster_id: str | None = None
) -> MetaProperties:
    """Assigns the folder to this cluster, or to a new one."""
    assert not meta_properties.cluster_id, f"{directory} belongs to cluster {meta_properties.cluster_id}"
    return _write_meta_properties(
        directory, meta_properties._replace(cluster_id=cluster_id or format_uuid(uuid4()))
    )


def read_voter_id(directory: Path) -> UUID | None:
    """Returns None while the folder votes under its directory id. Raises InconsistentMetaProperties."""
    try:
        return parse_uuid((directory / VOTER_ID_FILE).read_text().strip())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise InconsistentMetaProperties(
            f"{directory / VOTER_ID_FILE} cannot be understood: {error}"
        ) from None


def renew_voter_id(directory: Path) -> UUID:
    """Makes all earlier votes and acknowledgements those of another voter. Durable when it returns. Raises OSError."""
    voter_id = _new_directory_id()
    replace_durably(directory / VOTER_ID_FILE, format_uuid(voter_id).encode())
    return voter_id


def write_topic_id(folder: Path, topic_id: UUID) -> None:
    replace_durably(
        folder / PARTITION_METADATA_FILE, f"version: 0\ntopic_id: {format_uuid(topic_id)}".encode()
    )


def read_topic_id(folder: Path) -> UUID | None:
    """Returns None if the file is missing or malformed."""
    try:
        lines = (folder / PARTITION_METADATA_FILE).read_text().splitlines()
        values = dict(line.split(": ", 1) for line in lines if line)
        return parse_uuid(values["topic_id"]) if values["version"] == "0" else None
    except (FileNotFoundError, ValueError, KeyError):
        return None


def format_uuid(value: UUID) -> str:
    """Formats an id as Kafka does: URL-safe base64 without padding."""
    return urlsafe_b64encode(value.bytes).rstrip(b"=").decode()


def parse_uuid(text: str) -> UUID:
    """Raises ValueError."""
    return UUID(bytes=urlsafe_b64decode(text + "=" * (-len(text) % 4)))


def _new_directory_id() -> UUID:
    # Kafka reserves the first ids for "unassigned", "lost" and "migrating".
    while (candidate := uuid4()).int < 100:
        pass
    return candidate


def _write_meta_properties(directory: Path, meta_properties: MetaProperties) -> MetaProperties:
    cluster = f"cluster.id={meta_properties.cluster_id}\n" if meta_properties.cluster_id else ""
    directory_id = format_uuid(meta_properties.directory_id)
    lines = f"#\n{cluster}directory.id={directory_id}\nnode.id={meta_properties.node_id}\nversion=1\n"
    replace_durably(directory / META_PROPERTIES_FILE, lines.encode())
    return meta_properties


def _parse_meta_properties(path: Path) -> MetaProperties:
    try:
        lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
        values = dict(line.split("=", 1) for line in lines)
        if values["version"] != "1":
            raise InconsistentMetaProperties(f"{path} has version {values['version']}, only 1 is known")
        return MetaProperties(
            cluster_id=values.get("cluster.id", ""),
            node_id=int(values["node.id"]),
            directory_id=parse_uuid(values["directory.id"]),
        )
    except (ValueError, KeyError) as error:
        raise InconsistentMetaProperties(f"{path} cannot be understood: {error}") from None


BOOT_FILE: Final = ".boot"
_BOOT_ID_PATH: Final = Path("/proc/sys/kernel/random/boot_id")
UNKNOWN_BROKER_EPOCH: Final = -1


class BrokerRun(NamedTuple):
    """`boot_id` is None if the system has none: the next run then cannot know whether the machine restarted."""

    boot_id: str | None
    broker_epoch: int


def current_boot_id(source: Path = _BOOT_ID_PATH) -> str | None:
    try:
        return source.read_bytes().decode("ascii").strip() or None
    except (OSError, UnicodeDecodeError):
        return None


def previous_broker_epoch(directory: Path, *, stopped_cleanly: bool, boot_id: str | None) -> int:
    """Returns the broker epoch of the last run if none of its writes can be lost, otherwise -1."""
    last = _read_run(directory)
    if last is None:
        return UNKNOWN_BROKER_EPOCH
    same_boot = is_same_boot(directory, boot_id)
    return last.broker_epoch if stopped_cleanly or same_boot else UNKNOWN_BROKER_EPOCH


def is_same_boot(directory: Path, boot_id: str | None) -> bool:
    """Whether the machine has been up since the last run: then all writes of that run are still there."""
    last = _read_run(directory)
    return last is not None and boot_id is not None and last.boot_id == boot_id


def note_run(directory: Path, run: BrokerRun) -> None:
    """Blocking. Durable when it returns."""
    text = json.dumps({"version": 0, "bootId": run.boot_id, "brokerEpoch": run.broker_epoch})
    replace_durably(directory / BOOT_FILE, text.encode())


def _read_run(directory: Path) -> BrokerRun | None:
    try:
        values = json.loads((directory / BOOT_FILE).read_bytes())
        return BrokerRun(values["bootId"], int(values["brokerEpoch"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None  # missing or torn: nothing is known
