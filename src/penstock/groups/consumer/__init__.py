"""Consumer groups (KIP-848): the coordinator assigns partitions, and each member moves to them at its own pace."""
