"""One file per API. Each opens with its contract: key, versions, behaviour."""
