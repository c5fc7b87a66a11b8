"""No random request is answered differently from the plain model of the rules, while rules come and go.

A node serves clients that log in from two addresses. The slow test sends 100,000 requests; PENSTOCK_SEED repeats a
failure. Every fourth seed has allow.everyone.if.no.acl.found.
"""

import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tests.access.matrix import LONG, Token, element, request_of, token_request
from tests.access.model import Model
from tests.access.ours import ADMIN, OPEN, SETTINGS, Client
from tests.access.random_requests import (
    DELETABLE,
    GROUPS,
    MISSING,
    TABLE,
    TOKENS,
    TOPICS,
    TRANSACTION_TOPICS,
    TRANSACTIONS,
    Draw,
    Drawn,
    World,
    refusals_in,
    share_key,
)
from tests.unit.broker.network.test_sasl import sasl_node
from tests.unit.broker.raw_client import create_topic, until

from penstock.broker.network.apis import APIS
from penstock.broker.node import Node
from penstock.cluster.topic_names import SHARE_GROUP_STATE
from penstock.protocol.acls import CLUSTER_NAME, AclBinding, Operation, PatternType, Permission, ResourceType
from penstock.protocol.errors import ErrorCode

REQUESTS = 3000
REQUESTS_OF_CAMPAIGN = 12_500
SEEDS_OF_CAMPAIGN = range(8)
REQUESTS_PER_RULES = 15
RULES_MAX = 14
HOSTS = ("127.0.0.1", "127.0.0.2")
USERS = ("User:alice", "User:bob", ADMIN)
#: SaslHandshake and SaslAuthenticate come before a client has a name; AddRaftVoter waits for the voter.
NOT_DRAWN = frozenset({17, 36, 80})
#: AddPartitionsToTxn, AddOffsetsToTxn, EndTxn, TxnOffsetCommit: a connection is closed if the producer has a newer one.
OF_PRODUCERS = frozenset({24, 25, 26, 28})
_EXTRA_SETTINGS = {"transaction.max.timeout.ms": "86400000", "group.initial.rebalance.delay.ms": "0"}


def test_every_api_is_drawn() -> None:
    assert TABLE.keys() == APIS.keys() - NOT_DRAWN


class Campaign:
    def __init__(self, node: Node, random: Random, *, is_open: bool) -> None:
        self._node, self._random, self._is_open = node, random, is_open
        self._admin = Client(node, principal=ADMIN)
        self._clients = {
            (user, host, is_node): Client(node, principal=user, host=host, is_node=is_node)
            for user in USERS
            for host in HOSTS
            for is_node in (False, True)
        }
        self._rules: list[AclBinding] = []
        self._tokens: list[Token] = []
        self.sent: Counter[str] = Counter()
        #: Parts of replies.
        self.refused = self.allowed = 0

    async def run(self, requests: int) -> None:
        await self._make()
        for owner, renewer in TOKENS:
            token = await self._admin.ask(token_request(owner, renewer))
            self._tokens.append(Token(token.token_id, token.hmac))
        for name in TRANSACTIONS:
            await self._begin(name)
        # After this no internal topic is created, which replies would show or not.
        key = share_key("a", self._node.image.topics["a"].id)
        await self._admin.ask(request_of(10, key_type=2, coordinator_keys=(key,)))
        await until(lambda: SHARE_GROUP_STATE in self._node.image.topics)
        for number in range(requests):
            if number % REQUESTS_PER_RULES == 0:
                await self._change_rules()
            await self._send_one()

    async def _send_one(self) -> None:
        user, host = self._random.choice(USERS[:2] * 5 + USERS[2:]), self._random.choice(HOSTS)
        model = Model(self._rules, user, host, is_super_user=user == ADMIN, is_open=self._is_open)
        ids = {name: topic.id for name, topic in self._node.image.topics.items()}
        draw = Draw(self._random, model, World(ids, self._tokens))
        drawn: Drawn | None = None
        while drawn is None:
            drawn = self._random.choice(self._random.choice(list(TABLE.values())))(draw)
        client = self._clients[user, host, drawn.by_node]
        reply = await client.ask(drawn.request)
        if reply is None and drawn.request.__api_key__ in OF_PRODUCERS:
            reply = await client.ask(drawn.request)
        api = APIS[drawn.request.__api_key__].name
        assert reply is not None, f"closed: {user} {host} {drawn.request} with {self._rules}"
        expected = drawn.expected
        seen = refusals_in(reply, {topic_id: name for name, topic_id in ids.items()})
        if not drawn.is_exact:
            seen = {path: codes for path, codes in seen.items() if codes}
            expected = {path: codes for path, codes in expected.items() if codes}
        differing = {
            path: (seen.get(path, "hidden"), expected.get(path, "hidden"))
            for path in seen.keys() | expected.keys()
            if seen.get(path) != expected.get(path)
        }
        assert not differing, f"{differing}: {user} {host} {drawn.request}\n{reply}\nwith {self._rules}"
        self.sent[api] += 1
        refused = sum(any("operations" not in code for code in codes) for codes in drawn.expected.values())
        self.refused += refused
        self.allowed += len(drawn.expected) - refused
        if drawn.deletes:
            await self._make()

    # -- rules ---------------------------------------------------------------------------------------

    async def _change_rules(self) -> None:
        count = self._random.randrange(len(self._rules) + 1) // 2
        gone = self._random.sample(self._rules, count)
        self._rules = [acl for acl in self._rules if acl not in gone]
        await self._tell(self._deletion(gone))
        drawn = (self._rule() for _ in range(self._random.randrange(RULES_MAX - len(self._rules) + 1)))
        new = list(dict.fromkeys(acl for acl in drawn if acl not in self._rules))
        self._rules += new
        await self._tell(self._creation(new))

    async def _tell(self, request: Any) -> None:
        reply = await self._admin.ask(request)
        for result in reply.results if request.__api_key__ == 30 else reply.filter_results:
            assert result.error_code is ErrorCode.none, result

    @staticmethod
    def _creation(rules: Iterable[AclBinding]) -> Any:
        return request_of(
            30,
            creations=tuple(
                element(
                    30, "creations", resource_type=acl.resource_type, resource_name=acl.resource_name,
                    resource_pattern_type=acl.pattern_type, principal=acl.principal, host=acl.host,
                    operation=acl.operation, permission_type=acl.permission,
                )
                for acl in rules
            ),
        )  # fmt: skip

    @staticmethod
    def _deletion(rules: Iterable[AclBinding]) -> Any:
        return request_of(
            31,
            filters=tuple(
                element(
                    31, "filters", resource_type_filter=acl.resource_type, resource_name_filter=acl.resource_name,
                    pattern_type_filter=acl.pattern_type, principal_filter=acl.principal, host_filter=acl.host,
                    operation=acl.operation, permission_type=acl.permission,
                )
                for acl in rules
            ),
        )  # fmt: skip

    def _rule(self) -> AclBinding:
        random = self._random
        kind = random.choice((*[ResourceType.TOPIC] * 4, *tuple(ResourceType)[ResourceType.TOPIC :]))
        if kind == ResourceType.CLUSTER:
            names: tuple[str, ...] = (CLUSTER_NAME,)
        elif kind == ResourceType.DELEGATION_TOKEN:
            names = tuple(token.id for token in self._tokens)
        elif kind == ResourceType.USER:
            names = ("User:alice", "User:bob", "User:carol")
        else:
            names = (*TOPICS, *DELETABLE, *MISSING)
        name, pattern_type = random.choice(names), PatternType.LITERAL
        if kind != ResourceType.CLUSTER and random.random() < 0.2:
            name = "*"
        elif kind != ResourceType.CLUSTER and random.random() < 0.4:
            name, pattern_type = name[: random.randint(1, len(name))], PatternType.PREFIXED
        return AclBinding(
            kind,
            name,
            pattern_type,
            random.choice((*["User:alice", "User:bob", "User:*"] * 3, "User:carol", "Group:alice")),
            random.choice((*HOSTS, *["*"] * 6, "10.0.0.1")),
            random.choice((*[Operation.ALL] * 6, *tuple(Operation)[Operation.ALL :])),
            random.choice((*[Permission.ALLOW] * 4, Permission.DENY)),
        )

    # -- what the requests are about -----------------------------------------------------------------

    async def _make(self) -> None:
        """Make the topics and groups, and the offsets of each group in each topic, if they are not there."""
        for name in (*TOPICS, *DELETABLE):
            if name not in self._node.image.topics:
                await create_topic(self._node, name)
        for group in GROUPS:
            commit = request_of(
                8, 9, group_id=group, generation_id_or_member_epoch=-1, member_id="",
                topics=tuple(element(8, "topics", version=9, name=name) for name in TOPICS),
            )  # fmt: skip
            await self._until_done(commit, lambda reply: reply.topics[0].partitions[0].error_code, 0, group)

    async def _begin(self, name: str) -> None:
        producer = {"producer_id": -1, "producer_epoch": -1, "transaction_timeout": 96 * LONG}
        init = request_of(22, 4, transactional_id=name, **producer)
        producer = await self._until_done(init, lambda reply: reply.error_code, 1, name)
        topics = tuple(
            element(24, "v3_and_below_topics", version=3, name=topic, partitions=(0,))
            for topic in TRANSACTION_TOPICS
        )
        begin = request_of(
            24,
            3,
            v3_and_below_transactional_id=name,
            v3_and_below_producer_id=producer.producer_id,
            v3_and_below_producer_epoch=producer.producer_epoch,
            v3_and_below_topics=topics,
        )

        def error_of(reply: Any) -> ErrorCode:
            topic = reply.results_by_topic_v3_and_below[0]
            return ErrorCode(topic.results_by_partition[0].partition_error_code)

        await self._until_done(begin, error_of, 1, name)

    async def _until_done(self, request: Any, error_of: Any, key_type: int, key: str) -> Any:
        """Ask until the coordinator has loaded its partition."""
        while error_of(reply := await self._admin.ask(request)) is not ErrorCode.none:
            await self._admin.ask(request_of(10, key_type=key_type, coordinator_keys=(key,)))
        return reply


async def run(folder: Path, seed: int, requests: int) -> None:
    seed = int(os.environ.get("PENSTOCK_SEED", seed))
    random, is_open = Random(seed), seed % 4 == 3
    settings = SETTINGS | _EXTRA_SETTINGS | (OPEN if is_open else {})
    async with sasl_node(folder, **settings) as node:
        campaign = Campaign(node, random, is_open=is_open)
        try:
            await campaign.run(requests)
        except AssertionError as error:
            raise AssertionError(f"PENSTOCK_SEED={seed}, after {campaign.sent.total()} requests") from error
    parts = campaign.refused + campaign.allowed
    print(f"seed {seed}: {requests} requests, {campaign.refused} of {parts} parts refused: {campaign.sent}")
    assert parts // 5 < campaign.refused < parts * 4 // 5, "the requests say little"
    if requests >= REQUESTS_OF_CAMPAIGN:
        assert campaign.sent.keys() == {APIS[key].name for key in TABLE}


@pytest.mark.parametrize("seed", [15, 16])
async def test_a_share_of_the_campaign(seed: int, tmp_path: Path) -> None:
    await run(tmp_path, seed, REQUESTS // 2)


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS_OF_CAMPAIGN)
async def test_the_campaign(seed: int, tmp_path: Path) -> None:
    await run(tmp_path, seed, REQUESTS_OF_CAMPAIGN)
