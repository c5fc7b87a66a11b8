"""One share partition on its leader: which member holds which record, and what is stored before it is visible."""
