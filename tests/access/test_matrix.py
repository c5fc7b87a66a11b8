"""The matrix of access: this broker answers every case as Apache Kafka does, by the table that was recorded there."""

from pathlib import Path
from typing import Any, NamedTuple

from tests.access.matrix import (
    GROUP,
    MINE,
    NOT_PLAYED,
    RENEWED,
    TOPIC,
    VARIANTS,
    cases,
    cases_without_rules,
    recorded,
)
from tests.access.ours import OPEN, play_here

from penstock.broker.network.apis import APIS


def test_every_api_is_played() -> None:
    assert {variant.api_key for variant in VARIANTS} == APIS.keys() - NOT_PLAYED


class Difference(NamedTuple):
    """What Penstock answers in the place of Apache Kafka's answer, and why."""

    reason: str
    answer: dict[str, Any]


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
_TOKENS_OF_OTHERS = "allow.everyone.if.no.acl.found never lets clients create or see the tokens of others"
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
}


DIFFERENT_WITHOUT_RULES = {
    "create_delegation_token (of another): everyone allowed": Difference(
        _TOKENS_OF_OTHERS, {"refused": ["error_code=delegation_token_authorization_failed"], "shown": []}
    ),
    **{
        f"describe_delegation_token ({name}): everyone allowed": Difference(
            _TOKENS_OF_OTHERS, {"refused": [], "shown": shown}
        )
        for name, shown in (
            ("all", [MINE, RENEWED]),
            ("of another", [RENEWED]),
            ("of an owner", [RENEWED]),
        )
    },
    "describe_share_group_offsets: everyone allowed": _NO_SHARE_GROUP,
}


def check(answers: dict[str, Any], expected: dict[str, Any], different: dict[str, Difference]) -> None:
    assert different.keys() <= expected.keys()
    assert answers.keys() == expected.keys()
    expected |= {label: difference.answer for label, difference in different.items()}
    differing = {
        label: (answers[label], expected[label]) for label in answers if answers[label] != expected[label]
    }
    assert differing == {}


async def test_every_answer_is_that_of_the_table(tmp_path: Path) -> None:
    check(await play_here(tmp_path, cases()), recorded()["answers"], DIFFERENT)


async def test_every_answer_without_rules_is_that_of_the_table(tmp_path: Path) -> None:
    """With allow.everyone.if.no.acl.found."""
    answers = await play_here(tmp_path, cases_without_rules(), **OPEN)
    check(answers, recorded()["answers_without_rules"], DIFFERENT_WITHOUT_RULES)


def test_the_documentation_has_the_reasons_of_the_differences() -> None:
    page = Path(__file__).parents[2].joinpath("docs/differences.md").read_text()
    answers = recorded()["answers"] | recorded()["answers_without_rules"]
    for label, difference in (DIFFERENT | DIFFERENT_WITHOUT_RULES).items():
        if difference.reason == _TOKENS_OF_OTHERS:
            assert "lets everybody create and see the delegation tokens of others" in page
            continue
        api = "".join(part.capitalize() for part in label.partition(":")[0].split("_"))
        assert f"| {api} |" in page, label
        assert difference.answer != answers[label], f"{label} does not differ any more"
