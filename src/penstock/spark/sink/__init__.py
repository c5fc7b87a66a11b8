"""penstock.spark.sink"""
