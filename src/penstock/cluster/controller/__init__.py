"""The controller's decisions: each takes the image and a request, and returns records and a reply.

A decision changes nothing itself; it takes effect when its records are appended and replayed.
"""
