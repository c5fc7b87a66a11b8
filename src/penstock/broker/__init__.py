"""The broker: everything of a node that does I/O, from sockets and tasks to files."""
