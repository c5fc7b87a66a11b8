"""Control records have the bytes that Kafka writes and reads, checked with kio's schemas."""

import io
from typing import Any
from uuid import UUID

import pytest
from kio.schema.k_raft_version_record.v0.data import KRaftVersionRecord
from kio.schema.leader_change_message.v0 import data as leader_change
from kio.schema.snapshot_footer_record.v0.data import SnapshotFooterRecord
from kio.schema.snapshot_header_record.v0.data import SnapshotHeaderRecord
from kio.schema.voters_record.v0 import data as voters_record
from kio.serial import entity_writer

from penstock.broker.quorum import control_records
from penstock.protocol.errors import MalformedFrame
from penstock.raft.types import Address, KRaftVersion, LeaderChange, ReplicaKey, Voter, VoterSet

VOTERS = VoterSet(
    (
        Voter(ReplicaKey(1, UUID(int=7)), (Address("PLAINTEXT", "höst", 65535), Address("b", "h" * 300, 0))),
        Voter(ReplicaKey(2**31 - 1), ()),
    )
)


def written(message: Any) -> bytes:
    out = io.BytesIO()
    entity_writer(type(message))(out, message)
    return out.getvalue()


def voters_message(voters: VoterSet) -> Any:
    wire = voters_record
    feature = wire.KRaftVersionFeature(min_supported_version=0, max_supported_version=1)
    return wire.VotersRecord(
        version=0,
        voters=tuple(
            wire.Voter(
                voter_id=voter.key.id,
                voter_directory_id=voter.key.directory,
                endpoints=tuple(
                    wire.Endpoint(name=at.name, host=at.host, port=at.port) for at in voter.addresses
                ),
                k_raft_version_feature=feature,
            )
            for voter in voters
        ),
    )


def test_a_leader_change() -> None:
    many = tuple(ReplicaKey(number) for number in range(200))
    record = LeaderChange(leader_id=3, voters=many, granting=many[1:2])
    voters, granting = (
        tuple(leader_change.Voter(voter_id=key.id) for key in keys) for keys in (many, many[1:2])
    )
    message = leader_change.LeaderChangeMessage(
        version=0, leader_id=3, voters=voters, granting_voters=granting
    )
    assert control_records.encode_leader_change(record) == written(message)


def test_a_version_and_the_ends_of_a_snapshot() -> None:
    version = KRaftVersionRecord(version=0, k_raft_version=1)
    assert control_records.encode_kraft_version(KRaftVersion(1)) == written(version)
    header = SnapshotHeaderRecord(version=0, last_contained_log_timestamp=1 << 40)
    assert control_records.encode_snapshot_header(1 << 40) == written(header)
    assert control_records.encode_snapshot_footer() == written(SnapshotFooterRecord(version=0))


@pytest.mark.parametrize("voters", [VOTERS, VoterSet()])
def test_voters(voters: VoterSet) -> None:
    value = control_records.encode_voters(voters)
    assert value == written(voters_message(voters))
    assert control_records.decode_voters(value) == voters


def test_what_a_later_release_adds_is_passed_over() -> None:
    alone = VoterSet((Voter(ReplicaKey(1, UUID(int=7)), (Address("a", "b", 1),)),))
    value = control_records.encode_voters(alone)
    tags = b"\x01\x05\x02xy"
    later = value[:-3] + tags + tags + tags
    assert control_records.decode_voters(later) == alone


def test_voters_that_are_cut_short_are_not_guessed() -> None:
    value = control_records.encode_voters(VOTERS)
    for size in range(2, len(value) - 1):
        with pytest.raises(MalformedFrame):
            control_records.decode_voters(value[:size])
