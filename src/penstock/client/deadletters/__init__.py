"""Reads, edits, replays and purges dead letters. Each one is replayed exactly once, even after crashes.

Beside each dead-letter topic is a compacted topic, `<topic>.replayed`, which lists the dead letters that are resolved:
replayed, edited or purged. One transaction publishes the record of a dead letter and adds the entry to that topic. A
writer first takes the replay lock, which fences every earlier writer. Replays on Spark use the same topic and the same
lock.
"""
