"""The network layer: listeners, connections, request dispatch, connections to other nodes, and the HTTP endpoint."""
