"""Share groups (KIP-932): this package has their members and assignments, at the group coordinator.

`partition` is one share partition on its leader. `state` is the stored state of share partitions at the share
coordinator.
"""
