"""Topics that tests create with librdkafka."""

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient, NewTopic


def create_topics(admin: AdminClient, *topics: NewTopic, within_s: float = 60.0) -> None:
    """For names that no other test has.

    librdkafka sends the request again when the connection breaks before the reply, and is then told that they exist.
    """
    for created in admin.create_topics(list(topics), request_timeout=within_s).values():
        try:
            created.result(within_s)
        except KafkaException as error:
            if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                raise
