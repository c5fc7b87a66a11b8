"""Share groups on a broker: share sessions, fetches and acknowledgements on partition leaders, and the share
coordinator, which stores the state of share partitions and writes their dead letters.
"""
