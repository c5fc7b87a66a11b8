"""Pipelines: declared in Python, run by Spark, watched on a board that any machine can read."""
