"""Who may do what, and how much of it: `penstock user`, `penstock acl` and `penstock quota`."""
