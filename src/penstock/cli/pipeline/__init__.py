"""`penstock pipeline`: run pipelines and jobs on Spark, show their status, stop, release and reset them."""
