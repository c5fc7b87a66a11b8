"""Share state on the coordinator runtime: where it lives, how it is reached, and who buries its dead letters."""
