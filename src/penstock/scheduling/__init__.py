"""Scheduled delivery, the rules: which records are held, their release order, and what is known to be done.

`intake` takes a record with a schedule header out of its batch and stores it in a control batch right before that
batch. From there the record moves, together with the position of its source, into the log of a shard
(`schedule_log`, `schedule_shard`). The shard keeps an index of due times in blocks that the broker stores on disk
(`ladder_queue`). It releases due records source by source, each time according to a stored plan (`release`).
"""
