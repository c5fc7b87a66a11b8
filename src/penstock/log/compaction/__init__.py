"""Log compaction: choosing a log, one pass over it, and the rules for what is retained of each batch."""
