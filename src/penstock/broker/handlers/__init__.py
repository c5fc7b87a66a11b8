"""One file per API. Each file opens with its contract: key, versions, behaviour."""
