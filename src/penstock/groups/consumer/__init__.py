"""Groups whose members are assigned partitions by the coordinator, each at its own pace (KIP-848)."""
