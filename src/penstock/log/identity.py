"""Whose data a folder holds: `meta.properties` for the node, `partition.metadata` for a topic's id."""

from base64 import urlsafe_b64decode, urlsafe_b64encode
from pathlib import Path
from typing import Final, NamedTuple
from uuid import UUID, uuid4

from penstock.log.checkpoints import replace_durably
from penstock.log.names import PARTITION_METADATA

META_PROPERTIES: Final = "meta.properties"
#: Under which id this folder votes, where that is not its directory id any more.
VOTER_ID: Final = "penstock-voter-id"


class WrongOwner(Exception):
    """The folder belongs to another node or cluster, or its `meta.properties` says nothing we can use."""


class Owner(NamedTuple):
    """`cluster_id` is empty while the node looks for its cluster."""

    cluster_id: str
    node_id: int
    directory_id: UUID


def claim(directory: Path, *, node_id: int, cluster_id: str | None, founding: bool = True) -> Owner:
    """The owner that the folder names; a folder that names none becomes this node's. Raises WrongOwner.

    One that is `founding` gives its cluster an id at once; any other takes the id of the cluster that it joins.
    """
    path = directory / META_PROPERTIES
    if not path.exists():
        owner = Owner(cluster_id=cluster_id or "", node_id=node_id, directory_id=_new_directory_id())
        return _save(directory, owner) if owner.cluster_id or not founding else join(directory, owner)
    owner = _decode(path)
    if owner.node_id != node_id:
        raise WrongOwner(f"{directory} belongs to node {owner.node_id}, this is node {node_id}")
    if not owner.cluster_id and (cluster_id or founding):
        return join(directory, owner, cluster_id)
    if cluster_id is not None and owner.cluster_id != cluster_id:
        raise WrongOwner(f"{directory} belongs to cluster {owner.cluster_id}, not to {cluster_id}")
    return owner


def owner_of(directory: Path) -> Owner:
    """Raises WrongOwner."""
    if not (directory / META_PROPERTIES).exists():
        raise WrongOwner(f"{directory} has no {META_PROPERTIES}")
    return _decode(directory / META_PROPERTIES)


def join(directory: Path, owner: Owner, cluster_id: str | None = None) -> Owner:
    """The folder belongs to this cluster, or to a new one, from now on."""
    assert not owner.cluster_id, f"{directory} belongs to cluster {owner.cluster_id}"
    return _save(directory, owner._replace(cluster_id=cluster_id or uuid_text(uuid4())))


def read_voter_id(directory: Path) -> UUID | None:
    """None while the folder votes under its directory id. Raises WrongOwner."""
    try:
        return parse_uuid((directory / VOTER_ID).read_text().strip())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise WrongOwner(f"{directory / VOTER_ID} cannot be understood: {error}") from None


def renew_voter_id(directory: Path) -> UUID:
    """Durable when it returns: what was voted and acknowledged here before is another voter's. Raises OSError."""
    voter_id = _new_directory_id()
    replace_durably(directory / VOTER_ID, uuid_text(voter_id).encode())
    return voter_id


def write_topic_id(folder: Path, topic_id: UUID) -> None:
    replace_durably(folder / PARTITION_METADATA, f"version: 0\ntopic_id: {uuid_text(topic_id)}".encode())


def read_topic_id(folder: Path) -> UUID | None:
    """None when the file is missing or says something else."""
    try:
        lines = (folder / PARTITION_METADATA).read_text().splitlines()
        values = dict(line.split(": ", 1) for line in lines if line)
        return parse_uuid(values["topic_id"]) if values["version"] == "0" else None
    except (FileNotFoundError, ValueError, KeyError):
        return None


def uuid_text(value: UUID) -> str:
    """As Kafka prints ids: base64 for URLs, without padding."""
    return urlsafe_b64encode(value.bytes).rstrip(b"=").decode()


def parse_uuid(text: str) -> UUID:
    """Raises ValueError."""
    return UUID(bytes=urlsafe_b64decode(text + "=" * (-len(text) % 4)))


def _new_directory_id() -> UUID:
    # The first ids are Kafka's own words for "unassigned", "lost" and "migrating".
    while (candidate := uuid4()).int < 100:
        pass
    return candidate


def _save(directory: Path, owner: Owner) -> Owner:
    cluster = f"cluster.id={owner.cluster_id}\n" if owner.cluster_id else ""
    lines = f"#\n{cluster}directory.id={uuid_text(owner.directory_id)}\nnode.id={owner.node_id}\nversion=1\n"
    replace_durably(directory / META_PROPERTIES, lines.encode())
    return owner


def _decode(path: Path) -> Owner:
    try:
        lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
        values = dict(line.split("=", 1) for line in lines)
        if values["version"] != "1":
            raise WrongOwner(f"{path} has version {values['version']}, only 1 is known")
        return Owner(
            cluster_id=values.get("cluster.id", ""),
            node_id=int(values["node.id"]),
            directory_id=parse_uuid(values["directory.id"]),
        )
    except (ValueError, KeyError) as error:
        raise WrongOwner(f"{path} cannot be understood: {error}") from None
