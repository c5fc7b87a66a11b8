"""Fail-over is measured by acknowledgements, and losses are reported."""

import pytest
from benchmarks.load.failover import Acked, Probe, gap_between_epochs_s, longest_gap_s
from benchmarks.wire.raw_client import BrokerError


def test_the_gap_runs_from_the_last_of_one_leader_to_the_first_of_the_next() -> None:
    acks = [Acked(0.0, 0, 5), Acked(9.0, 1, 5), Acked(9.5, 2, 5), Acked(12.0, 3, 6), Acked(20.0, 4, 6)]
    assert gap_between_epochs_s(acks) == 2.5


def test_the_longest_gap_counts_from_the_fault_on() -> None:
    acks = [Acked(0.0, 0, 0), Acked(9.0, 1, 0), Acked(13.0, 2, 0), Acked(14.0, 3, 0)]
    assert longest_gap_s(acks, since_s=9.5) == 4.0


def test_an_offset_that_is_given_out_twice_fails_the_run() -> None:
    probe = Probe({}, "t", 0)
    probe._note(Acked(0.0, 7, 1))
    with pytest.raises(BrokerError, match="offset 7 after 7"):
        probe._note(Acked(1.0, 7, 2))
