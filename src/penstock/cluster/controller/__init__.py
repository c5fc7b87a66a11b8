"""The controller's decisions: each takes the image and what was asked, and returns records and a reply.

They change nothing: what they decide takes effect when the records are appended and replayed.
"""
