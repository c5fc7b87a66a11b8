"""What a group's subscriptions come to: the topics behind regular expressions, and a hash that tells when to rebalance.

The hash covers what an assignment depends on. It is stored with the group's epoch, so that whoever coordinates the
group next sees whether something has changed since.
"""

import struct
from collections.abc import Iterable
from hashlib import blake2b
from typing import Final

from penstock.groups.consumer.draft import Draft
from penstock.groups.consumer.records import Kind
from penstock.groups.consumer.regex import matching
from penstock.groups.consumer.values import Resolved
from penstock.groups.topics import Topics

_INT64: Final = struct.Struct(">q")
_INT32: Final = struct.Struct(">i")


def metadata_hash(names: Iterable[str], topics: Topics) -> int:
    """0 for no topics; topics that do not exist do not count."""
    known = [topic for name in sorted(names) if (topic := topics.get(name)) is not None]
    if not known:
        return 0
    digest = blake2b(digest_size=_INT64.size)
    for topic in known:
        digest.update(topic.name.encode())
        digest.update(topic.id.bytes + _INT32.pack(topic.partition_count))
        digest.update(";".join(",".join(sorted(racks)) for racks in topic.racks).encode())
    (number,) = _INT64.unpack(digest.digest())
    return int(number)


def subscribed_hash(draft: Draft) -> int:
    """Of the topics that the group subscribes to now, which mostly are those that it subscribed to before."""
    if draft.knows_topics and draft.state.subscribed == draft.subscribed_before:
        return draft.state.metadata_hash
    return metadata_hash(draft.state.subscribed, draft.step.topics)


def resolve_regexes(draft: Draft) -> None:
    """Forget the expressions that nobody uses any more, and look for what the others match, if that may be new."""
    topics = draft.step.topics
    used = {member.subscription.topic_regex: None for member in draft.state.members.values()}
    for expression in [each for each in draft.state.regexes if each not in used]:
        draft.change(Kind.REGEX, expression, None)
    for expression in used:
        known = draft.state.regexes.get(expression)
        if not expression or (known is not None and draft.knows_topics):
            continue
        found = matching(expression, topics.names())
        if known is None or known.topics != found:
            draft.change(Kind.REGEX, expression, Resolved(found, topics.version, draft.step.now_ms))
