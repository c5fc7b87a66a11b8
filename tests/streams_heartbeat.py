"""The first heartbeat of a member of a streams group, for any version of the schema."""

from datetime import timedelta
from typing import Any


def joining_heartbeat(schemas: Any, group: str, **subtopology: Any) -> Any:
    """`schemas` has kio's classes of the request; `subtopology` has fields of the only sub-topology."""
    fields = {
        "subtopology_id": "0",
        "source_topics": ("words",),
        "source_topic_regex": (),
        "state_changelog_topics": (),
        "repartition_sink_topics": (),
        "repartition_source_topics": (),
        "copartition_groups": (),
        **subtopology,
    }
    return schemas.StreamsGroupHeartbeatRequest(
        group_id=group,
        member_id="one",
        member_epoch=0,
        endpoint_information_epoch=0,
        rebalance_timeout=timedelta(minutes=5),
        topology=schemas.Topology(epoch=0, subtopologies=(schemas.Subtopology(**fields),)),
        active_tasks=(),
        standby_tasks=(),
        warmup_tasks=(),
        process_id="one",
        user_endpoint=None,
        client_tags=(),
        task_offsets=None,
        task_end_offsets=None,
        shutdown_application=False,
    )
