"""Scheduled messages: `python examples/scheduled_messages.py [HOST:PORT]` sends three and reads them when they are due.

Any producer can set the header, and consumers need no change.
"""

import sys
import time

from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import AdminClient, NewTopic

bootstrap = sys.argv[1] if len(sys.argv) > 1 else "localhost:9092"

topic = NewTopic("reminders", 1, config={"penstock.schedule.enable": "true"})
admin = AdminClient({"bootstrap.servers": bootstrap})
admin.create_topics([topic])["reminders"].result()

producer = Producer({"bootstrap.servers": bootstrap})
in_a_second = str(int((time.time() + 1) * 1000))
producer.produce("reminders", "in two seconds", headers={"penstock-deliver-after": "PT2S"})
producer.produce("reminders", "in a second", headers={"penstock-deliver-at": in_a_second})
producer.produce("reminders", "now")
producer.flush()

consumer = Consumer(
    {"bootstrap.servers": bootstrap, "group.id": "reminder-readers", "auto.offset.reset": "earliest"}
)
consumer.subscribe(["reminders"])
for _ in range(3):
    while (message := consumer.poll(1.0)) is None or message.error():
        pass
    due = dict(message.headers() or ()).get("penstock-scheduled-for")
    is_early = due is not None and time.time() * 1000 < int(due)
    print(message.value().decode(), "(too early)" if is_early else "")
consumer.close()
