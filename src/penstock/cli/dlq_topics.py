"""Topics of dead letters by the names that users give, and whose turn it is to change them."""

import difflib
import uuid

from penstock.cli.failure import Failure
from penstock.client.cluster import Cluster
from penstock.client.deadletters.topics import NoLetters, find_topic
from penstock.client.deadletters.turns import Turn
from penstock.client.metadata import TopicInfo


def chosen_topic(cluster: Cluster, name: str) -> TopicInfo:
    try:
        return find_topic(cluster, name)
    except NoLetters as error:
        raise no_letters(error) from None


def no_letters(error: NoLetters) -> Failure:
    close = difflib.get_close_matches(error.name, error.known, n=1)
    hint = f"did you mean {close[0]}?" if close else "penstock dlq list shows what there is"
    return Failure(str(error), hint=hint)


def turn_of(cluster: Cluster, topic: TopicInfo) -> Turn:
    """The one that replays on Spark take, too; nothing of Spark itself is loaded for it."""
    from penstock.spark.replay.turns import LettersTurn

    return LettersTurn(cluster, topic.name)


def new_id() -> str:
    """By which the list knows what this command did."""
    return f"dlq-{uuid.uuid4().hex[:12]}"
