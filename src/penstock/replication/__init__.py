"""Replication of one partition as pure rules: what a leader may call committed, what a follower does with an answer."""
