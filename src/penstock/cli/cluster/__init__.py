"""`penstock cluster`, and the local cluster that `cluster start` and `serve --workers` run."""
