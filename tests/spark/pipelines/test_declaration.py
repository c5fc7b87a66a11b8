"""A wrong declaration is refused with a message, before Spark starts."""

import pytest

from penstock.spark import Errors, Source, TopicSink, json_rows, pipeline, row_function
from penstock.spark.pipelines.declaration import Pipeline, PipelineError, pipeline_group, pipeline_of_group
from penstock.spark.sink.options import Contract

IDS = json_rows("id STRING")


def test_a_complete_declaration():
    @row_function("id STRING, total DOUBLE")
    def price(order):
        return order

    @pipeline(
        "clean", source=["a", "b"], sink="c", delivery="exactly-once", every="2s", parse=IDS, rows=[price]
    )
    def clean(rows):
        return [*rows, "seen"]

    assert isinstance(clean, Pipeline)
    assert (clean.source.topics, clean.sink, clean.every_ms) == (("a", "b"), TopicSink(topic="c"), 2000)
    assert (clean.delivery, clean.group) == (Contract.EXACTLY_ONCE, "penstock-pipeline-clean")
    assert clean.rows[0]({"id": 1}) == {"id": 1}
    assert clean([]) == ["seen"]
    assert pipeline_of_group(pipeline_group("clean")) == "clean"
    assert pipeline_of_group("billing") is None
    assert not pipeline("once", source="a", every=None)(clean).every_ms


WRONG = [
    ({"name": "a b"}, "cannot be named 'a b'"),
    ({"source": "a/b"}, "'a/b' is not a valid topic name"),
    ({"source": Source()}, "either topics or a pattern"),
    ({"source": Source(pattern="(")}, "is not a regular expression"),
    ({"source": 5}, "source must be a topic, a list of topics or a Source, not 5"),
    ({"sink": "orders"}, "the pipeline would read its own output"),
    ({"sink": object()}, "have the methods write, describe and prepare"),
    ({"delivery": "twice"}, "must be one of at-most-once, at-least-once, exactly-once"),
    ({"delivery": "at-most-once", "stateful": True}, "a stateful pipeline cannot be at-most-once"),
    ({"every": "soon"}, "every='soon' must be a time such as 500ms"),
    ({"parse": "id STRING"}, "is not a parser; use json_rows or avro_rows"),
    ({"rows": [len]}, "len needs its output columns"),
    ({"errors": Errors(attempts=0)}, "errors.attempts must be at least 1"),
    ({"output_mode": "complete"}, "must be one of append, update"),
]


@pytest.mark.parametrize(
    ("given", "words"), WRONG, ids=[f"{n}-{next(iter(given))}" for n, (given, _) in enumerate(WRONG)]
)
def test_a_wrong_declaration_is_refused(given, words):
    settings = {"name": "clean", "source": "orders", **given}
    with pytest.raises(PipelineError) as raised:
        pipeline(settings.pop("name"), **settings)(lambda rows: rows)
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


def test_schemas_that_cannot_be_read_are_refused(tmp_path):
    with pytest.raises(PipelineError, match=r"nowhere.json cannot be read"):
        json_rows("nowhere.json")
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    with pytest.raises(PipelineError, match="is not valid JSON"):
        json_rows(broken)
    with pytest.raises(PipelineError, match="needs the columns that it returns"):
        row_function("")
