"""One partition on disk (`Log`), and all partitions of a node's data directory (`LogManager`).

The layout on disk is Kafka's: segments with sparse indexes, checkpoints, producer snapshots, leader epochs.
"""
