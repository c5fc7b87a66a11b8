"""Pushed filters exclude only what they filter out."""

from datetime import UTC, datetime, timedelta, timezone

from hypothesis import given
from hypothesis import strategies as st

from penstock.spark.offsets import OffsetRange
from penstock.spark.source.batch import PushedFilters

RELATIONS = {
    "EqualTo": lambda one, other: one == other,
    "GreaterThan": lambda one, other: one > other,
    "GreaterThanOrEqual": lambda one, other: one >= other,
    "LessThan": lambda one, other: one < other,
    "LessThanOrEqual": lambda one, other: one <= other,
}
filters = st.tuples(
    st.sampled_from(["partition", "offset"]), st.sampled_from(sorted(RELATIONS)), st.integers(-2, 12)
)


@given(st.lists(filters, max_size=4))
def test_pushed_and_remaining_filters_keep_the_same_rows(given_filters):
    pushed_filters, left = PushedFilters(), []
    for each in given_filters:
        pushed_filters, is_done = pushed_filters.narrow(*each)
        if not is_done:
            left.append(each)
    everything = [OffsetRange("t", None, partition, 0, 10) for partition in range(3)]

    def passes(partition, offset, wanted):
        row = {"partition": partition, "offset": offset}
        return all(RELATIONS[relation](row[column], value) for column, relation, value in wanted)

    rows = [(each.partition, offset) for each in everything for offset in range(each.start, each.end)]
    read = [
        (each.partition, offset)
        for each in pushed_filters.narrowed(everything)
        for offset in range(each.start, each.end)
    ]
    assert [row for row in read if passes(*row, left)] == [row for row in rows if passes(*row, given_filters)]


def test_partitions_and_topics_by_list():
    pushed_filters, is_done = PushedFilters().narrow("partition", "In", (0, 2))
    assert is_done
    pushed_filters, is_done = pushed_filters.narrow("partition", "In", (2, 3))
    assert (pushed_filters.partitions, is_done) == (frozenset({2}), True)
    assert PushedFilters().narrow("topic", "EqualTo", "t")[0].topics == {"t"}


def test_a_lower_bound_of_time_is_pushed_and_applied_again_by_spark():
    time = datetime(2024, 5, 1, 12, 0, 0, 1999, tzinfo=UTC)
    pushed_filters, is_done = PushedFilters().narrow("timestamp", "GreaterThan", time)
    assert not is_done
    assert pushed_filters.since_ms == int(datetime(2024, 5, 1, 12, tzinfo=UTC).timestamp() * 1000) + 1
    elsewhere = time.astimezone(timezone(timedelta(hours=5)))
    assert PushedFilters().narrow("timestamp", "EqualTo", elsewhere)[0] == pushed_filters


def test_an_upper_bound_of_time_is_not_pushed():
    """Records are not ordered by timestamp: a later offset may have an earlier timestamp."""
    time = datetime(2024, 5, 1, tzinfo=UTC)
    assert PushedFilters().narrow("timestamp", "LessThan", time) == (PushedFilters(), False)


def test_not_null_is_always_true_for_columns_that_are_never_null():
    assert PushedFilters().narrow("offset", "IsNotNull", None) == (PushedFilters(), True)
    assert PushedFilters().narrow("key", "IsNotNull", None) == (PushedFilters(), False)


def test_other_filters_are_left_to_spark():
    assert PushedFilters().narrow("value", "EqualTo", b"x") == (PushedFilters(), False)
    assert PushedFilters().narrow("offset", "Not", 1) == (PushedFilters(), False)
    assert PushedFilters().narrow("offset", "EqualNullSafe", None) == (PushedFilters(), False)
