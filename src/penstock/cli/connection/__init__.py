"""How every verb reaches a cluster, with one set of options: address, context, settings file and single settings.

`open_cluster` opens the client of `penstock.client`, which all verbs use to look at a cluster and to change it.
`produce`, `consume` and `outbox relay` also need confluent-kafka, for batches, rebalances and transactions that
overlap with the program's own work. `connection.librdkafka` gives it the same settings, so that a security setting
reaches both.
"""

from penstock.cli.connection.cluster import open_cluster
from penstock.cli.connection.options import ConnectionOptions

__all__ = ("ConnectionOptions", "open_cluster")
