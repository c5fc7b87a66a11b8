"""What an account may use of the event loop beside others, and in which order the work of several is done.

Time is a number that the tests move.
"""

import asyncio

import pytest

from penstock.broker.network.time_accounts import FairQueue, TimeAccount, TimeAccounts

MS = 0.001


class Machine:
    """Parties that use the event loop one after the other."""

    def __init__(self) -> None:
        self.now = 100.0
        self.accounts = TimeAccounts()

    def use(self, account: TimeAccount, seconds: float) -> None:
        account.spend(self.now, self.now + seconds)
        self.now += seconds

    def time_until_ahead(self, account: TimeAccount, step: float) -> float:
        used = 0.0
        while not account.is_ahead(self.now):
            self.use(account, step)
            used += step
            assert used < 60
        return used


@pytest.fixture
def machine() -> Machine:
    return Machine()


def test_a_party_that_is_alone_never_waits(machine: Machine) -> None:
    alone, idle = machine.accounts.join("alone"), machine.accounts.join("idle")
    for _ in range(1000):
        machine.use(alone, 3 * MS)
        assert not alone.is_ahead(machine.now)
    assert not idle.is_ahead(machine.now)


def test_a_burst_beside_an_active_party_ends_within_milliseconds(machine: Machine) -> None:
    hog, steady = machine.accounts.join("hog"), machine.accounts.join("steady")
    machine.use(steady, 0.1 * MS)
    assert machine.time_until_ahead(hog, 0.1 * MS) < 5 * MS
    assert not steady.is_ahead(machine.now)


def test_the_connections_of_a_party_share_its_part(machine: Machine) -> None:
    steady = machine.accounts.join("steady")
    connections = [machine.accounts.join("hog") for _ in range(200)]
    machine.use(steady, 0.1 * MS)
    used = 0
    for account in connections:
        if account.is_ahead(machine.now):
            break
        machine.use(account, 0.1 * MS)
        used += 1
    assert used < 50


def test_a_party_that_keeps_to_its_part_is_not_delayed_however_long_it_goes_on(machine: Machine) -> None:
    light, hog = machine.accounts.join("light"), machine.accounts.join("hog")
    for _ in range(2000):
        machine.use(hog, 0.6 * MS)
        machine.use(light, 0.4 * MS)
        assert not light.is_ahead(machine.now)
    assert hog.is_ahead(machine.now)


def test_the_more_are_active_the_less_each_may_use_of_a_busy_loop(machine: Machine) -> None:
    parties = [machine.accounts.join(number) for number in range(10)]
    for _ in range(1000):
        for account in parties[1:]:
            machine.use(account, 0.1 * MS)
        machine.use(parties[0], 0.3 * MS)
    assert [account.is_ahead(machine.now) for account in parties] == [True] + 9 * [False]


def test_nobody_waits_for_more_than_half_of_an_idle_loop(machine: Machine) -> None:
    parties = [machine.accounts.join(number) for number in range(10)]
    for _ in range(2000):
        for account in parties[1:]:
            machine.use(account, 0.02 * MS)
        machine.use(parties[0], 0.3 * MS)
        machine.now += 1 * MS
        assert not any(account.is_ahead(machine.now) for account in parties)


def test_a_party_that_slows_down_is_soon_served_like_the_others(machine: Machine) -> None:
    hog, steady = machine.accounts.join("hog"), machine.accounts.join("steady")
    for _ in range(100):
        machine.use(hog, 100 * MS)
        machine.use(steady, 0.1 * MS)
    assert hog.is_ahead(machine.now)
    machine.now += 100 * MS
    assert not hog.is_ahead(machine.now)


def test_a_party_that_reconnects_is_still_ahead(machine: Machine) -> None:
    steady, hog = machine.accounts.join("steady"), machine.accounts.join("hog")
    machine.use(steady, 0.1 * MS)
    machine.time_until_ahead(hog, 1 * MS)
    machine.accounts.leave(hog)
    assert machine.accounts.join("hog").is_ahead(machine.now)


def test_parties_that_have_gone_are_forgotten(machine: Machine) -> None:
    steady = machine.accounts.join("steady")
    for number in range(100):
        guest = machine.accounts.join(number)
        machine.use(guest, 0.1 * MS)
        machine.accounts.leave(guest)
    assert machine.accounts.are_several
    for _ in range(3):
        machine.now += 1.0
        machine.use(steady, 0.1 * MS)
    assert not machine.accounts.are_several


def test_of_the_reads_of_a_light_party_few_are_measured_and_all_count(machine: Machine) -> None:
    machine.use(machine.accounts.join("steady"), 0.1 * MS)
    hog, measured, reads = machine.accounts.join("hog"), 0, 0
    while not hog.is_ahead(machine.now):
        reads += 1
        assert reads < 1000
        began, machine.now = machine.now, machine.now + 0.02 * MS
        if hog.unmeasured:
            hog.unmeasured -= 1
            continue
        measured += 1
        hog.spend_sampled(began, machine.now)
    assert 3 * MS < reads * 0.02 * MS < 5 * MS
    assert measured < reads * 0.7


def test_a_party_that_is_active_alone_is_hardly_measured(machine: Machine) -> None:
    alone = machine.accounts.join("alone")
    machine.accounts.join("idle")
    measured = 0
    for _ in range(8000):
        began, machine.now = machine.now, machine.now + 0.02 * MS
        if alone.unmeasured:
            alone.unmeasured -= 1
        else:
            measured += 1
            alone.spend_sampled(began, machine.now)
    assert measured < 400


def test_a_login_is_not_a_party_beside_which_others_wait(machine: Machine) -> None:
    login, user = machine.accounts.join("host", is_login=True), machine.accounts.join("user")
    for _ in range(100):
        machine.use(login, 0.1 * MS)
        machine.use(user, 1 * MS)
        assert not user.is_ahead(machine.now)
    machine.use(machine.accounts.join("other"), 0.1 * MS)
    assert machine.time_until_ahead(login, 0.1 * MS) < 10 * MS


def test_a_slow_read_counts_once(machine: Machine) -> None:
    machine.use(machine.accounts.join("steady"), 0.1 * MS)
    party = machine.accounts.join("party")
    party.spend_sampled(machine.now - 0.02 * MS, machine.now)
    party.unmeasured = 0
    party.spend_sampled(machine.now, machine.now + 1 * MS)
    assert not party.is_ahead(machine.now + 1 * MS)


async def test_work_that_is_awaited_counts(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.broker.network.time_accounts.perf_counter", lambda: machine.now)
    machine.use(machine.accounts.join("steady"), 0.1 * MS)
    hog = machine.accounts.join("hog")

    async def work() -> str:
        for _ in range(10):
            machine.now += 1 * MS
            await asyncio.sleep(0)
        try:
            await asyncio.wait_for(asyncio.Event().wait(), 0)
        except TimeoutError:
            return "done"
        raise AssertionError("it should have timed out")

    assert await hog.measured(work()) == "done"
    assert hog.is_ahead(machine.now)
    assert machine.accounts.later_s == pytest.approx(10 * MS)


async def test_an_error_of_work_that_is_awaited_is_raised(machine: Machine) -> None:
    async def work() -> None:
        await asyncio.sleep(0)
        raise ConnectionError

    with pytest.raises(ConnectionError):
        await machine.accounts.join("a").measured(work())


# -- the queue -----------------------------------------------------------------------------------------------


def _served(queue: FairQueue[str], turns: int, cost: dict[str, float]) -> list[str]:
    """Who was served in each turn; all work comes back."""
    served = []
    for _ in range(turns):
        work, account = queue.pop()
        served.append(work)
        queue.push(work, account)
        queue.spent(account, cost[work[0]])
    return served


def test_parties_get_the_same_time_however_many_connections_they_have(machine: Machine) -> None:
    many, one = machine.accounts.join("many"), machine.accounts.join("one")
    queue: FairQueue[str] = FairQueue()
    for number in range(200):
        queue.push(f"m{number}", many)
    queue.push("o", one)
    served = _served(queue, 4000, {"m": 0.1 * MS, "o": 0.1 * MS})
    assert 1900 < served.count("o") < 2100
    # The connections of one account take turns too.
    assert {served.count(f"m{number}") for number in range(200)} <= {9, 10, 11}


def test_work_that_takes_longer_is_done_less_often(machine: Machine) -> None:
    slow, fast = machine.accounts.join("slow"), machine.accounts.join("fast")
    queue: FairQueue[str] = FairQueue()
    queue.push("s", slow)
    queue.push("f", fast)
    served = _served(queue, 1100, {"s": 1 * MS, "f": 0.1 * MS})
    assert 80 < served.count("s") < 120


def test_a_party_that_comes_later_does_not_wait_for_what_another_has_queued(machine: Machine) -> None:
    hog, late = machine.accounts.join("hog"), machine.accounts.join("late")
    queue: FairQueue[str] = FairQueue()
    for number in range(200):
        queue.push(f"h{number}", hog)
    _served(queue, 500, {"h": 0.1 * MS})
    queue.push("l", late)
    served = _served(queue, 20, {"h": 0.1 * MS, "l": 0.1 * MS})
    assert served.index("l") < 5
    assert len(queue) == 201
