"""Share state on the coordinator runtime: where it lives, how share partitions reach it, and who buries its dead letters."""
