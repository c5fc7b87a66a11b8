"""The coordinator runtime: loads the shards of an internal topic, runs operations on them and replies when their
records are committed.
"""
