"""Every setting of a node, declared once, with Kafka's name, meaning and default where Kafka has the setting.

Where a default differs from Apache Kafka's, the setting's text says so. A setting that a topic can override is
dynamic: an operator can change it while the node runs. So is every setting that Apache Kafka lets operators change at
run time. All others are read at start.
"""

from penstock.broker.config.access_settings import ACCESS_SETTINGS
from penstock.broker.config.coordinator_definitions import (
    CONSUMER_GROUP_SETTINGS,
    SCHEDULE_SETTINGS,
    SHARE_GROUP_SETTINGS,
    SHARE_STATE_SETTINGS,
    STREAMS_GROUP_SETTINGS,
    TRANSACTION_SETTINGS,
)
from penstock.broker.config.sasl_definitions import SASL_SETTINGS
from penstock.broker.config.security_definitions import SECURITY_SETTINGS
from penstock.cluster.topic_settings import FLUSH_DOC, FLUSH_POLICIES
from penstock.protocol.config_def import Setting, SettingType, SettingValue, static_setting

INT_MAX = (1 << 31) - 1
LONG_MAX = (1 << 63) - 1
_MIB = 1 << 20

_INT, _SHORT, _LONG = SettingType.INT, SettingType.SHORT, SettingType.LONG
_STRING, _LIST = SettingType.STRING, SettingType.LIST
_BOOLEAN, _DOUBLE = SettingType.BOOLEAN, SettingType.DOUBLE

#: The values of replica.selector.class, and whether each lets consumers read from a follower.
REPLICA_SELECTORS = {
    f"{package}{name}": name == "RackAwareReplicaSelector"
    for package in ("org.apache.kafka.common.replica.", "")
    for name in ("RackAwareReplicaSelector", "LeaderSelector")
}


def _one_directory(value: SettingValue) -> str | None:
    assert isinstance(value, str)
    if not value.strip():
        return "must name a directory"
    return "must be one directory: a node has a single data folder" if "," in value else None


def parse_connection_overrides(value: str) -> dict[str, int]:
    """Parse connection limits by host, as in `host:100,127.0.0.1:200`. Raises ValueError."""
    found = {}
    for entry in filter(None, map(str.strip, value.split(","))):
        host, _, count = entry.rpartition(":")
        host = host.strip().removeprefix("[").removesuffix("]")
        if not host or not count.strip().isdecimal():
            raise ValueError(f"{entry!r} is not HOST:COUNT")
        found[host] = int(count)
    return found


def _connection_overrides(value: SettingValue) -> str | None:
    assert isinstance(value, str)
    try:
        parse_connection_overrides(value)
    except ValueError as error:
        return str(error)
    return None


_IDENTITY = (
    static_setting("node.id", _INT, 1, "Id of this node in the cluster.", 0),
    static_setting(
        "broker.rack",
        _STRING,
        None,
        "Rack or zone of this node, told to clients and used in placement; nodes without one share their host's.",
    ),
    Setting(
        name="log.dirs",
        type=_STRING,
        default="penstock-data",
        doc="The data folder (one per node). Apache Kafka's default is /tmp/kafka-logs.",
        check=_one_directory,
        read_only=True,
    ),
    Setting(
        "num.recovery.threads.per.data.dir",
        _INT,
        2,
        "Threads that open and recover partitions at start, and close them. A start uses the value given to it.",
        1,
    ),
)

_NETWORK = (
    static_setting(
        "listeners",
        _STRING,
        "PLAINTEXT://localhost:9092",
        "Addresses to listen on: NAME://HOST:PORT, comma separated; no host is every interface, port 0 any "
        "free port. Apache Kafka's default listens on every interface.",
    ),
    static_setting(
        "advertised.listeners",
        _STRING,
        None,
        "Addresses told to clients, by listener name; the listener's own address where not given.",
    ),
    static_setting(
        "socket.listen.backlog.size",
        _INT,
        1024,
        "Connections that may wait to be accepted. Apache Kafka's default is 50, which makes a crowd that "
        "connects at once wait a second.",
        1,
    ),
    static_setting(
        "socket.request.max.bytes", _INT, 100 * _MIB, "Largest request frame; a larger one is cut off.", 1
    ),
    static_setting(
        "penstock.request.max.bytes",
        _INT,
        5 * _MIB // 4,
        "Largest request of a client that carries no records: one is handled in a single piece, and many small parts "
        "take long. A larger one is cut off. Apache Kafka has no such bound.",
        65_536,
    ),
    static_setting(
        "penstock.request.elements.max",
        _INT,
        20_000,
        "Elements that the arrays of a client's request may have in all: topics, partitions, names. A connection that "
        "sends more is closed. Fetch has no such bound, and Produce one of its own. Apache Kafka has no such bound.",
        1_000,
    ),
    static_setting(
        "queued.max.request.bytes",
        _LONG,
        256 * _MIB,
        "Bytes of requests held at once over all connections; above it, reading pauses. -1 is no bound, "
        "which is Apache Kafka's default.",
        -1,
    ),
    Setting("max.connections", _INT, INT_MAX, "Connections open at once.", 0),
    Setting("max.connections.per.ip", _INT, INT_MAX, "Connections open at once from one address.", 0),
    Setting(
        name="max.connections.per.ip.overrides",
        type=_STRING,
        default="",
        doc="Other limits than max.connections.per.ip for some addresses or host names, as in host:100,127.0.0.1:200.",
        check=_connection_overrides,
        read_only=False,
    ),
    Setting(
        "max.connection.creation.rate",
        _INT,
        INT_MAX,
        "Connections per second that clients may open; those above it wait their turn. The inter-broker listener has "
        "no such limit.",
        1,
    ),
    static_setting(
        "quota.window.num",
        _INT,
        11,
        "Number of windows over which the rates of client quotas are measured.",
        2,
    ),
    static_setting("quota.window.size.seconds", _INT, 1, "Length of a window of client quotas.", 1),
    static_setting(
        "controller.quota.window.num", _INT, 11, "Number of windows for controller_mutation_rate.", 2
    ),
    static_setting(
        "controller.quota.window.size.seconds", _INT, 1, "Length of a window for controller_mutation_rate.", 1
    ),
    static_setting(
        "connections.max.idle.ms", _LONG, 600_000, "A connection idle for this long is closed; -1 never.", -1
    ),
    static_setting("fetch.max.bytes", _INT, 55 * _MIB, "Most bytes that one fetch may return.", 1024),
    static_setting(
        "max.incremental.fetch.session.cache.slots",
        _INT,
        1000,
        "Incremental fetch sessions remembered at once.",
        0,
    ),
    static_setting(
        "telemetry.max.bytes",
        _INT,
        _MIB,
        "Largest payload of client metrics that one push may carry, as compressed.",
        1,
    ),
    static_setting("max.request.partition.size.limit", _INT, 2000, "Partitions described in one answer.", 1),
)

_TOPICS = (
    Setting("num.partitions", _INT, 1, "Partitions of a topic created without saying how many.", 1),
    static_setting(
        "default.replication.factor", _INT, 1, "Replicas of a topic created without saying how many.", 1
    ),
    static_setting(
        "auto.create.topics.enable", _BOOLEAN, True, "Create an unknown topic when a client asks for it."
    ),
    static_setting("delete.topic.enable", _BOOLEAN, True, "Allow topics to be deleted."),
    Setting("message.max.bytes", _INT, 1_048_588, "Largest record batch, after compression.", 0),
    Setting("min.insync.replicas", _INT, 1, "Replicas that must hold a write before acks=all.", 1),
    Setting(
        "unclean.leader.election.enable", _BOOLEAN, False, "Let a replica that may lack data become leader."
    ),
    Setting(
        "compression.type",
        _STRING,
        "producer",
        "Codec that batches are stored with; `producer` keeps what was sent.",
        choices=("uncompressed", "zstd", "lz4", "snappy", "gzip", "producer"),
    ),
    Setting(
        "compression.gzip.level",
        _INT,
        -1,
        "Accepted for compatibility; the codec's own level is used.",
        -1,
        9,
    ),
    Setting(
        "compression.lz4.level", _INT, 9, "Accepted for compatibility; the codec's own level is used.", 1, 17
    ),
    Setting(
        "compression.zstd.level",
        _INT,
        3,
        "Accepted for compatibility; the codec's own level is used.",
        -(1 << 17),
        22,
    ),
)

_LOG = (
    Setting("log.segment.bytes", _INT, 1 << 30, "Size at which a new segment file begins.", 14),
    Setting("log.roll.ms", _LONG, None, "Age at which a new segment begins; else log.roll.hours.", 1),
    Setting("log.roll.hours", _INT, 168, "Age in hours at which a new segment begins.", 1),
    Setting(
        "log.roll.jitter.ms", _LONG, None, "Accepted for compatibility; segments roll without jitter.", 0
    ),
    Setting("log.roll.jitter.hours", _INT, 0, "Accepted for compatibility; segments roll without jitter.", 0),
    Setting(
        "log.retention.ms",
        _LONG,
        None,
        "How long records are kept; -1 for ever; else log.retention.minutes.",
        -1,
    ),
    Setting("log.retention.minutes", _INT, None, "How long records are kept, in minutes; else hours.", -1),
    Setting("log.retention.hours", _INT, 168, "How long records are kept, in hours; -1 for ever.", -1),
    Setting(
        "log.retention.bytes", _LONG, -1, "Size a partition may reach before old segments go; -1 any.", -1
    ),
    static_setting("log.retention.check.interval.ms", _LONG, 300_000, "How often retention is applied.", 1),
    Setting(
        "log.cleanup.policy",
        _LIST,
        ("delete",),
        "What happens to old records: delete, compact, or both.",
        choices=("compact", "delete"),
    ),
    Setting("log.segment.delete.delay.ms", _LONG, 60_000, "Wait before a removed file is erased.", 0),
    Setting("log.index.size.max.bytes", _INT, 10 * _MIB, "Largest offset index of a segment.", 4),
    Setting("log.index.interval.bytes", _INT, 4096, "Log bytes between two index entries.", 0),
    Setting("log.preallocate", _BOOLEAN, False, "Accepted for compatibility; files are never preallocated."),
    Setting(
        "log.message.timestamp.type",
        _STRING,
        "CreateTime",
        "Whether a record carries its creation time or the time of its append.",
        choices=("CreateTime", "LogAppendTime"),
    ),
    Setting(
        "log.message.timestamp.before.max.ms", _LONG, LONG_MAX, "How far a timestamp may lie in the past.", 0
    ),
    Setting(
        "log.message.timestamp.after.max.ms",
        _LONG,
        3_600_000,
        "How far a timestamp may lie in the future.",
        0,
    ),
    Setting("log.flush.interval.messages", _LONG, LONG_MAX, "Records after which a partition is synced.", 1),
    Setting(
        "log.flush.interval.ms", _LONG, None, "Time after which a partition is synced; see penstock.flush.", 0
    ),
    static_setting(
        "log.flush.scheduler.interval.ms", _LONG, LONG_MAX, "How often due partitions are synced.", 1
    ),
    static_setting(
        "log.flush.offset.checkpoint.interval.ms", _INT, 60_000, "How often recovery points are saved.", 0
    ),
)

_CLEANER = (
    static_setting("log.cleaner.enable", _BOOLEAN, True, "Compact topics whose cleanup policy asks for it."),
    Setting("log.cleaner.backoff.ms", _LONG, 15_000, "Rest of the cleaner when nothing needs it.", 0),
    Setting(
        "log.cleaner.threads",
        _INT,
        1,
        "Partitions that are compacted at once; at most one less than penstock.io.threads, whose threads they use.",
        1,
    ),
    Setting(
        "log.cleaner.dedupe.buffer.size",
        _LONG,
        128 * _MIB,
        "Memory that compaction may use for keys, shared by log.cleaner.threads.",
        _MIB,
    ),
    Setting(
        "log.cleaner.min.cleanable.ratio", _DOUBLE, 0.5, "Uncompacted share of a log that is cleaned.", 0, 1
    ),
    Setting("log.cleaner.delete.retention.ms", _LONG, 86_400_000, "How long tombstones are kept.", 0),
    Setting("log.cleaner.min.compaction.lag.ms", _LONG, 0, "Age before a record is compacted.", 0),
    Setting("log.cleaner.max.compaction.lag.ms", _LONG, LONG_MAX, "Age by which a record is compacted.", 1),
)

_GROUPS = (
    static_setting(
        "offsets.topic.num.partitions", _INT, 50, "Partitions of the topic that holds group offsets.", 1
    ),
    static_setting(
        "offsets.topic.replication.factor",
        _SHORT,
        3,
        "Replicas of the topic that holds group offsets; fewer while there are fewer brokers, and raised later.",
        1,
    ),
    static_setting("offsets.topic.segment.bytes", _INT, 100 * _MIB, "Segment size of that topic.", 1),
    static_setting(
        "offsets.commit.timeout.ms",
        _INT,
        5000,
        "How long group requests wait for the replicas of that topic before they are told to try again.",
        1,
    ),
    static_setting(
        "offsets.retention.minutes", _INT, 10_080, "How long an unused group keeps its offsets.", 1
    ),
    static_setting(
        "offsets.retention.check.interval.ms", _LONG, 600_000, "How often old offsets are looked for.", 1
    ),
    static_setting(
        "offset.metadata.max.bytes", _INT, 4096, "Longest note stored with a committed offset.", 0
    ),
    static_setting(
        "group.initial.rebalance.delay.ms",
        _INT,
        0,
        "How long a new group waits for more members. Apache Kafka's default is 3000; the configuration it "
        "ships for development sets 0.",
        0,
    ),
    static_setting(
        "group.min.session.timeout.ms", _INT, 6000, "Shortest session timeout a member may ask for.", 1
    ),
    static_setting(
        "group.max.session.timeout.ms", _INT, 1_800_000, "Longest session timeout a member may ask for.", 1
    ),
    static_setting(
        "group.max.size",
        _INT,
        10_000,
        "Members of one group; as many may be about to join. Apache Kafka's default is no bound.",
        1,
    ),
    static_setting(
        "penstock.groups.max",
        _INT,
        100_000,
        "Groups of every kind that one node coordinates; a further one is refused with POLICY_VIOLATION.",
        1,
    ),
    static_setting(
        "penstock.group.request.max.bytes",
        _INT,
        _MIB,
        "Largest request by which a member joins, syncs or heartbeats: it bounds the subscription, the metadata and "
        "the assignments that a group keeps. Apache Kafka bounds all of a group by the largest batch of its topic.",
        1024,
    ),
    static_setting(
        "penstock.id.max.bytes",
        _INT,
        1024,
        "Longest id of a group, member, instance, rack or transaction; a longer client id is cut. Apache Kafka takes "
        "32767 bytes.",
        64,
        32_000,
    ),
)

_PRODUCERS = (
    Setting("producer.id.expiration.ms", _INT, 86_400_000, "How long an idle producer is remembered.", 1),
    static_setting(
        "producer.id.expiration.check.interval.ms",
        _INT,
        600_000,
        "How often idle producers are forgotten.",
        1,
    ),
)

_CLUSTER = (
    static_setting(
        "process.roles",
        _LIST,
        ("broker", "controller"),
        "What this node does: hold partitions (broker), take part in the metadata quorum (controller), or both.",
        choices=("broker", "controller"),
    ),
    static_setting(
        "controller.quorum.voters",
        _STRING,
        "",
        "The controllers that found a new cluster together: ID@HOST:PORT, comma separated, the same on all of them. "
        "Empty is a cluster of one. Once there is a cluster, its own records say who votes.",
    ),
    static_setting(
        "controller.quorum.bootstrap.servers",
        _STRING,
        "",
        "HOST:PORT of nodes of a running cluster, comma separated, through which this node finds and joins it.",
    ),
    static_setting(
        "controller.quorum.auto.join.enable",
        _BOOLEAN,
        True,
        "A controller that is no voter asks to become one. Apache Kafka's default is false.",
    ),
    static_setting(
        "controller.quorum.election.timeout.ms",
        _INT,
        1000,
        "How long a candidate waits for votes, plus as much again at random. After an election without a winner it is "
        "doubled, up to 8 times this.",
        1,
    ),
    static_setting(
        "controller.quorum.fetch.timeout.ms",
        _INT,
        1500,
        "How long a controller lives without news from the leader before it stands for election, and a leader "
        "without news from a majority before it resigns. Where more than two epochs follow each other it is doubled "
        "with each of them, up to 4 times this, until a leader has been steady. Apache Kafka's default is 2000.",
        1,
    ),
    static_setting(
        "controller.quorum.request.timeout.ms",
        _INT,
        1000,
        "How long a quorum request may take. It is doubled for a node that has not answered in time, up to 4 times "
        "this. Apache Kafka's default is 2000.",
        1,
    ),
    static_setting(
        "controller.quorum.election.backoff.max.ms",
        _INT,
        1000,
        "The longest backoff after an election without a winner.",
        1,
    ),
    static_setting(
        "broker.session.timeout.ms",
        _INT,
        3000,
        "A broker that the controller has not heard of for this long is fenced, and others lead in its place. "
        "Apache Kafka's default is 9000.",
        1,
    ),
    static_setting(
        "broker.heartbeat.interval.ms",
        _INT,
        500,
        "How often a broker reports to the controller. Apache Kafka's default is 2000.",
        1,
    ),
    static_setting(
        "initial.broker.registration.timeout.ms", _INT, 60_000, "How long a start waits to be let in.", 1
    ),
    static_setting("controlled.shutdown.enable", _BOOLEAN, True, "Hand over leadership before stopping."),
    static_setting(
        "penstock.controlled.shutdown.timeout.ms",
        _INT,
        10_000,
        "How long a stop waits to hand over leadership.",
        0,
    ),
    static_setting(
        "inter.broker.listener.name",
        _STRING,
        None,
        "The listener that nodes use among themselves, and the only one on which requests between nodes are served. "
        "Else the listener named NODES, or the address that controller.quorum.voters gives this node; a node alone "
        "has none. Naming the only listener shares it with clients on purpose: everyone who reaches it can take over "
        "the cluster, unless it authenticates its clients.",
    ),
    static_setting(
        "controller.listener.names",
        _LIST,
        (),
        "The listeners on which requests to the controller and between controllers are served, and on no others; nodes "
        "connect to the first of them. A node that is no controller needs only its name and protocol. Without this "
        "setting the inter-broker listener is used; Apache Kafka requires it.",
    ),
    static_setting(
        "penstock.inter.broker.listeners",
        _LIST,
        (),
        "More listeners on which requests between nodes and to the controller are served, while the listeners that "
        "nodes use in a running cluster are changed from node to node.",
    ),
    static_setting(
        "penstock.peer.bind.host",
        _STRING,
        "",
        "Source address of connections to other nodes; empty lets the operating system choose.",
    ),
    static_setting(
        "replica.lag.time.max.ms",
        _LONG,
        10_000,
        "A follower that has not caught up for this long leaves the in-sync set. Apache Kafka's default is 30000.",
        1,
    ),
    static_setting(
        "replica.selector.class",
        _STRING,
        None,
        "Where consumers read: from the leader (LeaderSelector, or nothing), or from an in-sync replica in their "
        "client.rack (RackAwareReplicaSelector); Apache Kafka's full class names are understood. The same on all "
        "brokers: a follower serves consumers only where it is set.",
        choices=("", *REPLICA_SELECTORS),
    ),
    static_setting(
        "replica.fetch.wait.max.ms", _INT, 500, "How long a follower's fetch waits for something new.", 1
    ),
    static_setting(
        "replica.fetch.max.bytes", _INT, _MIB, "Bytes that a follower asks for, per partition.", 1
    ),
    static_setting(
        "replica.fetch.response.max.bytes", _INT, 10 * _MIB, "Bytes that a follower takes in one answer.", 1
    ),
    static_setting(
        "replica.fetch.backoff.ms",
        _INT,
        200,
        "Rest of a follower after an error. Apache Kafka's default is 1000.",
        0,
    ),
    static_setting(
        "replica.socket.timeout.ms",
        _INT,
        3000,
        "How long a request to another node may take. Apache Kafka's default is 30000.",
        1,
    ),
    static_setting(
        "replica.high.watermark.checkpoint.interval.ms",
        _LONG,
        5000,
        "How often high watermarks are saved.",
        1,
    ),
    Setting(
        "penstock.reassignment.bytes.per.second",
        _LONG,
        -1,
        "Bytes per second that this node fetches for replicas that are being moved to it; -1 is no bound.",
        -1,
    ),
    Setting(
        "leader.replication.throttled.rate",
        _LONG,
        LONG_MAX,
        "Bytes per second that this node sends to followers that are not in sync, of the replicas named by "
        "leader.replication.throttled.replicas of their topics.",
        0,
    ),
    Setting(
        "follower.replication.throttled.rate",
        _LONG,
        LONG_MAX,
        "Bytes per second that this node fetches while it is not in sync, for the replicas named by "
        "follower.replication.throttled.replicas of their topics.",
        0,
    ),
    Setting(
        "replica.alter.log.dirs.io.max.bytes.per.second",
        _LONG,
        LONG_MAX,
        "Accepted for compatibility; a node has one data folder, between which nothing is moved.",
        0,
    ),
    static_setting(
        "auto.leader.rebalance.enable", _BOOLEAN, True, "Give leadership back to the preferred replicas."
    ),
    static_setting("leader.imbalance.check.interval.seconds", _LONG, 300, "How often that is looked at.", 1),
    static_setting(
        "leader.imbalance.per.broker.percentage",
        _INT,
        10,
        "Share of a broker's partitions that others may lead.",
        0,
    ),
    static_setting(
        "metadata.log.max.record.bytes.between.snapshots",
        _LONG,
        20 * _MIB,
        "Metadata written after which a snapshot is taken.",
        1,
    ),
)

_PENSTOCK = (
    Setting("penstock.flush", _STRING, "ack", FLUSH_DOC, choices=FLUSH_POLICIES),
    Setting("penstock.flush.interval.ms", _LONG, 1000, "How often, where penstock.flush=interval.", 1),
    static_setting(
        "penstock.http.listen",
        _STRING,
        "",
        "HOST:PORT for /metrics, /health and /ready; :PORT serves only this machine, 0.0.0.0:PORT all its IPv4 "
        "addresses, [::]:PORT all of IPv6; empty is off, which lets several nodes share a machine.",
    ),
    static_setting(
        "penstock.http.token",
        SettingType.PASSWORD,
        None,
        "What requests to the HTTP endpoint must carry, as in `Authorization: Bearer TOKEN`; nothing if not set.",
    ),
    static_setting(
        "penstock.http.tls",
        _BOOLEAN,
        False,
        "Serve the HTTP endpoint over TLS, with the key and the certificate of ssl.keystore.",
    ),
    static_setting(
        "penstock.log.format", _STRING, "text", "How the node writes its own log.", choices=("text", "json")
    ),
    static_setting(
        "penstock.log.level",
        _STRING,
        "info",
        "What the node writes to its own log.",
        choices=("debug", "info", "warning", "error"),
    ),
    static_setting(
        "penstock.metrics.groups.max",
        _INT,
        1000,
        "Groups that /metrics shows one by one, those with members first; penstock_groups_omitted counts the others.",
        0,
    ),
    static_setting(
        "penstock.metrics.group.offsets.max",
        _INT,
        20_000,
        "Committed offsets of groups that /metrics shows; penstock_group_offsets_omitted counts the others.",
        0,
    ),
    static_setting(
        "penstock.io.threads", _INT, 4, "Threads for work that may block: cold reads, decoding, files.", 1
    ),
    static_setting(
        "penstock.write.behind.bytes",
        _INT,
        2 * _MIB,
        "Where penstock.flush is not ack: bytes after which the disk is asked to begin writing; 0 leaves it be.",
        0,
    ),
    static_setting("penstock.sync.threads", _INT, 4, "Threads that sync partitions to disk.", 1),
    static_setting(
        "penstock.disk.reserve.bytes",
        _LONG,
        _MIB,
        "Kept on the disk for deleting topics and records when it is full; 0 keeps nothing.",
        0,
    ),
    static_setting(
        "penstock.overflow.disk.free.bytes",
        _LONG,
        0,
        "With less than this free, the disk counts as full: each topic does as its penstock.overflow says.",
        0,
    ),
    static_setting(
        "penstock.shed.disk.free.ratio.start",
        _DOUBLE,
        0.15,
        "Free share of the disk, or of the storage of a tenant, below which topics with penstock.shed.priority=0 are "
        "shed.",
        0,
        1,
    ),
    static_setting(
        "penstock.shed.disk.free.ratio.all",
        _DOUBLE,
        0.05,
        "Free share at and below which topics of all priorities are shed; must not be above the one where it starts.",
        0,
        1,
    ),
    static_setting("penstock.open.files.max", _INT, 512, "Segment files kept open for reading.", 8),
    static_setting(
        "penstock.max.inflight.requests.per.connection",
        _INT,
        64,
        "Requests of one connection that are worked on before reading pauses.",
        1,
    ),
    static_setting(
        "penstock.connection.turn.ms",
        _INT,
        1,
        "How long the requests that one connection has pipelined are handled before other connections get their turn.",
        1,
    ),
    static_setting(
        "penstock.max.queued.response.bytes",
        _LONG,
        8 * _MIB,
        "Answers that clients have not taken, over all connections; above it, a fetch returns 64 KiB or one batch.",
        1,
    ),
    static_setting(
        "penstock.request.read.timeout.ms",
        _INT,
        30_000,
        "A connection that has begun a request must send all of it within this time, counted from its first byte; "
        "time in which the node does not read from the connection is left out.",
        1,
    ),
    static_setting(
        "penstock.decompress.max.bytes",
        _LONG,
        64 * _MIB,
        "The largest decompressed size of a batch that the node has to decode.",
        1024,
    ),
    static_setting(
        "penstock.broker.partitions.max",
        _INT,
        0,
        "Partitions that one broker may have when topics are created; 0: twenty for each file that the node may open.",
        0,
    ),
    static_setting(
        "penstock.decompress.inflight.max.bytes",
        _LONG,
        64 * _MIB,
        "The decompressed size of all batches that the node decodes at the same time; others wait, and connections "
        "get their turns one after the other. One batch always fits.",
        1024,
    ),
    static_setting(
        "penstock.decompress.inflight.connection.max.bytes",
        _LONG,
        16 * _MIB,
        "The same for the batches of one connection. One batch always fits.",
        1024,
    ),
    static_setting(
        "penstock.create.topics.partitions.max", _INT, 10_000, "Partitions that one request may create.", 1
    ),
)

NODE_SETTINGS: dict[str, Setting] = {
    setting.name: setting
    for section in (
        _IDENTITY,
        _NETWORK,
        SECURITY_SETTINGS,
        SASL_SETTINGS,
        ACCESS_SETTINGS,
        _TOPICS,
        _LOG,
        _CLEANER,
        _GROUPS,
        CONSUMER_GROUP_SETTINGS,
        STREAMS_GROUP_SETTINGS,
        SHARE_GROUP_SETTINGS,
        _PRODUCERS,
        TRANSACTION_SETTINGS,
        SHARE_STATE_SETTINGS,
        SCHEDULE_SETTINGS,
        _CLUSTER,
        _PENSTOCK,
    )
    for setting in section
}
