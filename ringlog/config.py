"""Engine settings: one class for each table of the configuration file, one field for each key.

A size is a number of bytes or text such as "64MiB". A duration is a number in the unit of the key's suffix,
or text such as "100ms". config_sources.py reads the values.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from ringlog import limits
from ringlog.errors import ConfigError

SHARDS_BY_CPU_MAX = 8


def _shards_by_cpu() -> int:
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cpus, SHARDS_BY_CPU_MAX)


class ConfigSection(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base class of the tables of the configuration file."""


Count = Annotated[int, Meta(ge=1)]
Text = Annotated[str, Meta(max_length=4096)]
FilePath = Annotated[str, Meta(max_length=4096, extra={"is_path": True})]
"""File or directory; empty: none. config_sources.py makes every setting of this type absolute, because the
engine's processes have other working directories."""


def is_path(kind: Any) -> bool:
    """Return whether the type of a setting is FilePath, or FilePath with further bounds."""
    return any(isinstance(each, Meta) and bool(each.extra) for each in getattr(kind, "__metadata__", ()))


class DataConfig(ConfigSection, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The data directory."""

    dir: Annotated[FilePath, Meta(min_length=1)] = "./ringlog-data"
    """Data directory. The first start creates it with mode 0700."""
    min_free_bytes: Annotated[int, Meta(ge=0, le=limits.COUNT_MAX)] = 100 * limits.MIB
    """Free space in bytes below which the engine refuses to start and refuses records."""


class RunConfig(ConfigSection, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The run directory and the rings of clients."""

    dir: FilePath = ""
    """Run directory, which clients use as the engine's address. Empty: `run` below the data directory."""
    ring_bytes: Annotated[int, Meta(ge=limits.RING_BYTES_MIN, le=limits.RING_BYTES_MAX)] = (
        limits.RING_BYTES_DEFAULT
    )
    """Largest size in bytes of the ring of one producer to one shard. A ring starts with 256 KiB."""
    settle_entries: Annotated[int, Meta(ge=16, le=limits.DEDUP_FRAMES_PER_PRODUCER)] = (
        limits.SETTLE_ENTRIES_DEFAULT
    )
    """Frames in flight on one ring. The maximum is the number of frames whose retries a shard detects."""
    allow_root: bool = False
    """Whether the engine runs as uid 0. Otherwise refused, because a daemon needs no privileges.

    In a container root is allowed with a warning.
    """


class NativeConfig(ConfigSection, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The network endpoint of the native protocol."""

    endpoint: Text = "ipc"
    """`ipc`: this host only. `tcp://host:port`: TCP as well, encrypted with CURVE; needs `curve_key_file`."""
    curve_key_file: FilePath = ""
    """Key file of the server. Required for a TCP endpoint."""


class GatewayConfig(ConfigSection, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The gateway, which serves clients without rings."""

    enabled: bool = True
    """Whether the gateway runs. Remote clients and clients without shared memory need it."""


class HttpConfig(ConfigSection, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The HTTP gateway: JSON, Server-Sent Events and WebSocket. Needs `pip install ringlog[http]`."""

    enabled: bool = False
    """Whether the HTTP gateway runs."""
    processes: Annotated[int, Meta(ge=1, le=limits.HTTP_PROCESSES_MAX)] = 1
    """Number of gateway processes, which share the port. Each uses at most about one CPU."""
    host: Annotated[str, Meta(min_length=1, max_length=255)] = "127.0.0.1"
    """Address to listen on. Other than loopback addresses are served only with keys."""
    port: Annotated[int, Meta(ge=0, le=65_535)] = 4000
    """Port to listen on; 0 takes a free one, which `port_file` and the log name."""
    port_file: FilePath = ""
    """File to which `host:port` is written when the gateway listens. Empty: none."""
    tls_cert_file: FilePath = ""
    """File with the certificate chain (PEM). Together with `tls_key_file` it makes the port speak TLS."""
    tls_key_file: FilePath = ""
    """File with the private key of the certificate (PEM), which only the engine's user may read."""
    probe_auth: bool = False
    """Whether /v0/health and /v0/ready need a key, if keys are configured."""
    max_connections: Annotated[int, Meta(ge=1, le=1_000_000)] = limits.HTTP_CONNECTIONS_DEFAULT
    """Most open connections of one gateway process. Further ones wait in the listening socket's queue."""
    max_watch_sessions: Annotated[int, Meta(ge=1, le=10_000_000)] = limits.WATCH_SESSIONS_DEFAULT
    """Most watch sessions of one gateway process, with or without an open stream. A further one is refused
    with Throttled."""
    max_sse_connections: Annotated[int, Meta(ge=1, le=1_000_000)] = limits.SSE_CONNECTIONS_DEFAULT
    """Most open event streams, work streams and WebSockets of one gateway process."""
    max_sse_connections_per_key: Annotated[int, Meta(ge=1, le=1_000_000)] = (
        limits.SSE_CONNECTIONS_PER_KEY_DEFAULT
    )
    """The same for one key, of one gateway process."""
    max_inflight_per_key: Annotated[int, Meta(ge=1, le=1_000_000)] = limits.INFLIGHT_PER_KEY_DEFAULT
    """Most requests of one key that one gateway process processes at the same time."""


class AuthConfig(ConfigSection, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Authentication of TCP and HTTP clients."""

    keys_file: FilePath = ""
    """File with the keys of TCP and HTTP clients and their rights. Empty: loopback addresses only."""
    allow_insecure: bool = False
    """Whether the engine serves other than loopback addresses without a keys file."""


class LimitsConfig(ConfigSection, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Bounds on input. They can be lowered from the built-in maxima, not raised above them."""

    max_body_bytes: Annotated[int, Meta(ge=4096, le=limits.REQUEST_BYTES_MAX)] = limits.REQUEST_BYTES_MAX
    """Largest record data in bytes of one request to the gateway, without the framing."""
    max_batch_records: Annotated[int, Meta(ge=1, le=limits.BATCH_RECORDS_MAX)] = limits.BATCH_RECORDS_MAX
    """Most records of one write."""
    max_record_bytes: Annotated[int, Meta(ge=1, le=limits.RECORD_BYTES_MAX)] = limits.RECORD_BYTES_DEFAULT
    """Largest record in bytes: payload and metadata."""
    max_limit: Annotated[int, Meta(ge=1, le=limits.READ_LIMIT_MAX)] = limits.READ_LIMIT_MAX
    """Most records of one reply of the gateway."""
    max_topics: Annotated[int, Meta(ge=1, le=10_000_000)] = limits.TOPICS_MAX_DEFAULT
    """Most topics of the engine, over all shards. A further topic is refused with Throttled."""
    max_routers: Annotated[int, Meta(ge=0, le=1_000_000)] = limits.ROUTERS_MAX_DEFAULT
    """Most routers of the engine."""
    max_total_bytes: Annotated[int, Meta(ge=0, le=limits.COUNT_MAX)] = 0
    """Most bytes of all live records, payload and metadata; 0 = no limit. A further record is refused with
    Throttled."""


class WalConfig(ConfigSection, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The write-ahead log."""

    shards: Annotated[int, Meta(ge=1, le=limits.SHARDS_MAX)] = msgspec.field(default_factory=_shards_by_cpu)
    """Number of shard processes. Default: number of CPUs, at most 8."""
    flush_interval_ms: Annotated[int, Meta(ge=1, le=60_000)] = limits.FLUSH_INTERVAL_MS_DEFAULT
    """Longest time in ms that records of class `disk` stay unsynced."""
    corruption: Literal["halt", "truncate"] = "halt"
    """Action of recovery at damage before the end of a log.

    `halt` stops the shard, `truncate` gives up the records that follow.
    """
    file_bytes: Annotated[int, Meta(ge=limits.WAL_FILE_BYTES_MIN, le=1 << 32)] = limits.WAL_FILE_BYTES_DEFAULT
    """Size in bytes of one log file."""
    volatile_bytes: Annotated[int, Meta(ge=limits.WAL_FILE_BYTES_MIN, le=1 << 36)] = (
        limits.VOLATILE_BYTES_DEFAULT
    )
    """Memory in bytes of one shard for records of class `ephemeral`. Beyond it, it evicts the oldest."""


class ColdConfig(ConfigSection, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The cold tier. Without `dir` and `url` no segment is relocated."""

    dir: FilePath = ""
    """Directory of the cold tier on another device."""
    url: Text = ""
    """Object store of the cold tier: `s3://bucket/prefix`. Credentials come from the environment."""
    hot_segments: Annotated[int, Meta(ge=0, le=1 << 20)] = limits.HOT_SEGMENTS_DEFAULT
    """Newest segments of a topic that stay on the host."""
    hot_bytes: Annotated[int, Meta(ge=0, le=limits.COUNT_MAX)] = 0
    """Most bytes of a topic's segments on the host; 0 = no bound. The stricter of both settings applies."""
    interval_s: Annotated[float, Meta(ge=limits.INTERVAL_S_MIN, le=86_400)] = 5.0
    """Interval in s between two passes of the relocator."""
    cache_bytes: Annotated[int, Meta(ge=1 << 20, le=1 << 40)] = 64 * limits.MIB
    """Memory in bytes for data that was read from the cold tier."""
    timeout_s: Annotated[float, Meta(ge=limits.INTERVAL_S_MIN, le=3_600)] = 30.0
    """Timeout in s of one request to the cold tier."""


class StorageConfig(ConfigSection, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Segments, and the reclamation of space."""

    enabled: bool = True
    """Whether compactor, reclaimer and relocator run. Off: log files are kept until they run again."""
    segment_records: Annotated[int, Meta(ge=1, le=1 << 31)] = limits.SEGMENT_RECORDS_DEFAULT
    """Most records of one segment."""
    segment_bytes: Annotated[int, Meta(ge=64 * limits.KIB, le=1 << 32)] = limits.SEGMENT_BYTES_DEFAULT
    """Size in bytes of one segment."""
    segment_age_ms: Annotated[int, Meta(ge=0, le=limits.DURATION_MS_MAX)] = limits.SEGMENT_AGE_MS_DEFAULT
    """Longest time in ms that records stay in the log; 0 = until a log file is full."""
    own_segment_bytes: Annotated[int, Meta(ge=0, le=1 << 32)] = limits.OWN_SEGMENT_BYTES_DEFAULT
    """Size in bytes below which the topics of one checkpoint share a segment."""
    compression: Literal["none", "lz4", "zstd"] = "none"
    """Codec of segments, unless a topic sets `compression`."""
    compression_min_bytes: Annotated[int, Meta(ge=0, le=limits.FRAME_BYTES_MAX)] = 1_024
    """Smallest body in bytes that is compressed."""
    compression_saving: Annotated[float, Meta(ge=0, lt=1)] = 0.05
    """Smallest saving, as a fraction, for which a compressed body is kept."""
    reclaim_bytes_per_s: Annotated[int, Meta(ge=1 << 16, le=limits.PACE_BYTES_MAX)] = 64 * limits.MIB
    """Rate in bytes per s at which the reclaimer rewrites segments."""
    reclaim_interval_s: Annotated[float, Meta(ge=limits.INTERVAL_S_MIN, le=86_400)] = 5.0
    """Interval in s between two passes of the reclaimer."""
    scrub_bytes_per_s: Annotated[int, Meta(ge=0, le=limits.PACE_BYTES_MAX)] = 4 * limits.MIB
    """Rate in bytes per s at which the scrub continuously verifies stored data; 0 = off."""


class DeliveryConfig(ConfigSection, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Delivery: the schedulers, which notify watches of new records."""

    schedulers: Annotated[int, Meta(ge=0, le=limits.SCHEDULERS_MAX)] = 1
    """Number of schedulers. 0: readers poll, and watches, routers and dead letters are unavailable."""


class GovernorConfig(ConfigSection, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The governor, which reacts to pressure."""

    enabled: bool = True
    """Whether the engine reacts to pressure. Off: it measures and shows pressure only."""


class LogConfig(ConfigSection, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The log of the engine's processes."""

    level: Text = "info"
    """`debug`, `info`, `warning` or `error`, with exceptions by logger: `info,ringlog.shard=debug`."""
    format: Literal["auto", "console", "json"] = "auto"
    """`auto`: text on a terminal, else JSON lines."""
    file: FilePath = ""
    """Log file. Empty: standard error. SIGHUP reopens it."""


class SupervisorConfig(ConfigSection, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Restarts, and the orderly stop."""

    restart_max: Annotated[int, Meta(ge=0, le=1000)] = limits.RESTART_MAX_DEFAULT
    """The supervisor gives a process up after more deaths than this within the window."""
    restart_window_s: Annotated[float, Meta(ge=limits.INTERVAL_S_MIN, le=86_400)] = (
        limits.RESTART_WINDOW_S_DEFAULT
    )
    """Length in s of that window."""
    drain_s: Annotated[float, Meta(ge=0, le=3_600)] = limits.DRAIN_S_DEFAULT
    """Longest time in s for each stage of an orderly stop."""
    stuck_after_s: Annotated[float, Meta(ge=limits.STUCK_AFTER_S_MIN, le=3_600)] = (
        limits.STUCK_AFTER_S_DEFAULT
    )
    """Time in s without progress after which the supervisor replaces a process."""


class ProfileConfig(ConfigSection, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Profiling of the engine's processes."""

    allow: bool = True
    """Whether a profiler of the same user may attach to the engine's processes."""


class Config(ConfigSection, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The effective configuration, with one field for each table of the file."""

    data: DataConfig = DataConfig()
    run: RunConfig = RunConfig()
    native: NativeConfig = NativeConfig()
    gateway: GatewayConfig = GatewayConfig()
    http: HttpConfig = HttpConfig()
    auth: AuthConfig = AuthConfig()
    limits: LimitsConfig = LimitsConfig()
    wal: WalConfig = msgspec.field(default_factory=WalConfig)
    storage: StorageConfig = StorageConfig()
    cold: ColdConfig = ColdConfig()
    delivery: DeliveryConfig = DeliveryConfig()
    governor: GovernorConfig = GovernorConfig()
    log: LogConfig = LogConfig()
    supervisor: SupervisorConfig = SupervisorConfig()
    profile: ProfileConfig = ProfileConfig()
    topics: dict[str, dict[str, Any]] = {}
    """Settings of topics by name. The engine creates them at the start if they do not exist."""


def to_plain(config: Config) -> dict[str, Any]:
    """Return every value as plain dicts, strings and numbers, for ActorBoot.config."""
    plain: dict[str, Any] = msgspec.to_builtins(config)
    return plain


def from_plain(plain: Mapping[str, Any]) -> Config:
    """Return the configuration from the result of `to_plain`. Raises ConfigError, which names the key."""
    try:
        return msgspec.convert(plain, Config)
    except msgspec.ValidationError as e:
        raise ConfigError(f"configuration: {e}") from None
