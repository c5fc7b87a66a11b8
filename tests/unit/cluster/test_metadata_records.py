"""Metadata records on the wire, compared with bytes worked out by hand from Kafka's schemas."""

from uuid import UUID

import pytest

from penstock.cluster import metadata_records, rare_records
from penstock.cluster.metadata_records import MetadataRecord, UnreadableRecord, decode_record, encode_record

ID = UUID("00112233-4455-6677-8899-aabbccddeeff")
ID_HEX = "00112233445566778899aabbccddeeff"
UNASSIGNED_HEX = "00000000000000000000000000000001"

# Frame version 1, key, version; then the message. Compact strings and arrays carry their length plus one, and
# every structure ends with the number of its tagged fields.
BY_HAND: list[tuple[MetadataRecord, str]] = [
    (
        metadata_records.RegisterBrokerRecord(
            broker_id=1,
            incarnation_id=ID,
            broker_epoch=7,
            end_points=(
                metadata_records.BrokerEndpoint(name="EXT", host="h", port=65535, security_protocol=0),
            ),
            features=(metadata_records.BrokerFeature(name="f", min_supported_version=1, max_supported_version=7),),
            rack=None,
            fenced=False,
            log_dirs=(ID,),
        ),
        "010003" "00000001" "00" + ID_HEX + "0000000000000007"
        "02" "04455854" "0268" "ffff" "0000" "00"
        "02" "0266" "0001" "0007" "00"
        "00" "00" "00"
        "01" "00" "11" "02" + ID_HEX,
    ),
    (rare_records.UnregisterBrokerRecord(broker_id=3, broker_epoch=9), "010100" "00000003" "0000000000000009" "00"),
    (metadata_records.TopicRecord(name="orders", topic_id=ID), "010200" "076f7264657273" + ID_HEX + "00"),
    (
        metadata_records.PartitionRecord(
            partition_id=5,
            topic_id=ID,
            replicas=(1, 2),
            isr=(1,),
            leader=1,
            leader_epoch=3,
            partition_epoch=4,
            directories=(metadata_records.UNASSIGNED_DIRECTORY, None),
        ),
        "010302" "00000005" + ID_HEX + "03" "00000001" "00000002" "02" "00000001" "01" "01"
        "00000001" "00000003" "00000004" "03" + UNASSIGNED_HEX + "00" * 16 + "00",
    ),
    (
        metadata_records.PartitionRecord(
            partition_id=0,
            topic_id=ID,
            replicas=(1,),
            isr=(),
            leader=-1,
            leader_recovery_state=1,
            leader_epoch=0,
            partition_epoch=0,
            directories=(),
            eligible_leader_replicas=(1,),
            last_known_elr=(),
        ),
        "010302" "00000000" + ID_HEX + "02" "00000001" "01" "01" "01"
        "ffffffff" "00000000" "00000000" "01"
        "03" "00" "01" "01" "01" "05" "02" "00000001" "02" "01" "01",
    ),
    (
        metadata_records.ConfigRecord(resource_type=2, resource_name="t", name="retention.ms", value=None),
        "010400" "02" "0274" "0d726574656e74696f6e2e6d73" "00" "00",
    ),
    (
        metadata_records.PartitionChangeRecord(partition_id=2, topic_id=ID, isr=(), leader=-1),
        "010502" "00000002" + ID_HEX + "02" "00" "01" "01" "01" "04" "ffffffff",
    ),
    (
        metadata_records.PartitionChangeRecord(partition_id=2, topic_id=ID, directories=(None,), last_known_elr=(3,)),
        "010502" "00000002" + ID_HEX + "02" "07" "05" "02" "00000003" "08" "11" "02" + "00" * 16,
    ),
    (rare_records.FenceBrokerRecord(id=1, epoch=2), "010700" "00000001" "0000000000000002" "00"),
    (rare_records.UnfenceBrokerRecord(id=1, epoch=2), "010800" "00000001" "0000000000000002" "00"),
    (metadata_records.RemoveTopicRecord(topic_id=ID), "010900" + ID_HEX + "00"),
    (metadata_records.FeatureLevelRecord(name="metadata.version", feature_level=7),
     "010c00" "116d657461646174612e76657273696f6e" "0007" "00"),
    (
        metadata_records.ProducerIdsRecord(broker_id=1, broker_epoch=-1, next_producer_id=1000),
        "010f00" "00000001" "ffffffffffffffff" "00000000000003e8" "00",
    ),
    (
        rare_records.BrokerRegistrationChangeRecord(broker_id=1, broker_epoch=2, fenced=-1),
        "011102" "00000001" "0000000000000002" "01" "00" "01" "ff",
    ),
    (rare_records.NoOpRecord(), "011400" "00"),
    (rare_records.BeginTransactionRecord(name="b"), "011700" "01" "00" "02" "0262"),
    (rare_records.EndTransactionRecord(), "011800" "00"),
    (rare_records.AbortTransactionRecord(), "011900" "00"),
    (
        rare_records.ClientQuotaRecord(
            entity=(rare_records.QuotaEntity(entity_type="user", entity_name=None),), key="k", value=1.5, remove=True
        ),
        "010e00" "02" "0575736572" "00" "00" "026b" "3ff8000000000000" "01" "00",
    ),
    (
        rare_records.AccessControlEntryRecord(
            id=ID, resource_type=2, resource_name="t", pattern_type=3, principal="User:a", host="*",
            operation=3, permission_type=3,
        ),
        "011200" + ID_HEX + "02" "0274" "03" "07557365723a61" "022a" "03" "03" "00",
    ),
    (rare_records.RemoveAccessControlEntryRecord(id=ID), "011300" + ID_HEX + "00"),
    (
        rare_records.UserScramCredentialRecord(
            name="u", mechanism=1, salt=b"s", stored_key=b"k", server_key=b"v", iterations=4096
        ),
        "010b00" "0275" "01" "0273" "026b" "0276" "00001000" "00",
    ),
    (rare_records.RemoveUserScramCredentialRecord(name="u", mechanism=1), "011600" "0275" "01" "00"),
    (
        rare_records.DelegationTokenRecord(
            owner="User:a", requester="User:b", renewers=("User:c",), issue_timestamp=1, max_timestamp=3,
            expiration_timestamp=2, token_id="i",
        ),
        "010a00" "07557365723a61" "07557365723a62" "02" "07557365723a63"
        "0000000000000001" "0000000000000003" "0000000000000002" "0269" "00",
    ),
    (rare_records.RemoveDelegationTokenRecord(token_id="i"), "011a00" "0269" "00"),
    (
        rare_records.RegisterControllerRecord(
            controller_id=1,
            incarnation_id=ID,
            end_points=(rare_records.ControllerEndpoint(name="C", host="h", port=9093, security_protocol=0),),
            features=(rare_records.ControllerFeature(name="f", min_supported_version=1, max_supported_version=2),),
        ),
        "011b00" "00000001" + ID_HEX + "00" "02" "0243" "0268" "2385" "0000" "00" "02" "0266" "0001" "0002" "00" "00",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("record", "hexed"), BY_HAND, ids=lambda v: type(v).__name__)
def test_a_record_is_written_as_kafka_writes_it(record: MetadataRecord, hexed: str) -> None:
    assert encode_record(record).hex() == hexed
    assert decode_record(bytes.fromhex(hexed)) == record


def test_every_kind_of_record_is_checked() -> None:
    written = {type(record) for record, _ in BY_HAND}
    assert written == set(metadata_records.RECORD_TYPES.values())


def test_an_older_version_with_the_same_layout_is_read() -> None:
    written = bytearray(
        encode_record(metadata_records.PartitionChangeRecord(partition_id=2, topic_id=ID, isr=(1,)))
    )
    written[2] = 0
    assert decode_record(bytes(written)) == metadata_records.PartitionChangeRecord(
        partition_id=2, topic_id=ID, isr=(1,)
    )


def test_a_tagged_field_of_a_later_version_is_refused_and_not_lost() -> None:
    # Two tagged fields: the leader, and number 99 with two bytes.
    raw = bytes.fromhex("01050200000002" + ID_HEX + "020104000000036302abcd")
    with pytest.raises(UnreadableRecord, match=r"newer kind.*99"):
        decode_record(raw)


@pytest.mark.parametrize(
    ("hexed", "reason"),
    [
        ("", "cut short"),
        ("020200", "frame version 2"),
        ("017f00", "unknown key 127"),
        ("010000", "RegisterBrokerRecord has version 0, readable are 2 to 3"),
        ("010201" + "0274" + ID_HEX + "00", "TopicRecord has version 1"),
        ("010200" + "0274" + ID_HEX[:-2], "cut short"),
        ("010200" + "0274" + ID_HEX + "00ff", "1 bytes after TopicRecord"),
    ],
)
def test_what_cannot_be_read_is_refused(hexed: str, reason: str) -> None:
    with pytest.raises(UnreadableRecord, match=reason):
        decode_record(bytes.fromhex(hexed))
