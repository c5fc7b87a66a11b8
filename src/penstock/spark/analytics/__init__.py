"""Built-in pipelines and jobs that analyze topics: duplicate messages, rates and lag, hot keys."""

from __future__ import annotations

from penstock.spark.analytics.dedupe import dedupe
from penstock.spark.analytics.hotkeys import heaviest_keys, hotkeys
from penstock.spark.analytics.metrics import metrics

__all__ = ["dedupe", "heaviest_keys", "hotkeys", "metrics"]
