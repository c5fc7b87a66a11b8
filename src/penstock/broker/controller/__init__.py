"""The active controller's work, and how a broker registers with, sends requests to and forwards to the controller."""
