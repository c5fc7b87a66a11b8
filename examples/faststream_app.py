"""A FastStream application: `python examples/faststream_app.py [HOST:PORT]` greets three people and ends."""

import asyncio
import sys

from faststream import FastStream
from faststream.kafka import KafkaBroker

bootstrap = sys.argv[1] if len(sys.argv) > 1 else "localhost:9092"
PEOPLE = ("Ada", "Grace", "Edsger")

broker = KafkaBroker(bootstrap)
app = FastStream(broker)
greeted: list[str] = []


@broker.subscriber("names", group_id="greeters", auto_offset_reset="earliest")
@broker.publisher("greetings.polite")
async def greet(name: str) -> str:
    return f"Good day, {name}!"


@broker.subscriber("greetings.polite", group_id="printers", auto_offset_reset="earliest")
async def show(greeting: str) -> None:
    print(greeting)
    greeted.append(greeting)
    if len(greeted) == len(PEOPLE):
        app.exit()


@app.after_startup
async def introduce() -> None:
    for name in PEOPLE:
        await broker.publish(name, topic="names")


if __name__ == "__main__":
    asyncio.run(app.run())
