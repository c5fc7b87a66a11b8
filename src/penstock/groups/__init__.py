"""Consumer groups and committed offsets as state machines. Pure: no I/O, no clock."""
