"""Dead letters looked at, corrected, replayed and given up: each replayed once, whoever asks and whatever is killed.

Beside every topic of dead letters is a compacted list (`<topic>.replayed`) of those that are done with. A letter is put
on it in the same transaction in which its record is published, and whoever writes to the list has taken the turn first,
so that nobody who came before can write any more. Replays on Spark keep the same list and take the same turn.
"""
