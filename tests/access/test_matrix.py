"""The matrix of access: this broker answers every case as Apache Kafka does, by the table that was recorded there."""

from pathlib import Path
from typing import Any, NamedTuple

from tests.access.matrix import GROUP, NOT_PLAYED, TOPIC, VARIANTS, recorded
from tests.access.ours import play_here

from penstock.broker.network.apis import APIS


def test_every_api_is_played() -> None:
    assert {variant.api_key for variant in VARIANTS} == APIS.keys() - NOT_PLAYED


class Difference(NamedTuple):
    """What Penstock answers in the place of Apache Kafka's answer, and why."""

    reason: str
    answer: dict[str, Any]
    #: Whether the answer of Apache Kafka is as good.
    is_always: bool = True


def _not_of_share_groups(path: str) -> Difference:
    return Difference(
        "the group of the matrix is no share group: Kafka says so before it looks at topics",
        {"refused": [f"{path}=topic_authorization_failed"], "shown": [TOPIC]},
    )


_NO_SHARE_GROUP = Difference(
    "the group of the matrix is no share group: Penstock says so and repeats no topics, Kafka repeats them",
    {"refused": [], "shown": [GROUP]},
)
_REFUSED_AS_A_WHOLE = Difference(
    "the request is refused as a whole: Kafka repeats the topics of the request, Penstock does not",
    {"refused": ["error_code=cluster_authorization_failed"], "shown": []},
)
_NO_START_TIME = Difference(
    "the transaction of the matrix may be in a state without a start time, which this reader takes for damage",
    {"unreadable": True},
    is_always=False,
)
#: Answers that differ for reasons that are not about access; docs/differences.md has the same list. What these requests
#: show and hide where there is something to see is tested in test_replies.py.
DIFFERENT: dict[str, Difference] = {
    **{
        f"alter_share_group_offsets: READ on TOPIC {mode}": _not_of_share_groups(
            "responses.partitions.error_code"
        )
        for mode in ("denied", "wrong host", "wrong type")
    },
    **{
        f"delete_share_group_offsets: READ on TOPIC {mode}": _not_of_share_groups("responses.error_code")
        for mode in ("denied", "wrong host", "wrong type")
    },
    **{
        f"describe_share_group_offsets: {case}": _NO_SHARE_GROUP
        for case in (
            "allowed",
            "DESCRIBE on GROUP prefix",
            "DESCRIBE on TOPIC denied",
            "DESCRIBE on TOPIC prefix",
            "DESCRIBE on TOPIC wrong host",
            "DESCRIBE on TOPIC wrong type",
        )
    },
    **{
        f"list_partition_reassignments: {case}": _REFUSED_AS_A_WHOLE
        for case in (
            "no rule",
            "DESCRIBE on CLUSTER denied",
            "DESCRIBE on CLUSTER wrong host",
            "DESCRIBE on CLUSTER wrong type",
        )
    },
    **{
        f"describe_transactions: {case}": _NO_START_TIME
        for case in ("allowed", "DESCRIBE on TRANSACTIONAL_ID prefix")
    },
}


async def test_every_answer_is_that_of_the_table(tmp_path: Path) -> None:
    table = recorded()
    expected = table["answers"] | table["between_nodes"]
    assert DIFFERENT.keys() <= expected.keys()
    answers = await play_here(tmp_path)
    assert answers.keys() == expected.keys()
    expected |= {
        label: difference.answer
        for label, difference in DIFFERENT.items()
        if difference.is_always or answers[label] != expected[label]
    }
    differing = {
        label: (answers[label], expected[label]) for label in answers if answers[label] != expected[label]
    }
    assert differing == {}


def test_the_documentation_has_the_reasons_of_the_differences() -> None:
    page = Path(__file__).parents[2].joinpath("docs/differences.md").read_text()
    for label, difference in DIFFERENT.items():
        if not difference.is_always:
            continue
        api = "".join(part.capitalize() for part in label.partition(":")[0].split("_"))
        assert f"| {api} |" in page, label
        assert difference.answer != recorded()["answers"][label], f"{label} does not differ any more"
