"""A small but whole story on one machine, `penstock demo`: orders that flow, fail, are mended, counted and kept.

A shop publishes orders, a plain group bills them, Spark cleans, sums up and archives them, and dead letters are
replayed once their cause is gone. Broker and Spark are processes of their own, the rest are threads of this one.
"""
