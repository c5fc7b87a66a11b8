"""A short campaign of the sink: one driver of real Spark is killed, and each row is there once."""

import pytest
from tests.chaos.__main__ import main


#: With this seed there is no second driver, which could commit the batch before the first one comes to its point.
@pytest.mark.parametrize(("point", "seed"), [("in the decision", 6)])
def test_a_driver_that_is_killed_loses_and_doubles_nothing(capfd, monkeypatch, point, seed):
    monkeypatch.setenv("PYTHONPATH", "")  # which the campaign sets for its drivers
    assert main(["--campaign", "sink", "--kills", "1", "--point", point, "--seed", str(seed)]) == 0
    output = capfd.readouterr().out
    assert f"1/1 {point}: " in output
    assert "120 rows, 0 missing, 0 doubled, nothing left open" in output
