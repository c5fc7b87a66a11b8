"""What a rule answers to a question about one transactional id."""

from typing import NamedTuple

from penstock.transactions.transaction import Transaction


class Decision(NamedTuple):
    reply: object
    #: What the id becomes, if it changes.
    stored: Transaction | None = None
