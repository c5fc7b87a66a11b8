"""The share coordinator: the stored state of share partitions and their dead letters, in `__share_group_state`."""
