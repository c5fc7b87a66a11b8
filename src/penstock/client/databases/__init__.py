"""The databases below dedupe stores, ledgers and the outbox: connections, transactions, errors and tables."""
