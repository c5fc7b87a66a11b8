"""The node: the only room with sockets and tasks."""
