"""One share partition on its leader: which record is with whom, and what has to be stored before anyone hears of it."""
