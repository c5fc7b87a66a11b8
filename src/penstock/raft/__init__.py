"""The Raft rules of the metadata quorum: elections, commits and the voter set. Pure: events in, actions out, no I/O."""
