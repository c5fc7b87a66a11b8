"""penstock.spark.source"""
