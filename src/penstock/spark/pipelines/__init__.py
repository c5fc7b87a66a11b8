"""Pipelines: functions from DataFrame to DataFrame with a source, a sink, a delivery contract and an error policy."""
