"""Scheduled delivery, the rules: which records are held, in which order they go, and what is known to be done.

A record with a schedule header is taken out of its batch and kept in a control batch right before it (`intake`). From
there it goes, with the position of its source, into a shard's log (`moving`, `shard`). The shard keeps an index of due
times in blocks that its host puts on disk (`ladder`) and releases what is due by plan, source by source (`release`).
"""
