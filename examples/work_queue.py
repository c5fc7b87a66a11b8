"""A work queue: `python examples/work_queue.py [HOST:PORT]` does four jobs, one of which never succeeds.

The worker is an ordinary ShareConsumer and only reports how each job went. The settings of the group say how long a
failed job waits, how often it is tried, and where it goes after that.
"""

import sys

from confluent_kafka import AcknowledgeType, Consumer, Message, Producer, ShareConsumer
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource

bootstrap = sys.argv[1] if len(sys.argv) > 1 else "localhost:9092"
POLICY = {
    "share.auto.offset.reset": "earliest",
    "share.delivery.count.limit": "3",
    "penstock.share.backoff": "exponential",
    "penstock.share.backoff.ms": "100",
}


def set_policy(group: str) -> None:
    changes = [
        ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
        for name, value in POLICY.items()
    ]
    resource = ConfigResource(ConfigResource.Type.GROUP, group, incremental_configs=changes)
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.incremental_alter_configs([resource])[resource].result()


def outcome(message: Message) -> AcknowledgeType:
    """RELEASE a job that may succeed later; REJECT one that never will."""
    job, attempt = message.value().decode(), message.delivery_count()
    print(f"{job}, attempt {attempt}")
    if job == "flaky" and attempt < 2:
        return AcknowledgeType.RELEASE
    return AcknowledgeType.RELEASE if job == "hopeless" else AcknowledgeType.ACCEPT


def work(deliveries: int) -> None:
    settings = {"bootstrap.servers": bootstrap, "group.id": "job-workers"}
    worker = ShareConsumer(settings | {"share.acknowledgement.mode": "explicit"})
    worker.subscribe(["jobs"])
    while deliveries > 0:
        for message in worker.poll(1.0):
            worker.acknowledge(message, outcome(message))
            deliveries -= 1
        worker.commit_sync(10.0)
    worker.close()


def show_dead_letter() -> None:
    reader = Consumer(
        {"bootstrap.servers": bootstrap, "group.id": "dead-job-readers", "auto.offset.reset": "earliest"}
    )
    reader.subscribe(["jobs.dlq"])
    while (letter := reader.poll(1.0)) is None or letter.error():
        pass
    headers = dict(letter.headers())
    print(f"dead letter: {letter.value().decode()}, because of {headers['penstock.dlq.reason'].decode()}")
    reader.close()


if __name__ == "__main__":
    set_policy("job-workers")
    producer = Producer({"bootstrap.servers": bootstrap})
    for job in ("easy", "flaky", "hopeless", "simple"):
        producer.produce("jobs", job)
    producer.flush()
    work(deliveries=7)  # four jobs, one retry of "flaky", two retries of "hopeless"
    show_dead_letter()
