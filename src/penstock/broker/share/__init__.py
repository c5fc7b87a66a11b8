"""Share groups on the leaders of partitions: sessions, hand-outs and acknowledgements."""
