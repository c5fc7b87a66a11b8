"""The state of share partitions, and the dead letters that it owes: pure rules of `__share_group_state`."""
