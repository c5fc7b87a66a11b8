"""The data directory: its lock, clean and unclean starts, created and deleted partitions."""

import errno
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from uuid import UUID

import pytest
from tests.damage import flip_byte
from tests.unit.log.helpers import NOW_MS, append, fill, flush, offsets_in, values_in

from penstock.log.checkpoints import read_offset_checkpoint
from penstock.log.config import LogConfig
from penstock.log.data_directory import InconsistentMetaProperties, format_uuid, parse_uuid
from penstock.log.log_manager import DataDirectoryLocked, LogManager, LogToOpen

CONFIG = LogConfig()
TOPIC_ID = UUID("01234567-89ab-cdef-0123-456789abcdef")


def opened(directory: Path, **options) -> LogManager:
    return LogManager.open(directory, node_id=1, **options)


def open_all(store):
    return store.open_or_create_these(
        dict.fromkeys(store.stored(), LogToOpen(TOPIC_ID, CONFIG)), now_ms=NOW_MS
    )


def create(store, topic="orders", index=0):
    return store.open_or_create(topic, index, TOPIC_ID, CONFIG, now_ms=NOW_MS)


def test_a_clean_stop_is_followed_by_a_clean_start(tmp_path):
    store = opened(tmp_path)
    assert not store.clean
    log = create(store)
    fill(log, 5)
    log.delete_records_before(2)
    store.close(high_watermarks={("orders", 0): 5})
    assert (tmp_path / ".kafka_cleanshutdown").exists()
    store = opened(tmp_path)
    assert store.clean
    assert not (tmp_path / ".kafka_cleanshutdown").exists()
    log = open_all(store).opened["orders", 0]
    assert (log.start_offset, log.end_offset) == (2, 5)
    assert store.high_watermarks == {("orders", 0): 5}
    assert read_offset_checkpoint(tmp_path / "recovery-point-offset-checkpoint") == {("orders", 0): 5}
    assert read_offset_checkpoint(tmp_path / "log-start-offset-checkpoint") == {("orders", 0): 2}


def test_a_crash_is_followed_by_recovery_from_the_checkpoint(tmp_path, monkeypatch):
    store = opened(tmp_path)
    log = create(store)
    fill(log, 5)
    flush(log)
    store.checkpoint()
    fill(log, 5)
    store.close(clean=False)
    checked = []
    monkeypatch.setattr(
        "penstock.log.recovery.checksum_holds",
        lambda fd, at, header: checked.append(header.base_offset) or True,
    )
    store = opened(tmp_path)
    assert not store.clean
    assert open_all(store).opened["orders", 0].end_offset == 10
    assert checked == [5, 6, 7, 8, 9]


def test_only_one_process_owns_the_folder(tmp_path):
    store = opened(tmp_path)
    attempt = (
        "import sys; from pathlib import Path; from penstock.log.log_manager import LogManager, DataDirectoryLocked\n"
        "try: LogManager.open(Path(sys.argv[1]), node_id=1)\n"
        "except DataDirectoryLocked as error: print(error)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", attempt, tmp_path], capture_output=True, text=True, env=environment
    )
    assert f"{tmp_path} is in use by another process" in done.stdout, done.stderr
    with pytest.raises(DataDirectoryLocked):
        opened(tmp_path)
    store.close()
    opened(tmp_path).close()


def test_the_folder_knows_its_owner(tmp_path):
    store = opened(tmp_path, cluster_id="the-cluster")
    directory_id = store.directory_id
    store.close()
    text = (tmp_path / "meta.properties").read_text()
    assert "version=1\n" in text
    assert "cluster.id=the-cluster\n" in text
    assert "node.id=1\n" in text
    assert f"directory.id={format_uuid(directory_id)}\n" in text
    store = opened(tmp_path)
    assert (store.cluster_id, store.directory_id) == ("the-cluster", directory_id)
    store.close()
    with pytest.raises(InconsistentMetaProperties, match="belongs to node 1"):
        LogManager.open(tmp_path, node_id=2)
    with pytest.raises(InconsistentMetaProperties, match="belongs to cluster the-cluster"):
        opened(tmp_path, cluster_id="another")
    (tmp_path / "meta.properties").write_text("version=1\nnode.id=one\n")
    with pytest.raises(InconsistentMetaProperties, match="cannot be understood"):
        opened(tmp_path)


def test_partition_metadata_is_as_kafka_writes_it(tmp_path):
    store = opened(tmp_path)
    create(store)
    text = (tmp_path / "orders-0" / "partition.metadata").read_text()
    assert text == "version: 0\ntopic_id: ASNFZ4mrze8BI0VniavN7w"
    assert store.topic_id("orders", 0) == TOPIC_ID
    assert parse_uuid(format_uuid(TOPIC_ID)) == TOPIC_ID
    assert store.topic_id("missing", 0) is None
    (tmp_path / "orders-0" / "partition.metadata").write_text("nonsense")
    assert store.topic_id("orders", 0) is None


def test_a_partition_that_cannot_be_opened_is_named_and_the_others_serve(tmp_path):
    store = opened(tmp_path)
    for index in range(3):
        fill(create(store, "orders", index), 4)
    store.close()
    unreadable = tmp_path / "orders-1" / "00000000000000000000.log"
    unreadable.unlink()
    unreadable.mkdir()
    store = opened(tmp_path)
    report = open_all(store)
    assert set(report.opened) == {("orders", 0), ("orders", 2)}
    assert "Is a directory" in str(report.failed["orders", 1])
    store.close()
    assert not (tmp_path / ".kafka_cleanshutdown").exists()
    assert read_offset_checkpoint(tmp_path / "recovery-point-offset-checkpoint")["orders", 1] == 4


def test_a_deleted_partition_is_gone_at_once_and_its_files_later(tmp_path):
    store = opened(tmp_path)
    log = create(store)
    fill(log, 5)
    store.checkpoint()
    folder = store.delete("orders", 0)
    assert folder.name.startswith("orders-0.")
    assert folder.name.endswith("-delete")
    assert store.stored() == []
    again = create(store)
    assert again.end_offset == 0
    append(again, b"new")
    assert values_in(log) == [bytes(100)] * 5
    store.purge([folder])
    assert not folder.exists()
    store.close()
    assert read_offset_checkpoint(tmp_path / "recovery-point-offset-checkpoint") == {("orders", 0): 1}


def test_what_a_crash_left_of_deleted_partitions_goes_at_the_next_start(tmp_path):
    store = opened(tmp_path)
    create(store)
    folder = store.delete("orders", 0)
    store.close(clean=False)
    opened(tmp_path)
    assert not folder.exists()


def test_deleting_during_a_flush_is_safe(tmp_path):
    store = opened(tmp_path)
    log = create(store)
    fill(log, 5)
    flush_job = log.flush_begin()
    store.delete("orders", 0)
    again = create(store)
    flush_job.run()
    log.flush_done(flush_job)
    assert not (again.directory / "leader-epoch-checkpoint").exists()


def test_the_folder_of_an_earlier_topic_of_that_name_is_set_aside(tmp_path):
    store = opened(tmp_path)
    fill(create(store), 5)
    store.close()
    store = opened(tmp_path)
    log = store.open_or_create("orders", 0, UUID(int=5), CONFIG, now_ms=NOW_MS)
    assert log.end_offset == 0
    (stray,) = tmp_path.glob("orders-0.*-stray")
    assert (stray / "00000000000000000000.log").stat().st_size > 0
    assert store.stored() == [("orders", 0)]


def test_open_or_create_opens_what_is_there(tmp_path):
    store = opened(tmp_path)
    log = store.open_or_create("orders", 0, TOPIC_ID, CONFIG, now_ms=NOW_MS)
    fill(log, 3)
    store.close()
    store = opened(tmp_path)
    assert offsets_in(store.open_or_create("orders", 0, TOPIC_ID, CONFIG, now_ms=NOW_MS)) == [0, 1, 2]


def test_a_folder_that_has_lost_its_topic_id_keeps_its_data(tmp_path):
    store = opened(tmp_path)
    fill(create(store), 3)
    store.close()
    (tmp_path / "orders-0" / "partition.metadata").write_bytes(b"")
    store = opened(tmp_path)
    assert offsets_in(create(store)) == [0, 1, 2]
    assert store.topic_id("orders", 0) == TOPIC_ID


def test_a_recreated_topic_is_not_opened_with_checkpoints_of_the_old_one(tmp_path):
    """Neither its start offset, which would drop all that is below, nor its recovery point, which vouches for bytes."""
    store = opened(tmp_path)
    log = create(store)
    fill(log, 50)
    flush(log)
    log.delete_records_before(40)
    store.checkpoint()
    store.purge([store.delete("orders", 0)])
    log = create(store)
    fill(log, 5)
    flush(log)
    store.close(clean=False)
    log = open_all(opened(tmp_path)).opened["orders", 0]
    assert (log.start_offset, offsets_in(log)) == (0, [0, 1, 2, 3, 4])


def test_a_partition_that_cannot_be_made_is_named_and_the_others_serve(tmp_path, monkeypatch):
    store = opened(tmp_path)
    mkdir = Path.mkdir

    def refuse_the_second(path, *args, **options):
        if path.name == "orders-1":
            raise OSError(errno.ENOSPC, "No space left on device")
        mkdir(path, *args, **options)

    monkeypatch.setattr(Path, "mkdir", refuse_the_second)
    wanted = {("orders", index): LogToOpen(TOPIC_ID, CONFIG) for index in range(3)}
    report = store.open_or_create_these(wanted, now_ms=NOW_MS)
    assert set(report.opened) == {("orders", 0), ("orders", 2)}
    assert report.failed.keys() == store.failed.keys() == {("orders", 1)}
    monkeypatch.undo()
    assert create(store, index=1).end_offset == 0
    assert not store.failed


def test_a_folder_that_cannot_be_read_stops_no_other(tmp_path):
    store = opened(tmp_path)
    for index in range(2):
        fill(create(store, index=index), 3)
    store.close()
    metadata = tmp_path / "orders-0" / "partition.metadata"
    metadata.unlink()
    metadata.mkdir()
    report = open_all(opened(tmp_path))
    assert set(report.opened) == {("orders", 1)}
    assert set(report.failed) == {("orders", 0)}


def test_checkpoints_are_taken_while_partitions_come_and_go(tmp_path):
    store = opened(tmp_path, threads=1)
    running = threading.Event()

    def checkpoints():
        while not running.is_set():
            store.checkpoint()

    with ThreadPoolExecutor(1) as pool:
        failed = pool.submit(checkpoints)
        for index in range(40):
            create(store, index=index)
        running.set()
        failed.result()


def test_the_longest_topic_name_fits(tmp_path):
    store = opened(tmp_path)
    topic = "t" * 249
    append(create(store, topic, 99_999), b"x")
    folder = store.delete(topic, 99_999)
    assert len(folder.name) == 255
    create(store, topic, 99_999)
    assert store.stored() == [(topic, 99_999)]


def test_topic_names_with_dashes_and_digits_are_understood(tmp_path):
    store = opened(tmp_path)
    append(create(store, "a", 0), b"a")
    append(create(store, "a-0", 0), b"a-0")
    append(create(store, "a-1", 2), b"a-1")
    for name in ("a-00", "a-\u0663", "a", "-1", "a-1.tmp"):
        (tmp_path / name).mkdir()
    assert store.stored() == [("a", 0), ("a-0", 0), ("a-1", 2)]
    store.close(clean=False)
    logs = open_all(opened(tmp_path)).opened
    assert {key: values_in(log) for key, log in logs.items()} == {
        ("a", 0): [b"a"], ("a-0", 0): [b"a-0"], ("a-1", 2): [b"a-1"]
    }  # fmt: skip


def test_what_is_appended_after_a_truncation_is_checked_after_a_crash(tmp_path):
    """A recovery point of the time before would vouch for it, and refuse the log once it finds otherwise."""
    store = opened(tmp_path)
    log = create(store)
    fill(log, 20)
    flush(log)
    store.checkpoint()
    store.truncate("orders", 0, 5, now_ms=NOW_MS)
    assert log.end_offset == 5
    fill(log, 5)
    store.close(clean=False)
    flip_byte(tmp_path / "orders-0" / "00000000000000000000.log", -1)
    assert offsets_in(open_all(opened(tmp_path)).opened["orders", 0]) == list(range(9))


@pytest.mark.parametrize("content", [b"", b"0\n7\nbroken", b"\xff\xfe" * 20, b"0\n1\norders 0 -9\n"])
def test_damaged_checkpoints_cost_time_and_no_data(tmp_path, content):
    store = opened(tmp_path)
    fill(create(store), 5)
    store.close()
    for path in tmp_path.glob("*-checkpoint"):
        path.write_bytes(content)
    (tmp_path / ".kafka_cleanshutdown").unlink()
    store = opened(tmp_path)
    assert open_all(store).opened["orders", 0].end_offset == 5


def test_a_full_disk_refuses_writes_and_recovers(tmp_path):
    """A real one: the kernel refuses to let the file grow."""
    script = Path(__file__).with_name("full_disk.py")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path.cwd()), *sys.path])}
    done = subprocess.run([sys.executable, script, tmp_path], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "ok" in done.stdout


def test_a_node_that_looks_for_its_cluster_takes_its_id_once(tmp_path: Path) -> None:
    store = opened(tmp_path, founding=False)
    directory_id = store.directory_id
    assert store.cluster_id == ""
    store.close()
    store = opened(tmp_path, founding=False)
    assert (store.cluster_id, store.directory_id) == ("", directory_id)
    store.join_cluster("theirs")
    store.join_cluster("theirs")
    with pytest.raises(InconsistentMetaProperties, match="belongs to cluster theirs, not to another"):
        store.join_cluster("another")
    store.close()
    store = opened(tmp_path, founding=False)
    assert (store.cluster_id, store.directory_id) == ("theirs", directory_id)
    store.close()


def test_a_node_that_founds_alone_after_all_makes_an_id(tmp_path: Path) -> None:
    opened(tmp_path, founding=False).close()
    store = opened(tmp_path)
    assert len(store.cluster_id) == 22
    store.close()
