"""Topics as Spark sources, sinks and tables, and the pipelines that run on them. Needs the `spark` extra."""
