"""`penstock demo`: a small but complete example on one machine.

Orders flow, fail, are repaired, counted and archived. A shop publishes orders, a plain consumer group bills them, Spark
cleans, sums up and archives them, and dead letters are replayed once their cause is gone. The broker and Spark run in
their own processes, the rest in threads of this process.
"""
