"""Replicas that are lost or damaged: reported to the controller, fetched again if others have them, else kept."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.damage import flip_byte
from tests.unit.broker.partition.one_broker import ME, OTHER, PEER, Broker, broker_of_three
from tests.unit.broker.raw_client import until

from penstock.broker.partition.partition import ReplicaRole
from penstock.log.log_manager import DataDirectoryLocked
from penstock.log.offline_repair import accept_loss, list_damage
from penstock.protocol.errors import ErrorCode
from penstock.protocol.record_batch import Record, encode_batch


async def _write_some(tmp_path: Path, **state: object) -> None:
    """A life before: some records, synced and confirmed, and a clean end."""
    async with broker_of_three(tmp_path) as broker:
        await broker.create(**state)
        for _ in range(6):
            broker.produce(bytes(100), acks=1)
        broker.partition().flush()
        await until(lambda: broker.partition().log.synced.offset == 6)


def _segments(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "data" / "t-0").glob("*.log"))


def _strays(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "data").glob("t-0.*-stray"))


async def _restarted(tmp_path: Path) -> Broker:
    broker = Broker(tmp_path, state="starting")
    await broker.register(ME, PEER, OTHER)
    return broker


def _damage(tmp_path: Path) -> None:
    """In what was synced, found by the recovery of a start that was not preceded by a clean stop."""
    with open(_segments(tmp_path)[0], "r+b") as file:
        file.seek(8)
        file.write(b"\xff\xff")
    (tmp_path / "data" / ".kafka_cleanshutdown").unlink()


async def test_a_lost_replica_is_reported_before_it_is_created_again(tmp_path: Path) -> None:
    await _write_some(tmp_path)
    (tmp_path / "data" / "t-0").rename(tmp_path / "elsewhere")
    broker = await _restarted(tmp_path)
    await broker.create(leader=PEER)
    assert broker.partitions.get("t", 0) is None
    assert not (tmp_path / "data" / "t-0").exists(), "an empty copy would pass for one in sync"
    broker.state = "serving"
    await broker.partitions.lost.report()
    assert broker.controller.lost == [{("t", 0)}]
    await broker.change(eligible_leader_replicas=(OTHER,))
    assert broker.partitions.get("t", 0) is None, "still counted as in sync"
    await broker.change(isr=(PEER, OTHER))
    assert (broker.partition().role, broker.partition().log.end_offset) == (ReplicaRole.FOLLOWER, 0)
    assert broker.fetchers.following == {("t", 0): (PEER, 5)}
    assert len(broker.partitions.lost) == 0
    await broker.close()


async def test_a_partition_that_was_never_there_is_simply_made(tmp_path: Path) -> None:
    broker = await _restarted(tmp_path)
    await broker.create(leader_epoch=0, partition_epoch=0)
    assert broker.partition().role is ReplicaRole.LEADER
    await broker.close()


async def test_the_only_copy_that_never_held_records_is_simply_made(tmp_path: Path) -> None:
    broker = await _restarted(tmp_path)
    await broker.create(replicas=(ME,))
    assert (broker.partition().role, len(broker.partitions.missing)) == (ReplicaRole.LEADER, 0)
    await broker.close()


async def test_the_only_copy_whose_folder_is_gone_is_refused_until_the_loss_is_accepted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await _write_some(tmp_path, replicas=(ME,))
    (tmp_path / "data" / "t-0").rename(tmp_path / "elsewhere")
    for _ in range(2):
        caplog.clear()
        broker = await _restarted(tmp_path)
        await broker.create(replicas=(ME,))
        assert (broker.partitions.missing, broker.controller.lost) == ({("t", 0)}, [])
        assert broker.produce().produced.error_code is ErrorCode.kafka_storage_error
        assert (await broker.fetch({0: 0}).done()).fetched[0].error_code is ErrorCode.kafka_storage_error
        assert sum(record.levelname == "CRITICAL" for record in caplog.records) == 1
        await broker.close()
    assert not (tmp_path / "data" / "t-0").exists(), "an empty folder would hide that the disk is missing"
    accept_loss(tmp_path / "data", "t", 0)
    broker = await _restarted(tmp_path)
    await broker.create(replicas=(ME,))
    assert (broker.partition().log.start_offset, broker.produce().produced.base_offset) == (6, 6)
    await broker.close()


async def test_a_folder_that_comes_back_serves_as_before(tmp_path: Path) -> None:
    await _write_some(tmp_path, replicas=(ME,))
    (tmp_path / "data" / "t-0").rename(tmp_path / "elsewhere")
    broker = await _restarted(tmp_path)
    await broker.create(replicas=(ME,))
    await broker.close()
    (tmp_path / "elsewhere").rename(tmp_path / "data" / "t-0")
    broker = await _restarted(tmp_path)
    await broker.create(replicas=(ME,))
    assert (broker.partition().log.end_offset, broker.partition().log.damages) == (6, ())
    await broker.close()


async def test_a_file_that_goes_missing_below_the_high_watermark_takes_the_copy_out(tmp_path: Path) -> None:
    async with broker_of_three(tmp_path) as broker:
        await broker.create(configs={"segment.bytes": "200"})
        for _ in range(6):
            broker.produce(bytes(100), acks=1)
        for replica in (PEER, OTHER):
            broker.fetch({0: 6}, replica=replica)
        broker.store.files.forget(broker.partition().log.segments[0])
        _segments(tmp_path)[0].unlink()
        failed = await broker.fetch({0: 0}).done()
        assert failed.fetched[0].error_code is ErrorCode.kafka_storage_error
        await until(lambda: broker.controller.lost)
        assert broker.controller.lost == [{("t", 0)}]
        await broker.fetch({0: 0}).done()
        assert broker.partition().log.end_offset == 6, "nothing is thrown away before others lead"
        await broker.change(leader=PEER, isr=(PEER, OTHER))
        assert (broker.partition().log.end_offset, broker.partition().role) == (0, ReplicaRole.FOLLOWER)
        assert len(_strays(tmp_path)) == 1, "an operator may look at it"
        assert broker.metrics.replicas_lost == 1


async def test_the_last_copy_stays_however_bad(tmp_path: Path) -> None:
    async with broker_of_three(tmp_path) as broker:
        await broker.create(configs={"segment.bytes": "200"}, isr=(ME,))
        for _ in range(6):
            broker.produce(bytes(100), acks=1)
        broker.store.files.forget(broker.partition().log.segments[0])
        _segments(tmp_path)[0].unlink()
        await broker.fetch({0: 0}).done()
        await until(lambda: broker.controller.lost)
        await broker.change(leader=-1, isr=(), last_known_elr=(ME,))
        broker.partitions.lost._reported.clear()
        await broker.change(leader=ME, isr=(ME,), leader_recovery_state=1)
        assert broker.partition().log.end_offset == 6, "who elected it did not know"
        await broker.partitions.lost.report()
        await broker.change(leader=-1, isr=(), last_known_elr=(ME,))
        assert (broker.partition().log.end_offset, _strays(tmp_path)) == (6, [])
        await broker.change(leader=ME, isr=(ME,), leader_recovery_state=1)
        assert broker.partition().log.end_offset == 0, "an operator chose to go on without it"


async def test_a_damaged_log_is_set_aside_once_others_lead(tmp_path: Path) -> None:
    await _write_some(tmp_path)
    _damage(tmp_path)
    broker = await _restarted(tmp_path)
    await broker.create(leader=PEER)
    assert broker.partitions.lost.keys == {("t", 0)}
    assert broker.produce().produced.error_code is ErrorCode.not_leader_or_follower
    await broker.change(isr=(PEER, OTHER))
    assert (broker.partition().log.end_offset, len(_strays(tmp_path))) == (0, 1)
    await broker.close()


async def test_a_damaged_log_outside_the_in_sync_set_is_replaced_at_once(tmp_path: Path) -> None:
    await _write_some(tmp_path)
    _damage(tmp_path)
    broker = await _restarted(tmp_path)
    await broker.create(leader=PEER, isr=(PEER, OTHER))
    assert (broker.partition().log.end_offset, len(_strays(tmp_path))) == (0, 1)
    await broker.close()


@pytest.mark.parametrize("state", [{"replicas": (ME,)}, {"isr": (ME,)}])
async def test_the_last_copy_serves_what_is_whole_of_it(tmp_path: Path, state: dict[str, Any]) -> None:
    await _write_some(tmp_path, **state)
    _damage(tmp_path)
    size = _segments(tmp_path)[0].stat().st_size
    broker = await _restarted(tmp_path)
    await broker.create(**state)
    broker.state = "serving"
    assert (broker.partition().role, len(broker.partitions.lost)) == (ReplicaRole.LEADER, 0)
    assert (await broker.fetch({0: 0}).done()).fetched[0].error_code is ErrorCode.corrupt_message
    assert (await broker.fetch({0: 1}).done()).fetched[0].error_code is ErrorCode.none
    assert broker.produce(acks=1).produced.base_offset == 6
    assert (broker.controller.lost, _strays(tmp_path)) == ([], [])
    assert _segments(tmp_path)[0].stat().st_size > size
    await broker.close()


async def test_damage_that_a_reader_meets_in_the_only_copy_is_surveyed(tmp_path: Path) -> None:
    await _write_some(tmp_path, replicas=(ME,))
    broker = await _restarted(tmp_path)
    await broker.create(replicas=(ME,))
    path = _segments(tmp_path)[0]
    with path.open("r+b") as file:  # the length of the third batch
        file.seek(path.stat().st_size // 6 * 2 + 8)
        file.write(b"\xff")
    await broker.fetch({0: 4}).done()
    await until(lambda: broker.partition().log.damages)
    for offset, code in ((1, ErrorCode.none), (2, ErrorCode.corrupt_message), (3, ErrorCode.none)):
        assert (await broker.fetch({0: offset}).done()).fetched[0].error_code is code
    await broker.close()


async def test_an_accepted_loss_is_passed_over(tmp_path: Path) -> None:
    await _write_some(tmp_path, replicas=(ME,))
    _damage(tmp_path)
    broker = await _restarted(tmp_path)
    await broker.create(replicas=(ME,))
    with pytest.raises(DataDirectoryLocked):
        accept_loss(tmp_path / "data", "t", 0)
    await broker.close()
    (found,) = list_damage(tmp_path / "data")
    assert (found.topic, found.partition, found.damage.end_offset) == ("t", 0, 1)
    accept_loss(tmp_path / "data", "t", 0)
    broker = await _restarted(tmp_path)
    await broker.create(replicas=(ME,))
    fetched = (await broker.fetch({0: 0}).done()).fetched[0]
    assert (fetched.error_code, fetched.records[:8]) == (ErrorCode.none, (1).to_bytes(8, "big"))
    await broker.close()


async def test_a_log_whose_end_has_gone_is_reported_before_it_could_lead(tmp_path: Path) -> None:
    async with broker_of_three(tmp_path) as broker:
        await broker.create()
        for _ in range(2):
            broker.produce(bytes(100), acks=1)
            broker.partition().log.roll(broker.now_ms())
        broker.produce(bytes(100), acks=1)
    for path in _segments(tmp_path)[1:]:
        path.unlink()
    broker = await _restarted(tmp_path)
    await broker.create(leader=PEER, isr=(PEER,), eligible_leader_replicas=(ME,), min_isr=2)
    assert broker.partition().log.end_offset == 1, "what is there is sound, and need not be fetched again"
    assert len(broker.partitions.lost) == 1
    await broker.partitions.lost.told()
    assert broker.controller.lost == [{("t", 0)}]
    assert len(broker.partitions.lost) == 0
    assert broker.fetchers.following == {("t", 0): (PEER, 5)}
    await broker.close()


async def test_the_only_copy_whose_end_has_gone_goes_on_after_it(tmp_path: Path) -> None:
    await _write_some(tmp_path, replicas=(ME,))
    _segments(tmp_path)[-1].unlink()
    broker = await _restarted(tmp_path)
    await broker.create(replicas=(ME,))
    assert (broker.partition().role, len(broker.partitions.lost)) == (ReplicaRole.LEADER, 0)
    assert (await broker.fetch({0: 5}).done()).fetched[0].error_code is ErrorCode.corrupt_message
    assert broker.produce(acks=1).produced.base_offset == 6, "no offset is given out twice"
    await broker.close()


async def test_who_may_lack_its_end_says_so_where_the_controller_does_not_expect_it(tmp_path: Path) -> None:
    """Its own file lets it sync when it likes; the controller's says that it counts only what it has synced."""
    for was_clean, flush, reported in ((True, "never", 0), (False, "ack", 0), (False, "never", 1)):
        folder = tmp_path / f"{was_clean}-{flush}"
        (folder / "data" / "t-0").mkdir(parents=True)
        broker = await _restarted(folder)
        broker.was_clean = was_clean
        eligible = {"isr": (PEER,), "eligible_leader_replicas": (ME,)}
        await broker.create(leader=PEER, min_isr=2, configs={"penstock.flush": flush}, **eligible)
        assert broker.partition().role is ReplicaRole.FOLLOWER
        assert len(broker.partitions.lost) == reported
        await broker.close()


async def test_a_log_that_lost_its_beginning_is_fetched_again(tmp_path: Path) -> None:
    async with broker_of_three(tmp_path) as broker:
        await broker.create(configs={"segment.bytes": "200"})
        for _ in range(6):
            broker.produce(bytes(100), acks=1)
    _segments(tmp_path)[0].unlink()
    broker = await _restarted(tmp_path)
    await broker.create(leader=PEER, configs={"segment.bytes": "200"})
    assert broker.partitions.lost.keys == {("t", 0)}
    await broker.change(leader=ME)  # by a controller that has not been told yet
    assert broker.partitions.get("t", 0) is None
    await broker.change(leader=PEER, isr=(PEER, OTHER))
    assert (broker.partition().log.end_offset, len(_strays(tmp_path))) == (0, 1)
    await broker.close()


@pytest.mark.parametrize("are_unlinked", [False, True])
async def test_what_retention_has_deleted_is_not_missed_after_a_crash(
    tmp_path: Path, are_unlinked: bool
) -> None:
    async with broker_of_three(tmp_path) as broker:
        delay_ms = "1" if are_unlinked else "60000"
        settings = {"segment.bytes": "200", "retention.bytes": "300", "file.delete.delay.ms": delay_ms}
        await broker.create(configs=settings)
        for _ in range(6):
            broker.produce(bytes(100), acks=1)
        for replica in (PEER, OTHER):
            broker.fetch({0: 6}, replica=replica)
        await broker.housekeeping.apply_retention(broker.partition())
        start_offset = broker.partition().log.start_offset
        folder = tmp_path / "data" / "t-0"
        await until(lambda: are_unlinked is not any(folder.glob("*.deleted")))
        copy = tmp_path / "crashed"
        shutil.copytree(tmp_path / "data", copy / "data", ignore=shutil.ignore_patterns("*.tmp"))
    broker = await _restarted(copy)
    await broker.create(leader=PEER, configs=settings)
    assert (len(broker.partitions.lost), broker.partition().log.start_offset) == (0, start_offset)
    assert start_offset > 0
    await broker.close()


@pytest.mark.parametrize("value_bytes", [100, 5_000], ids=["without an index entry", "with an index entry"])
@pytest.mark.parametrize("batch", [3, 4], ids=["before the high watermark", "at the high watermark"])
async def test_the_only_replica_in_sync_leads_once_the_damage_that_it_met_is_surveyed(
    tmp_path: Path, batch: int, value_bytes: int
) -> None:
    async with broker_of_three(tmp_path) as broker:
        await broker.create()
        for _ in range(6):
            broker.produce(bytes(value_bytes), acks=1)
        await broker.change(leader=PEER)
        broker.partition().follower_high_watermark(4)
        path = _segments(tmp_path)[0]
        with path.open("r+b") as file:  # the length of the batch
            file.seek(path.stat().st_size // 6 * batch + 8)
            file.write(b"\xff")
        await broker.change(leader=ME, isr=(ME,))
        if broker.partition().role is ReplicaRole.OFFLINE:
            await until(lambda: broker.partition().log.damages and not broker.partitions._surveyed)
            await broker.housekeeping._try_refused()
            assert broker.image_changes[-1].partitions_changed == (("t", 0),)
        assert broker.partition().role is ReplicaRole.LEADER
        await broker.fetch({0: batch}).done()
        await until(lambda: broker.partition().log.damages)
        for offset in range(6):
            code = ErrorCode.corrupt_message if offset == batch else ErrorCode.none
            assert (await broker.fetch({0: offset}).done()).fetched[0].error_code is code, offset
        assert broker.produce(acks=1).produced.base_offset == 6
        assert (broker.controller.lost, _strays(tmp_path)) == ([], [])


@pytest.mark.parametrize(
    ("leader", "isr"),
    [(ME, (ME, PEER, OTHER)), (PEER, (ME, PEER, OTHER)), (ME, (ME,))],
    ids=["leader", "follower", "the only copy in sync"],
)
async def test_damage_that_the_cleaner_meets_is_acted_upon(
    tmp_path: Path, leader: int, isr: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    async with broker_of_three(tmp_path) as broker:
        settings = {"cleanup.policy": "compact", "segment.bytes": "200", "min.cleanable.dirty.ratio": "0.01"}
        await broker.create(configs=settings, isr=isr)
        for value in range(6):
            batch = encode_batch([Record(0, 1, b"key", b"%d" % value * 100)])
            broker.partition().append(memoryview(batch), broker.now_ms())
        for replica in isr[1:]:
            broker.fetch({0: 6}, replica=replica)
        await until(lambda: broker.partition().high_watermark == 6)
        if leader == PEER:
            await broker.change(leader=PEER)
        damaged = _segments(tmp_path)[1]
        flip_byte(damaged, -20)
        await broker.housekeeping._clean()
        if len(isr) > 1:
            await until(lambda: broker.controller.lost == [{("t", 0)}])
            assert broker.metrics.replicas_lost == 1
            return
        await until(lambda: broker.partition().log.damages)
        assert [
            str(record.__dict__["file"]) for record in caplog.records if record.levelname == "CRITICAL"
        ] == [str(damaged)]
        assert broker.controller.lost == []
