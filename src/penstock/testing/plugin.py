"""The pytest plugin that users get by installing the package."""
