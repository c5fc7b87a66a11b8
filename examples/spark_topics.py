"""Topics as Spark tables: python examples/spark_topics.py [localhost:9092]

Needs `pip install 'penstock[spark]'`, which also installs a Java runtime in case the machine has none.
"""

import sys

from penstock.spark.session import session

BOOTSTRAP = sys.argv[1] if len(sys.argv) > 1 else "localhost:9092"


def main() -> None:
    spark = session("spark-topics", settings={"spark.log.level": "ERROR"})
    fruit = spark.createDataFrame(
        [("ada", "apple"), ("grace", "pear"), ("ada", "plum")], "key STRING, value STRING"
    )
    (
        fruit.write.format("penstock")
        .option("kafka.bootstrap.servers", BOOTSTRAP)
        .option("topic", "fruit")
        .option("contract", "exactly-once")
        .mode("append")
        .save()
    )
    topic = (
        spark.read.format("penstock")
        .option("kafka.bootstrap.servers", BOOTSTRAP)
        .option("subscribe", "fruit")
        .load()
    )
    counts = topic.selectExpr("cast(key AS STRING) AS key").groupBy("key").count().orderBy("key")
    for row in counts.collect():
        print(f"{row['key']}: {row['count']}")
    spark.stop()


if __name__ == "__main__":
    main()
