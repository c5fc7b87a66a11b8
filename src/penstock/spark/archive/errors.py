"""What can go wrong with an archive. Every message is a sentence for whoever runs it."""

from penstock.client.errors import ClientError


class ArchiveError(ClientError):
    """The table cannot be written or read."""


class SchemaChanged(ArchiveError):
    """Rows have columns that do not fit the table."""


class GapError(ArchiveError):
    """Records are neither in the table nor in the topic any more."""


class Overtaken(ArchiveError):
    """Somebody else has committed to the table since it was looked at; look again."""
