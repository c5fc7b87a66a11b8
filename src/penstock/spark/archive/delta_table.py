"""A Delta table as its writer sees it: read the current version, decide, and commit the next one.

Delta itself does not prevent a writer from committing a batch twice. So a writer reads and commits through the same
handle, and commits only as the version right after the one it read. If another writer commits in between, the commit
fails, and the writer reads everything again.

The table stores the end offset of each partition of its topic: the offset of the first record that is not archived. End
offsets are stored as Delta application transactions, one for each partition. They are part of the commit that adds the
rows, they outlive the commit files, which Delta cleans up after a time, and two writers that move the same end offset
cannot both succeed. The commit info repeats them for human readers.

New columns in the rows are added to the table; every other difference between rows and table is an error. Delta writes
schemas in Spark's JSON format, so both sides are compared as JSON.

Functions import deltalake themselves, because a command that lists pipelines does not need it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from penstock.client.errors import ClientError
from penstock.spark.archive.files import DataFile, TableLocation
from penstock.spark.exactly_once.decisions import MicroBatch


class ArchiveError(ClientError):
    """The table cannot be written or read."""


class SchemaChanged(ArchiveError):
    """The rows have columns that are incompatible with the table."""


class GapError(ArchiveError):
    """Records are neither in the table nor in the topic any more."""


class CommitConflict(ArchiveError):
    """Another writer has committed to the table since it was last read; read it again and retry."""


_TRANSACTION_PREFIX: Final = "penstock-archive"

#: Application id -> version of its last transaction, or None.
TransactionVersion = Callable[[str], int | None]


@dataclass(frozen=True, slots=True)
class EndOffsets:
    offsets: Mapping[int, int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.offsets)

    def of(self, partition: int) -> int:
        return self.offsets.get(partition, 0)

    def raised(self, offsets: Mapping[int, int]) -> EndOffsets:
        """Return the larger end offset for each partition; end offsets never move back."""
        both = sorted({*self.offsets, *offsets})
        return EndOffsets({each: max(self.of(each), offsets.get(each, 0)) for each in both})

    def transactions(self, topic: str, before: EndOffsets) -> dict[str, int]:
        """Return application id -> version for the end offsets that differ from `before`, for the next commit."""
        known = before._named(topic)
        return {name: version for name, version in self._named(topic).items() if known.get(name) != version}

    def _named(self, topic: str) -> dict[str, int]:
        found = {
            _end_transaction(topic, partition): offset for partition, offset in sorted(self.offsets.items())
        }
        return {**found, _count_transaction(topic): max(self.offsets, default=-1) + 1}

    @classmethod
    def found(cls, topic: str, look_up: TransactionVersion) -> EndOffsets:
        count = look_up(_count_transaction(topic)) or 0
        offsets = {partition: look_up(_end_transaction(topic, partition)) for partition in range(count)}
        return cls({partition: offset for partition, offset in offsets.items() if offset is not None})


def _end_transaction(topic: str, partition: int) -> str:
    return f"{_TRANSACTION_PREFIX}/{topic}/{partition}"


def _count_transaction(topic: str) -> str:
    return f"{_TRANSACTION_PREFIX}/{topic}/partitions"


def delta_schema(rows: str) -> str:
    """Return the table schema for rows with this schema. Every column is nullable, since later rows may lack it."""
    return json.dumps(_nullable_type(json.loads(rows)))


def added_fields(table: str, rows: str, name: str) -> list[dict[str, Any]]:
    """Return the columns that the table lacks. Raises SchemaChanged if adding columns is not enough."""
    known = {column["name"]: column for column in json.loads(table)["fields"]}
    wanted: list[dict[str, Any]] = json.loads(delta_schema(rows))["fields"]
    _refuse_other_types(known, wanted, name)
    added = [column for column in wanted if column["name"] not in known]
    _refuse_case_duplicates(known, added, name)
    return added


def _refuse_other_types(known: Mapping[str, Any], wanted: list[dict[str, Any]], name: str) -> None:
    for column in wanted:
        existing = known.get(column["name"])
        if existing is not None and _nullable_type(existing["type"]) != column["type"]:
            raise SchemaChanged(
                f"column {column['name']} of table {name} is {_type_name(existing['type'])}, but new rows have "
                f"{_type_name(column['type'])}: give the column another name, or archive to another table"
            )


def _refuse_case_duplicates(known: Mapping[str, Any], added: list[dict[str, Any]], name: str) -> None:
    alike = {each.lower(): each for each in known}
    for column in added:
        twin = alike.get(column["name"].lower())
        if twin is not None:
            raise SchemaChanged(
                f"table {name} has a column {twin}, and new rows have {column['name']}: "
                "in Delta, names of columns must differ in more than case"
            )


def _nullable_type(kind: Any) -> Any:
    """Return the type with everything nullable and without metadata."""
    if not isinstance(kind, dict):
        return kind
    match kind.get("type"):
        case "struct":
            return {"type": "struct", "fields": [_nullable_field(each) for each in kind["fields"]]}
        case "array":
            return {"type": "array", "elementType": _nullable_type(kind["elementType"]), "containsNull": True}
        case "map":
            sides = {side: _nullable_type(kind[side]) for side in ("keyType", "valueType")}
            return {"type": "map", **sides, "valueContainsNull": True}
        case _:
            return kind


def _nullable_field(field: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": field["name"], "type": _nullable_type(field["type"]), "nullable": True, "metadata": {}}


def _type_name(kind: Any) -> str:
    return kind if isinstance(kind, str) else str(kind["type"])


#: The key in Delta's commit info under which a commit describes itself.
COMMIT_INFO_KEY: Final = "penstock"
#: There are many small commits, so they need frequent Delta checkpoints and only a short retention.
TABLE_SETTINGS: Final = {
    "delta.checkpointInterval": "50",
    "delta.logRetentionDuration": "interval 7 days",
    "delta.deletedFileRetentionDuration": "interval 1 days",
}


class ArchiveTable:
    """A table at the version at which it was last read."""

    def __init__(self, location: TableLocation, handle: Any) -> None:
        self.location = location
        self.handle = handle

    def __repr__(self) -> str:
        return f"<ArchiveTable {self.location} version {self.version}>"

    @classmethod
    def open(cls, location: TableLocation, version: int | None = None) -> ArchiveTable | None:
        """Return the table, or None if it does not exist. Raises ArchiveError."""
        from deltalake import DeltaTable
        from deltalake.exceptions import DeltaError, TableNotFoundError

        try:
            return cls(location, DeltaTable(location.uri, version, dict(location.options)))
        except TableNotFoundError:
            return None
        except (DeltaError, OSError) as trouble:
            raise ArchiveError(f"table {location} cannot be opened: {trouble}") from None

    @classmethod
    def create(
        cls, location: TableLocation, schema: str, partition_by: str | None, properties: Mapping[str, str]
    ) -> ArchiveTable:
        """Create the table for rows with this schema, or open it if another writer created it first.

        Raises ArchiveError.
        """
        from deltalake import DeltaTable, Schema
        from deltalake.exceptions import DeltaError

        try:
            DeltaTable.create(
                location.uri,
                Schema.from_json(delta_schema(schema)),
                mode="ignore",
                partition_by=[] if partition_by is None else [partition_by],
                configuration={**TABLE_SETTINGS, **properties},
                storage_options=dict(location.options),
                raise_if_key_not_exists=False,
            )
        except (DeltaError, OSError, ValueError) as trouble:
            found = cls.open(location)
            if found is None:
                raise ArchiveError(f"table {location} cannot be created: {trouble}") from None
            return found
        found = cls.open(location)
        assert found is not None, f"{location} was just created"
        location.make_durable([_log_path(0)])
        return found

    # Reading

    def refresh(self) -> None:
        """Update this handle to the newest version of the table. Raises ArchiveError."""
        from deltalake.exceptions import DeltaError

        try:
            self.handle.update_incremental()
        except (DeltaError, OSError) as trouble:
            raise ArchiveError(f"table {self.location} cannot be read: {trouble}") from None

    @property
    def version(self) -> int:
        return int(self.handle.version())

    @property
    def schema(self) -> str:
        """The schema in Spark's JSON format."""
        return str(self.handle.schema().to_json())

    @property
    def properties(self) -> Mapping[str, str]:
        return dict(self.handle.metadata().configuration)

    @property
    def partition_by(self) -> list[str]:
        return list(self.handle.metadata().partition_columns)

    def has(self, batch: MicroBatch) -> bool:
        last = self.handle.transaction_version(batch.query)
        return last is not None and int(last) >= batch.number

    def ends(self, topic: str) -> EndOffsets:
        return EndOffsets.found(topic, self.handle.transaction_version)

    def files(self) -> Any:
        """Return an Arrow table with one row for each file."""
        import pyarrow as pa

        return pa.table(self.handle.get_add_actions(flatten=True))

    def paths(self) -> list[str]:
        """Return the paths of all files, relative to the table."""
        return [str(path) for path in self.files().column("path").to_pylist()]

    # Writing

    def add_columns(self, schema: str) -> None:
        """Add the columns of this schema that the table lacks. Raises SchemaChanged, CommitConflict."""
        from deltalake import Field
        from deltalake.exceptions import DeltaError

        added = added_fields(self.schema, schema, str(self.location))
        if not added:
            return
        try:
            self.handle.alter.add_columns([Field.from_json(json.dumps(each)) for each in added])
        except DeltaError as trouble:
            raise CommitConflict(f"table {self.location} could not get new columns: {trouble}") from None
        self.refresh()

    def set_properties(self, properties: Mapping[str, str]) -> None:
        """Set these table properties. Raises CommitConflict."""
        from deltalake.exceptions import DeltaError

        known = self.properties
        new = {name: value for name, value in properties.items() if known.get(name) != value}
        if not new:
            return
        try:
            self.handle.alter.set_table_properties(new, raise_if_not_exists=False)
        except DeltaError as trouble:
            raise CommitConflict(f"table {self.location} could not get new properties: {trouble}") from None
        self.refresh()

    def append(
        self,
        files: Iterable[DataFile],
        batch: MicroBatch,
        transactions: Mapping[str, int],
        about: Mapping[str, Any],
    ) -> None:
        """Commit the files and transactions as the version right after the one last read. Raises CommitConflict."""
        from deltalake import CommitProperties, Transaction
        from deltalake.exceptions import DeltaError

        partition_by = self.partition_by
        properties = CommitProperties(
            custom_metadata={COMMIT_INFO_KEY: {"query": batch.query, "batch": batch.number, **about}},
            # Delta's own conflict check does not know what we read, so it must not retry by itself.
            max_commit_retries=0,
            app_transactions=[
                Transaction(name, version)
                for name, version in {batch.query: batch.number, **transactions}.items()
            ],
        )
        try:
            self.handle.create_write_transaction(
                [_add_action(each, partition_by) for each in files],
                "append",
                self.handle.schema(),
                partition_by,
                commit_properties=properties,
            )
        except (DeltaError, OSError) as trouble:
            # The commit may have succeeded all the same: the caller must read the table again to find out.
            raise CommitConflict(
                f"{batch} could not be committed to table {self.location}: {trouble}"
            ) from None
        self.location.make_durable([_log_path(self.version + 1)])
        self.refresh()


def _log_path(version: int) -> str:
    return f"_delta_log/{version:020d}.json"


def _add_action(file: DataFile, partition_by: list[str]) -> Any:
    from deltalake.transaction import AddAction

    return AddAction(
        path=file.path,
        size=file.size_bytes,
        partition_values=dict.fromkeys(partition_by, file.value),
        modification_time=file.written_ms,
        data_change=True,
        stats=file.statistics,
    )
