"""How an engine stands, and its end."""

from __future__ import annotations

from ringlog.envelope.messages.base import Message


class EngineStatus(Message, frozen=True):
    """How is the engine?"""


class ProcessStatus(Message, frozen=True):
    """One supervised process."""

    name: str
    kind: str
    pid: int
    state: str
    incarnation: int
    restarts: int
    uptime_s: float
    heartbeat_age_s: float
    busy_ratio: float
    resident_bytes: int
    last_exit: str


class PressureStatus(Message, frozen=True):
    """What a governor said last. Shares are in [0, 1]."""

    of: str
    """`instance`, or the shard's name."""
    pressure: float
    step: str
    """`free`, `coalesce`, `widen`, `shed` or `refuse`."""
    busy: float
    fill: float
    """Of the shard's fullest intake ring."""
    delivery: float
    """Of the instance: its pressure without that of the shards."""
    latency_s: float
    """Of the instance: from news to turn, averaged."""
    throttled: int
    """Writes that were refused for pressure, by the shard; of the instance: by gateways and shards."""
    waited_s: float
    """Time that pressure made groups or wake-ups wait, in all."""


class DeliveryStatus(Message, frozen=True):
    """All schedulers together."""

    ready_by_band: list[int]
    """Feeds that wait for credit, by the band of their topic's value, the lowest first."""
    standing: int
    """Topics that could be told of and are not."""
    links: int
    subscriptions: int
    feeds: int
    turns_told: int
    latency_s: float
    lag_s: float
    """For how long the consumer that is furthest behind has had something to take."""


class ConsumersAsk(Message, frozen=True):
    """Operator -> scheduler: who is behind? At most `most` of them, the furthest first."""

    most: int = 16


class Consumer(Message, frozen=True):
    """One subscription at a scheduler."""

    link: str
    """Its connection, in hexadecimal digits."""
    subscription: int
    lag_ms: int
    """For how long it has had something to take."""
    feeds: int
    waiting: int
    """Feeds that wait for credit."""
    told: int
    """Turns that were not given back."""
    credit: int


class ConsumersReply(Message, frozen=True):
    """Reply to ConsumersAsk."""

    scheduler: int
    consumers: list[Consumer]


class QueuesStatus(Message, frozen=True):
    """The queues of all shards together, as far as somebody asked them for something since their shard began;
    what became of jobs is counted since the engine's start."""

    queues: int
    ready: int
    in_flight: int
    delayed: int
    waiting: int
    """Claims that wait for jobs."""
    claimed: int
    acked: int
    nacked: int
    rejected: int
    dead_lettered: int


class GroupsStatus(Message, frozen=True):
    """The consumer groups of all shards together."""

    groups: int
    lag: int
    """Records that are not done."""
    pending: int
    """Of them, those that were given out."""
    members: int
    floor_age_s: float
    """For how long the floor that has stood longest has not moved, of groups that are behind."""


class EngineStatusReply(Message, frozen=True):
    """The engine at a glance."""

    engine_id: str
    version: str
    state: str
    uptime_s: float
    data_dir: str
    shards: int
    rings: int
    disk_free_bytes: int
    processes: list[ProcessStatus]
    recovery_s: float = 0.0
    pressure: list[PressureStatus] = []
    """Of the instance, unless nobody schedules, then of each shard."""
    delivery: DeliveryStatus | None = None
    """None: nobody schedules."""
    routers: int = 0
    router_lag: int = 0
    """Positions of sources that are not forwarded yet, summed over routers."""
    queues: QueuesStatus | None = None
    groups: GroupsStatus | None = None


class Drain(Message, frozen=True):
    """Supervisor -> actor: finish what you hold, then exit. SIGTERM means the same."""


class EngineStop(Message, frozen=True):
    """Operator -> supervisor: stop the engine in good order."""


class EngineStopping(Message, frozen=True):
    """The engine is stopping."""
