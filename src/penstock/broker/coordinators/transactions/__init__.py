"""The transaction coordinator on a broker, the markers that it sends to partitions, and the verification that
partition leaders request from it.
"""
