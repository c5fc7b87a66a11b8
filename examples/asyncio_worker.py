"""A worker of a consumer group with asyncio: `python examples/asyncio_worker.py [HOST:PORT]` does five jobs and ends.

It commits each job after it is done, so a crash repeats at most the current job: at-least-once.
"""

import asyncio
import json
import sys

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer

JOBS = 5


async def publish_jobs(bootstrap: str) -> None:
    async with AIOKafkaProducer(bootstrap_servers=bootstrap, enable_idempotence=True) as producer:
        for number in range(JOBS):
            await producer.send_and_wait("async.jobs", json.dumps({"job": number}).encode())


async def work(bootstrap: str) -> None:
    consumer = AIOKafkaConsumer(
        "async.jobs",
        bootstrap_servers=bootstrap,
        group_id="async-workers",
        auto_offset_reset="earliest",
        enable_auto_commit=False,
    )
    async with consumer:
        for _ in range(JOBS):
            message = await consumer.getone()
            print(f"done: job {json.loads(message.value)['job']}")
            await consumer.commit()


async def main(bootstrap: str) -> None:
    await publish_jobs(bootstrap)
    await work(bootstrap)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "localhost:9092"))
