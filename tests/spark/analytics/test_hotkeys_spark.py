"""The keys with the most records of each partition, with their shares."""

from tests.compat.message import Message

from penstock.spark.analytics import heaviest_keys, hotkeys
from penstock.spark.pipelines.declaration import Job, JobContext


def test_hot_keys_with_their_share(spark, topics, run, unique):
    topic = topics.create(unique("t"), 2)
    topics.fill(
        topic,
        [
            *[Message(key=b"hot", value=b"v" * 9) for _ in range(60)],
            *[Message(key=b"warm", value=b"v" * 9) for _ in range(20)],
            *[Message(key=b"%d" % number, value=b"v") for number in range(10)],
            *[Message(key=None, value=b"v") for _ in range(10)],
            *[Message(key=b"k%d" % (number % 2), value=None, partition=1) for number in range(4)],
        ],
    )
    found = heaviest_keys(spark, topic, bootstrap=topics.bootstrap, top=2).collect()
    assert [
        (row["partition"], bytes(row["key"]), row["records"], row["bytes"], row["share"]) for row in found
    ] == [
        (0, b"hot", 60, 720, 0.6),
        (0, b"warm", 20, 260, 0.2),
        (1, b"k0", 2, 4, 0.5),
        (1, b"k1", 2, 4, 0.5),
    ]
    notes, progress = [], []
    job = hotkeys(topic, top="1")
    assert isinstance(job, Job)
    job.run(
        JobContext(
            spark=spark,
            run=run,
            progress=lambda done, total: progress.append((done, total)),
            should_stop=lambda: False,
            note=notes.append,
        )
    )
    (note,) = notes
    assert [line.split() for line in note.splitlines()[:3]] == [
        ["PARTITION", "KEY", "RECORDS", "BYTES", "SHARE"],
        ["0", "hot", "60", "720", "60.0%"],
        ["1", "k0", "2", "4", "50.0%"],
    ]
    assert "penstock.client.salting" in note
    assert progress[-1] == (1, 1)
