"""The quorum's rules: who leads, what is committed, who may vote. Pure: events in, work out, no I/O."""
