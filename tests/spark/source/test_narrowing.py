"""Filters that are pushed down to the plan leave out only rows that they filter out."""

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
def test_with_what_is_left_for_spark_the_filters_keep_the_same_rows(given_filters):
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


def test_a_time_narrows_but_is_left_to_spark():
    moment = datetime(2024, 5, 1, 12, 0, 0, 1999, tzinfo=UTC)
    pushed_filters, is_done = PushedFilters().narrow("timestamp", "GreaterThan", moment)
    assert not is_done
    assert pushed_filters.since_ms == int(datetime(2024, 5, 1, 12, tzinfo=UTC).timestamp() * 1000) + 1
    elsewhere = moment.astimezone(timezone(timedelta(hours=5)))
    assert PushedFilters().narrow("timestamp", "EqualTo", elsewhere)[0] == pushed_filters


def test_an_upper_bound_of_time_narrows_nothing():
    """Records are not in the order of their timestamps: a late one may be an early one."""
    moment = datetime(2024, 5, 1, tzinfo=UTC)
    assert PushedFilters().narrow("timestamp", "LessThan", moment) == (PushedFilters(), False)


def test_columns_that_are_never_null_need_no_look():
    assert PushedFilters().narrow("offset", "IsNotNull", None) == (PushedFilters(), True)
    assert PushedFilters().narrow("key", "IsNotNull", None) == (PushedFilters(), False)


def test_what_is_not_understood_is_left_to_spark():
    assert PushedFilters().narrow("value", "EqualTo", b"x") == (PushedFilters(), False)
    assert PushedFilters().narrow("offset", "Not", 1) == (PushedFilters(), False)
    assert PushedFilters().narrow("offset", "EqualNullSafe", None) == (PushedFilters(), False)
