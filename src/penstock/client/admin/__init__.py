"""Administration requests: the cluster and its quorum, groups of every type, and transactions.

A function that takes a `Connection` sends one request to that broker. A function that takes a `Cluster` finds the
brokers itself and retries as the cluster's settings say. Topics and settings are in `penstock.client.wire.topics`.
"""
