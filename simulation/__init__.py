"""A seeded world in which the rules of a cluster run on a simulated network, disk and clock.

Nothing here reads a wall clock or an unseeded random number: the same seed gives the same run, so a failure is
its seed. The shells are thin and mirror the broker's: durable before visible.
"""
