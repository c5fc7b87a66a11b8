"""The `penstock` command: one file per verb, imports kept lazy so that starting stays fast."""
