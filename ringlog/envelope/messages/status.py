"""Status of the engine, and its stop."""

from __future__ import annotations

from ringlog.envelope.messages.base import Message
from ringlog.envelope.messages.ranges import U32, U64, Millis, Name, Pid, Seq


class EngineStatus(Message, frozen=True):
    """Local client to supervisor: query the status of the engine. Reply: EngineStatusReply."""


class ProcessStatus(Message, frozen=True):
    """Part of EngineStatusReply: one supervised process."""

    name: Name
    kind: Name
    pid: Pid
    state: Name
    incarnation: U64
    restarts: U32
    uptime_s: float
    heartbeat_age_s: float
    busy_ratio: float
    resident_bytes: Seq
    last_exit: str
    progress: float = 1.0
    """For a shard that replays its log: the share that is done, 0 to 1."""


class PressureStatus(Message, frozen=True):
    """Part of EngineStatusReply: the latest values of one governor. Shares are in [0, 1]."""

    of: Name
    """`instance`, or the name of the shard."""
    pressure: float
    step: Name
    """Step of the governor: `free`, `coalesce`, `widen`, `shed` or `refuse`."""
    busy: float
    fill: float
    """Fill of the shard's fullest intake ring."""
    delivery: float
    """For the instance: its pressure without that of the shards."""
    latency_s: float
    """For the instance: average time from news to grant."""
    throttled: U64
    """Number of writes that the shard refused for pressure. For the instance: refused by gateways and
    shards."""
    waited_s: float
    """Total time for which pressure delayed commit batches or wake-ups."""


class DeliveryStatus(Message, frozen=True):
    """Part of EngineStatusReply: all schedulers together."""

    ready_by_band: list[U64]
    """Number of feeds that wait for credit, for each band of priority, the lowest first."""
    standing: U64
    """Number of topics with a possible grant that waited during the whole last sample interval."""
    links: U64
    subscriptions: U64
    feeds: U64
    grants_sent: U64
    latency_s: float
    lag_s: float
    """Lag of the consumer that lags most, over all its grants."""


class ListConsumers(Message, frozen=True):
    """Local client to scheduler: list the consumers that lag most, at most `most`. Reply: ConsumersReply."""

    most: U32 = 16


class Consumer(Message, frozen=True):
    """Part of ConsumersReply: one subscription at a scheduler."""

    link: Name
    """Id of its connection, in hexadecimal digits."""
    subscription: U32
    lag_ms: Millis
    """Time for which records have been available to it."""
    feeds: U64
    waiting: U64
    """Number of feeds that wait for credit."""
    granted: U64
    """Number of grants that the subscription holds."""
    credit: U32


class ConsumersReply(Message, frozen=True):
    """Reply to ListConsumers, the largest lag first."""

    scheduler: U64
    consumers: list[Consumer]


class QueuesStatus(Message, frozen=True):
    """Part of EngineStatusReply: the queues of all shards together.

    It includes only queues that received a request since their shard started. The counters begin at the start
    of the engine."""

    queues: U64
    ready: Seq
    in_flight: Seq
    delayed: Seq
    waiting: U64
    """Claims that wait for jobs."""
    claimed: U64
    acked: U64
    nacked: U64
    rejected: U64
    dead_lettered: Seq


class GroupsStatus(Message, frozen=True):
    """Part of EngineStatusReply: the consumer groups of all shards together."""

    groups: U64
    lag: Seq
    """Number of records that are not acked."""
    pending: Seq
    """Those of `lag` that were delivered."""
    members: U64
    floor_age_s: float
    """Of all groups that lag: the longest time for which a floor has not moved."""


class EngineStatusReply(Message, frozen=True):
    """Reply to EngineStatus."""

    engine_id: Name
    version: Name
    state: Name
    uptime_s: float
    data_dir: str
    shards: U64
    rings: U32
    disk_free_bytes: Seq
    processes: list[ProcessStatus]
    recovery_s: float = 0.0
    pressure: list[PressureStatus] = []
    """First the instance, if there are schedulers, then each shard."""
    delivery: DeliveryStatus | None = None
    """None: the engine has no schedulers."""
    routers: U64 = 0
    router_lag: Seq = 0
    """Positions of sources that are not forwarded yet, summed over all routers."""
    queues: QueuesStatus | None = None
    groups: GroupsStatus | None = None
    disk_missing_bytes: Seq = 0
    """Bytes that must become free before the engine accepts records; 0 = it accepts them."""
    findings: U64 = 0
    """Number of faults that the scrub found since the start."""
    quarantined: U64 = 0
    """Number of segments with a damaged data part."""
    live_bytes: Seq = 0
    """Payload and metadata of all records."""
    max_total_bytes: Seq = 0
    """Limit of `live_bytes`; 0 = none."""


class EngineStop(Message, frozen=True):
    """Operator to supervisor: stop the engine in good order. Reply: EngineStopping."""


class EngineStopping(Message, frozen=True):
    """Reply to EngineStop: the stop begins."""
