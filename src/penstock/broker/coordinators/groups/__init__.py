"""The group coordinator on a broker: classic, consumer, share and streams groups."""
