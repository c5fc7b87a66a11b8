"""A Delta table as a writer sees it: look, decide, and commit from what was looked at.

Delta itself does not keep anybody from committing a batch twice. So a commit is made from one handle, after looking
there, and only as the very next version: whoever commits in between makes it fail, and then everything is looked at
anew.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

from penstock.spark.archive.ends import Ends
from penstock.spark.archive.errors import ArchiveError, Overtaken
from penstock.spark.archive.files import DataFile
from penstock.spark.archive.fitting import new_fields, table_schema
from penstock.spark.archive.location import Location
from penstock.spark.decisions import MicroBatch

#: What a commit tells of itself.
ABOUT: Final = "penstock"
#: Commits are small and many, so readers need them summed up often, and nobody needs them for long.
SETTINGS: Final = {
    "delta.checkpointInterval": "50",
    "delta.logRetentionDuration": "interval 7 days",
    "delta.deletedFileRetentionDuration": "interval 1 days",
}


class Table:
    """As it was when it was last looked at."""

    def __init__(self, location: Location, handle: Any) -> None:
        self.location = location
        self.handle = handle

    def __repr__(self) -> str:
        return f"<Table {self.location} version {self.version}>"

    @classmethod
    def open(cls, location: Location, version: int | None = None) -> Table | None:
        """None where there is none. Raises ArchiveError."""
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
        cls, location: Location, schema: str, partition_by: str | None, properties: Mapping[str, str]
    ) -> Table:
        """For rows with this schema, unless somebody else is faster. Raises ArchiveError."""
        from deltalake import DeltaTable, Schema
        from deltalake.exceptions import DeltaError

        try:
            DeltaTable.create(
                location.uri,
                Schema.from_json(table_schema(schema)),
                mode="ignore",
                partition_by=[] if partition_by is None else [partition_by],
                configuration={**SETTINGS, **properties},
                storage_options=dict(location.options),
                raise_if_key_not_exists=False,
            )
        except (DeltaError, OSError, ValueError) as trouble:
            found = cls.open(location)
            if found is None:
                raise ArchiveError(f"table {location} cannot be made: {trouble}") from None
            return found
        found = cls.open(location)
        assert found is not None, f"{location} was just made"
        location.make_durable([_log_path(0)])
        return found

    # Looking

    def look(self) -> None:
        """As it is now. Raises ArchiveError."""
        from deltalake.exceptions import DeltaError

        try:
            self.handle.update_incremental()
        except (DeltaError, OSError) as trouble:
            raise ArchiveError(f"table {self.location} cannot be looked at: {trouble}") from None

    @property
    def version(self) -> int:
        return int(self.handle.version())

    @property
    def schema(self) -> str:
        """As JSON of Spark."""
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

    def ends(self, topic: str) -> Ends:
        return Ends.found(topic, self.handle.transaction_version)

    def files(self) -> Any:
        """A row of an Arrow table for each."""
        import pyarrow as pa

        return pa.table(self.handle.get_add_actions(flatten=True))

    def paths(self) -> list[str]:
        """Of all files, relative to the table."""
        return [str(path) for path in self.files().column("path").to_pylist()]

    # Changing

    def widen(self, schema: str) -> None:
        """Give it the columns that rows with this schema have in addition. Raises SchemaChanged, Overtaken."""
        from deltalake import Field
        from deltalake.exceptions import DeltaError

        added = new_fields(self.schema, schema, str(self.location))
        if not added:
            return
        try:
            self.handle.alter.add_columns([Field.from_json(json.dumps(each)) for each in added])
        except DeltaError as trouble:
            raise Overtaken(f"table {self.location} could not be widened: {trouble}") from None
        self.look()

    def tell(self, properties: Mapping[str, str]) -> None:
        """Have it say that of itself. Raises Overtaken."""
        from deltalake.exceptions import DeltaError

        known = self.properties
        new = {name: value for name, value in properties.items() if known.get(name) != value}
        if not new:
            return
        try:
            self.handle.alter.set_table_properties(new, raise_if_not_exists=False)
        except DeltaError as trouble:
            raise Overtaken(f"table {self.location} could not be changed: {trouble}") from None
        self.look()

    def append(
        self,
        files: Iterable[DataFile],
        batch: MicroBatch,
        transactions: Mapping[str, int],
        about: Mapping[str, Any],
    ) -> None:
        """All of these as the next version after the one that was looked at. Raises Overtaken."""
        from deltalake import CommitProperties, Transaction
        from deltalake.exceptions import DeltaError

        partition_by = self.partition_by
        properties = CommitProperties(
            custom_metadata={ABOUT: {"query": batch.query, "batch": batch.number, **about}},
            # Delta would look for conflicts and go on by itself, and it does not know what we looked at.
            max_commit_retries=0,
            app_transactions=[
                Transaction(name, version)
                for name, version in {batch.query: batch.number, **transactions}.items()
            ],
        )
        try:
            self.handle.create_write_transaction(
                [_add(each, partition_by) for each in files],
                "append",
                self.handle.schema(),
                partition_by,
                commit_properties=properties,
            )
        except (DeltaError, OSError) as trouble:
            # It may be there all the same: only looking again can tell.
            raise Overtaken(f"{batch} could not be committed to table {self.location}: {trouble}") from None
        self.location.make_durable([_log_path(self.version + 1)])
        self.look()


def _log_path(version: int) -> str:
    return f"_delta_log/{version:020d}.json"


def _add(file: DataFile, partition_by: list[str]) -> Any:
    from deltalake.transaction import AddAction

    return AddAction(
        path=file.path,
        size=file.size_bytes,
        partition_values=dict.fromkeys(partition_by, file.value),
        modification_time=file.written_ms,
        data_change=True,
        stats=file.statistics,
    )
