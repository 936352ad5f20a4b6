"""How an engine stands, and its end."""

from __future__ import annotations

from ringlog.envelope.messages.base import Message
from ringlog.envelope.messages.ranges import U32, U64, Millis, Name, Pid, Seq


class EngineStatus(Message, frozen=True):
    """How is the engine?"""


class ProcessStatus(Message, frozen=True):
    """One supervised process."""

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
    """Of a shard that replays its log: the part that is done."""


class PressureStatus(Message, frozen=True):
    """What a governor said last. Shares are in [0, 1]."""

    of: Name
    """`instance`, or the shard's name."""
    pressure: float
    step: Name
    """`free`, `coalesce`, `widen`, `shed` or `refuse`."""
    busy: float
    fill: float
    """Of the shard's fullest intake ring."""
    delivery: float
    """Of the instance: its pressure without that of the shards."""
    latency_s: float
    """Of the instance: from news to turn, averaged."""
    throttled: U64
    """Writes that were refused for pressure, by the shard; of the instance: by gateways and shards."""
    waited_s: float
    """Time that pressure made groups or wake-ups wait, in all."""


class DeliveryStatus(Message, frozen=True):
    """All schedulers together."""

    ready_by_band: list[U64]
    """Feeds that wait for credit, by the band of their topic's value, the lowest first."""
    standing: U64
    """Topics that could be told of and are not."""
    links: U64
    subscriptions: U64
    feeds: U64
    turns_told: U64
    latency_s: float
    lag_s: float
    """For how long the consumer that is furthest behind has lacked something, over all its turns."""


class ConsumersAsk(Message, frozen=True):
    """Operator -> scheduler: who is behind? At most `most` of them, the furthest first."""

    most: U32 = 16


class Consumer(Message, frozen=True):
    """One subscription at a scheduler."""

    link: Name
    """Its connection, in hexadecimal digits."""
    subscription: U32
    lag_ms: Millis
    """For how long it has had something to take."""
    feeds: U64
    waiting: U64
    """Feeds that wait for credit."""
    told: U64
    """Turns that were not given back."""
    credit: U32


class ConsumersReply(Message, frozen=True):
    """Reply to ConsumersAsk."""

    scheduler: U64
    consumers: list[Consumer]


class QueuesStatus(Message, frozen=True):
    """The queues of all shards together, as far as somebody asked them for something since their shard began;
    what became of jobs is counted since the engine's start."""

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
    """The consumer groups of all shards together."""

    groups: U64
    lag: Seq
    """Records that are not done."""
    pending: Seq
    """Of them, those that were given out."""
    members: U64
    floor_age_s: float
    """For how long the floor that has stood longest has not moved, of groups that are behind."""


class EngineStatusReply(Message, frozen=True):
    """The engine at a glance."""

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
    """Of the instance, unless nobody schedules, then of each shard."""
    delivery: DeliveryStatus | None = None
    """None: nobody schedules."""
    routers: U64 = 0
    router_lag: Seq = 0
    """Positions of sources that are not forwarded yet, summed over routers."""
    queues: QueuesStatus | None = None
    groups: GroupsStatus | None = None
    disk_missing_bytes: Seq = 0
    """So much more must be free before records are taken; 0 = they are."""
    findings: U64 = 0
    """What the scrub found wrong since the start."""
    quarantined: U64 = 0
    """Segments whose data part is damaged."""


class Drain(Message, frozen=True):
    """Supervisor -> actor: finish what you hold, then exit. SIGTERM means the same."""


class EngineStop(Message, frozen=True):
    """Operator -> supervisor: stop the engine in good order."""


class EngineStopping(Message, frozen=True):
    """The engine is stopping."""
