"""Classic groups: the members join and sync in rounds, and the group leader assigns the partitions."""
