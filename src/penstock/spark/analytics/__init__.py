"""Pipelines and jobs that look at topics themselves: repeated messages, rates and lag, keys that are too heavy."""

from __future__ import annotations

from penstock.spark.analytics.dedupe import dedupe
from penstock.spark.analytics.hotkeys import heaviest_keys, hotkeys
from penstock.spark.analytics.metrics import metrics

__all__ = ["dedupe", "heaviest_keys", "hotkeys", "metrics"]
