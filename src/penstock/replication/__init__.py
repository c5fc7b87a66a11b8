"""The pure rules of replicating one partition: what a leader may commit, and how a follower handles a fetch reply."""
