"""`penstock dlq`: list, show, edit, replay and purge dead letters."""
