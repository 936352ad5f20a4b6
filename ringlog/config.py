"""Engine settings: all keys, their sources, and the precedence of the sources.

From strongest to weakest: flag (`--set section.key=value`), environment variable, TOML file, default. The
source of each value is recorded. One file is read: `--config`, else `RINGLOG_CONFIG`, else `./ringlog.toml`,
else `/etc/ringlog/ringlog.toml`.

A size is a number of bytes or text such as "64MiB". A duration is a number in the unit of the key's suffix,
or text such as "100ms". A wrong value from a flag or the file is an error. A wrong value from the environment
is a warning, and the default applies, except for STRICT_ENVIRONMENT_KEYS. An unknown key is always an error.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_type_hints

import msgspec
from msgspec import Meta, Struct

from ringlog import environment, limits
from ringlog.errors import ConfigError, InvalidRequest
from ringlog.names import check_topic_name
from ringlog.settings import LOG, TOPIC_SETTINGS, check_settings, require_effect, require_no_auto_create

SHARDS_BY_CPU_MAX = 8
SYSTEM_FILE = "/etc/ringlog/ringlog.toml"
LOCAL_FILE = "ringlog.toml"
CONFIG_FILE_BYTES_MAX = 4 * limits.MIB


def _shards_by_cpu() -> int:
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cpus, SHARDS_BY_CPU_MAX)


class ConfigSection(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base class of the tables of the configuration file."""


Count = Annotated[int, Meta(ge=1)]
Text = Annotated[str, Meta(max_length=4096)]


class DataConfig(ConfigSection, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The data directory."""

    dir: Annotated[str, Meta(min_length=1, max_length=4096)] = "./ringlog-data"
    """Data directory. The first start creates it with mode 0700."""
    min_free_bytes: Annotated[int, Meta(ge=0, le=limits.COUNT_MAX)] = 100 * limits.MIB
    """Free space in bytes below which the engine refuses to start and refuses records."""


class RunConfig(ConfigSection, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The run directory and the rings of clients."""

    dir: Text = ""
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
    curve_key_file: Text = ""
    """Key file of the server. Required for a TCP endpoint."""


class GatewayConfig(ConfigSection, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The gateway, which serves clients without rings."""

    enabled: bool = True
    """Whether the gateway runs. Remote clients and clients without shared memory need it."""


class HttpConfig(ConfigSection, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The HTTP gateway: JSON, Server-Sent Events and WebSocket. Needs `pip install ringlog[http]`."""

    enabled: bool = False
    """Whether the HTTP gateway runs."""
    host: Annotated[str, Meta(min_length=1, max_length=255)] = "127.0.0.1"
    """Address to listen on. Other than loopback addresses are served only with keys."""
    port: Annotated[int, Meta(ge=0, le=65_535)] = 4000
    """Port to listen on; 0 takes a free one, which `port_file` and the log name."""
    port_file: Text = ""
    """File to which `host:port` is written when the gateway listens. Empty: none."""
    tls_cert_file: Text = ""
    """File with the certificate chain (PEM). Together with `tls_key_file` it makes the port speak TLS."""
    tls_key_file: Text = ""
    """File with the private key of the certificate (PEM), which only the engine's user may read."""
    probe_auth: bool = False
    """Whether /v0/health and /v0/ready need a key, if keys are configured."""
    max_connections: Annotated[int, Meta(ge=1, le=1_000_000)] = limits.HTTP_CONNECTIONS_DEFAULT
    """Most open connections. Further ones wait in the listening socket's queue."""
    max_watch_sessions: Annotated[int, Meta(ge=1, le=10_000_000)] = limits.WATCH_SESSIONS_DEFAULT
    """Most watch sessions, with or without an open stream. A further one is refused with Throttled."""
    max_sse_connections: Annotated[int, Meta(ge=1, le=1_000_000)] = limits.SSE_CONNECTIONS_DEFAULT
    """Most open event streams, work streams and WebSockets."""
    max_sse_connections_per_key: Annotated[int, Meta(ge=1, le=1_000_000)] = (
        limits.SSE_CONNECTIONS_PER_KEY_DEFAULT
    )
    """The same for one key."""
    max_inflight_per_key: Annotated[int, Meta(ge=1, le=1_000_000)] = limits.INFLIGHT_PER_KEY_DEFAULT
    """Most requests of one key that are processed at the same time."""


class AuthConfig(ConfigSection, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Authentication of TCP and HTTP clients."""

    keys_file: Text = ""
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

    dir: Text = ""
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
    file: Text = ""
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


ENVIRONMENT: dict[str, str] = {
    "data.dir": "RINGLOG_DATA_DIR",
    "data.min_free_bytes": "RINGLOG_MIN_FREE_BYTES",
    "run.dir": "RINGLOG_RUN_DIR",
    "run.ring_bytes": "RINGLOG_RING_BYTES",
    "run.settle_entries": "RINGLOG_SETTLE_ENTRIES",
    "run.allow_root": "RINGLOG_ALLOW_ROOT",
    "native.endpoint": "RINGLOG_NATIVE",
    "native.curve_key_file": "RINGLOG_CURVE_KEY_FILE",
    "gateway.enabled": "RINGLOG_GATEWAY",
    "http.enabled": "RINGLOG_HTTP",
    "http.host": "RINGLOG_HOST",
    "http.port": "RINGLOG_PORT",
    "http.port_file": "RINGLOG_PORT_FILE",
    "http.tls_cert_file": "RINGLOG_TLS_CERT_FILE",
    "http.tls_key_file": "RINGLOG_TLS_KEY_FILE",
    "http.probe_auth": "RINGLOG_PROBE_AUTH",
    "http.max_connections": "RINGLOG_MAX_CONNECTIONS",
    "http.max_watch_sessions": "RINGLOG_MAX_WATCH_SESSIONS",
    "http.max_sse_connections": "RINGLOG_MAX_SSE_CONNECTIONS",
    "http.max_sse_connections_per_key": "RINGLOG_MAX_SSE_CONNECTIONS_PER_KEY",
    "http.max_inflight_per_key": "RINGLOG_MAX_INFLIGHT_PER_KEY",
    "auth.keys_file": "RINGLOG_API_KEYS_FILE",
    "auth.allow_insecure": "RINGLOG_ALLOW_INSECURE_NO_AUTH",
    "limits.max_body_bytes": "RINGLOG_MAX_BODY_BYTES",
    "limits.max_batch_records": "RINGLOG_MAX_BATCH_RECORDS",
    "limits.max_record_bytes": "RINGLOG_MAX_RECORD_BYTES",
    "limits.max_limit": "RINGLOG_MAX_LIMIT",
    "limits.max_topics": "RINGLOG_MAX_TOPICS",
    "limits.max_routers": "RINGLOG_MAX_ROUTERS",
    "wal.shards": "RINGLOG_WAL_SHARDS",
    "wal.flush_interval_ms": "RINGLOG_WAL_FLUSH_INTERVAL_MS",
    "wal.corruption": "RINGLOG_WAL_CORRUPTION",
    "wal.file_bytes": "RINGLOG_WAL_FILE_BYTES",
    "wal.volatile_bytes": "RINGLOG_WAL_VOLATILE_BYTES",
    "storage.enabled": "RINGLOG_STORAGE",
    "storage.segment_records": "RINGLOG_SEGMENT_MAX_EVENTS",
    "storage.segment_bytes": "RINGLOG_SEGMENT_MAX_BYTES",
    "storage.segment_age_ms": "RINGLOG_SEGMENT_MAX_AGE_MS",
    "storage.own_segment_bytes": "RINGLOG_OWN_SEGMENT_BYTES",
    "storage.compression": "RINGLOG_COMPRESSION",
    "storage.compression_min_bytes": "RINGLOG_COMPRESSION_MIN_BYTES",
    "storage.compression_saving": "RINGLOG_COMPRESSION_SAVING",
    "storage.reclaim_bytes_per_s": "RINGLOG_RECLAIM_BYTES_PER_S",
    "storage.reclaim_interval_s": "RINGLOG_RECLAIM_INTERVAL_S",
    "storage.scrub_bytes_per_s": "RINGLOG_SCRUB_BYTES_PER_S",
    "cold.dir": "RINGLOG_COLD_DIR",
    "cold.url": "RINGLOG_COLD_URL",
    "cold.hot_segments": "RINGLOG_HOT_RETAIN_SEGMENTS",
    "cold.hot_bytes": "RINGLOG_HOT_RETAIN_BYTES",
    "cold.interval_s": "RINGLOG_COLD_INTERVAL_S",
    "cold.cache_bytes": "RINGLOG_COLD_CACHE_BYTES",
    "cold.timeout_s": "RINGLOG_COLD_TIMEOUT_S",
    "delivery.schedulers": "RINGLOG_SCHEDULERS",
    "governor.enabled": "RINGLOG_GOVERNOR",
    "log.level": "RINGLOG_LOG",
    "log.format": "RINGLOG_LOG_FORMAT",
    "log.file": "RINGLOG_LOG_FILE",
    "supervisor.restart_max": "RINGLOG_RESTART_MAX",
    "supervisor.restart_window_s": "RINGLOG_RESTART_WINDOW_S",
    "supervisor.drain_s": "RINGLOG_DRAIN_S",
    "supervisor.stuck_after_s": "RINGLOG_STUCK_AFTER_S",
    "profile.allow": "RINGLOG_PROFILE_ALLOW",
}
"""Setting -> environment variable."""

STRICT_ENVIRONMENT_KEYS = frozenset(
    {
        "auth.keys_file",
        "native.endpoint",
        "native.curve_key_file",
        "run.allow_root",
        "http.host",
        "http.port",
        "http.tls_cert_file",
        "http.tls_key_file",
    }
)
"""Settings for which a wrong value in the environment is an error. With the default instead, the engine would
silently listen elsewhere or grant other rights than requested."""

_TOPICS = "topics"
_SECTIONS = {name: kind for name, kind in get_type_hints(Config).items() if name != _TOPICS}
_TYPES: dict[str, Any] = {
    f"{section}.{key}": kind
    for section, struct in _SECTIONS.items()
    for key, kind in get_type_hints(struct, include_extras=True).items()
}

assert set(ENVIRONMENT) == set(_TYPES), "every key has its variable"


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """The effective configuration, the source of each value, and warnings."""

    config: Config
    sources: Mapping[str, str]
    """`section.key` -> `default`, `flag`, `environment RINGLOG_…` or `file <path>`."""
    warnings: Sequence[str] = ()
    file: str = ""
    """The TOML file that was read; empty if there was none."""

    def rows(self) -> list[tuple[str, Any, str]]:
        """Return (key, value, source) of every setting, in the order of the sections above."""
        plain = to_plain(self.config)
        named = [(path, plain[section][key], self.sources[path]) for path, section, key in _paths()]
        return named + [
            (f'topics."{name}"', table, self.sources[f"topics.{name}"])
            for name, table in self.config.topics.items()
        ]


@dataclass(slots=True)
class _Draft:
    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=lambda: dict.fromkeys(_TYPES, "default"))
    topics: dict[str, dict[str, Any]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def put(self, path: str, value: Any, source: str) -> None:
        self.values[path] = value
        self.sources[path] = source


def load_config(
    flags: Mapping[str, str] | None = None,
    environ: Mapping[str, str] | None = None,
    cwd: str = ".",
    *,
    config_file: str | None = None,
) -> LoadedConfig:
    """Load the configuration from all its sources.

    Args:
        flags: `section.key` -> text (see `parse_flags`).
        environ: Environment variables. None: those of this process.
        cwd: Directory from which relative paths are resolved.
        config_file: TOML file. None: `RINGLOG_CONFIG`, or one of the usual places.

    Raises:
        ConfigError: A setting is wrong. The text names the key and the error.
    """
    environ = os.environ if environ is None else environ
    draft = _Draft()
    path = _find_file(config_file, environ, cwd)
    if path:
        _read_file(draft, path)
    _read_environment(draft, environ)
    for name, text in (flags or {}).items():
        _require_known(name, "flag")
        draft.put(name, _from_text(name, text), "flag")
    config = _resolve(_assemble(draft), cwd)
    if absent := _missing_paths(config):
        draft.warnings.append(absent)
    return LoadedConfig(config, draft.sources, tuple(draft.warnings), path)


def _missing_paths(config: Config) -> str:
    """Return a warning about configured paths that do not exist; empty if there is none.

    The engine starts anyway, because a volume may be mounted later.
    """
    place = config.cold.dir
    if not place or os.path.isdir(place):
        return ""
    return (
        f"there is no directory {place} (cold.dir): until it is mounted, segments in it cannot be read and "
        "none is moved to it"
    )


def parse_flags(pairs: Sequence[str]) -> dict[str, str]:
    """Split `section.key=value` arguments. Raises ConfigError for one without `=`."""
    flags = {}
    for pair in pairs:
        name, separator, text = pair.partition("=")
        if not separator:
            raise ConfigError("--set must be section.key=value", found=pair)
        flags[name.strip()] = text.strip()
    return flags


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


def _paths() -> list[tuple[str, str, str]]:
    return [(path, *path.split(".", 1)) for path in _TYPES]  # type: ignore[misc]


def _assemble(draft: _Draft) -> Config:
    sections = {
        name: struct(
            **{key: draft.values[f"{name}.{key}"] for key in _keys(struct) if _has(draft, name, key)}
        )
        for name, struct in _SECTIONS.items()
    }
    return Config(**sections, topics=draft.topics)


def _keys(struct: type[ConfigSection]) -> tuple[str, ...]:
    return struct.__struct_fields__


def _has(draft: _Draft, section: str, key: str) -> bool:
    return f"{section}.{key}" in draft.values


def _resolve(config: Config, cwd: str) -> Config:
    """Make paths absolute, so that they mean the same in every process."""

    def absolute(path: str) -> str:
        return os.path.normpath(os.path.join(os.path.abspath(cwd), os.path.expanduser(path))) if path else ""

    _require_text(config)
    replace = msgspec.structs.replace
    data = absolute(config.data.dir)
    found = replace(
        config,
        data=replace(config.data, dir=data),
        run=replace(config.run, dir=absolute(config.run.dir) or os.path.join(data, "run")),
        native=replace(config.native, curve_key_file=absolute(config.native.curve_key_file)),
        auth=replace(config.auth, keys_file=absolute(config.auth.keys_file)),
        cold=replace(config.cold, dir=absolute(config.cold.dir)),
        log=replace(config.log, file=absolute(config.log.file)),
    )
    _require_text(found)
    return found


def _require_text(config: Config) -> None:
    """Raise ConfigError for a setting or path with a NUL character, or one that is not UTF-8.

    No path can contain NUL, and processes exchange settings as UTF-8. Other bytes of the command line, the
    environment or the working directory's name are surrogates here.
    """
    for section, struct in _SECTIONS.items():
        for key in _keys(struct):
            value = getattr(getattr(config, section), key)
            if isinstance(value, str) and "\0" in value:
                raise ConfigError(f"{section}.{key} must not contain a NUL character", found=ascii(value))
            if isinstance(value, str) and not value.isascii():
                try:
                    value.encode()
                except UnicodeEncodeError:
                    raise ConfigError(
                        f"{section}.{key} must be UTF-8; under LC_ALL=C set PYTHONUTF8=1", found=ascii(value)
                    ) from None


# -- the file -----------------------------------------------------------------------------------------


def _find_file(named: str | None, environ: Mapping[str, str], cwd: str) -> str:
    """Return the path of the file to read; empty if none is named and none exists in the usual places."""
    wanted = named or environ.get(environment.CONFIG, "")
    if wanted:
        return os.path.join(os.path.abspath(cwd), wanted)
    usual = (os.path.join(os.path.abspath(cwd), LOCAL_FILE), SYSTEM_FILE)
    return next((path for path in usual if os.path.isfile(path)), "")


def _read_file(draft: _Draft, path: str) -> None:
    tables = _parse_file(path)
    source = f"file {path}"
    for section, table in tables.items():
        if section != _TOPICS and section not in _SECTIONS:
            raise _unknown(section, f"file {path}", [*_SECTIONS, _TOPICS])
        if not isinstance(table, dict):
            raise ConfigError(f"{section} must be a table", file=path)
        if section == _TOPICS:
            _read_topics(draft, table, path)
            continue
        for key, value in table.items():
            name = f"{section}.{key}"
            _require_known(name, source)
            draft.put(
                name, _from_text(name, value) if isinstance(value, str) else _checked(name, value), source
            )


def _parse_file(path: str) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            text = file.read(CONFIG_FILE_BYTES_MAX + 1)
        if len(text) > CONFIG_FILE_BYTES_MAX:
            raise ConfigError("configuration file is too large", file=path, max_bytes=CONFIG_FILE_BYTES_MAX)
        return tomllib.loads(text.decode())
    except OSError as e:
        raise ConfigError("configuration file cannot be read", file=path, reason=e.strerror) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise ConfigError("configuration file is not TOML", file=path, reason=str(e)) from None


def _read_topics(draft: _Draft, tables: dict[str, Any], path: str) -> None:
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise ConfigError(f'topics."{name}" must be a table', file=path)
        try:
            check_topic_name(name)
            require_effect(check_settings(TOPIC_SETTINGS, table), table.get("type", LOG))
            require_no_auto_create(table)
        except InvalidRequest as e:
            raise ConfigError(f'topics."{name}": {e.message}', file=path, **e.detail) from None
        draft.topics[name] = table
        draft.sources[f"topics.{name}"] = f"file {path}"


def _require_known(name: str, source: str) -> None:
    if name.split(".", 1)[0] == _TOPICS:
        raise ConfigError("topics are configured in the file or by `ringlog topic`", key=name, source=source)
    if name not in _TYPES:
        raise _unknown(name, source, list(_TYPES))


def _unknown(name: str, source: str, known: Sequence[str]) -> ConfigError:
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if not nearest:
        key = name.rsplit(".", 1)[-1]
        nearest = [path for path in known if path.rsplit(".", 1)[-1] == key][:1]
    hint = f"; did you mean {nearest[0]}?" if nearest else ""
    return ConfigError(f"unknown setting {name}{hint}", source=source)


# -- the environment ----------------------------------------------------------------------------------


def _read_environment(draft: _Draft, environ: Mapping[str, str]) -> None:
    draft.warnings += environment.environment_problems(environ, ENVIRONMENT.values())
    for name, variable in ENVIRONMENT.items():
        text = environ.get(variable)
        if text is None or (text == "" and _TYPES[name] is not Text):
            continue
        if environment.is_of_kubernetes(variable, text):
            continue
        try:
            draft.put(name, _from_text(name, text), f"environment {variable}")
        except ConfigError as e:
            if name in STRICT_ENVIRONMENT_KEYS:
                raise ConfigError(f"{variable}: {e.message}", **e.detail) from None
            draft.values.pop(name, None)
            draft.sources[name] = "default"
            draft.warnings.append(f"{variable} is ignored, the default is used: {e}")


# -- values -------------------------------------------------------------------------------------------

_QUANTITY = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-zµ]*)\s*$")
_DIGITS_MAX = 64
_SIZE_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SIZE_UNITS |= {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_TIME_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_WORDS = {
    "1": True,
    "true": True,
    "yes": True,
    "on": True,
    "0": False,
    "false": False,
    "no": False,
    "off": False,
}


def parse_size(text: str) -> int:
    """Return the bytes of `64MiB`, `1GB` or a plain number. Raises ValueError for other texts."""
    match = _QUANTITY.match(text)
    if not match or match[2] not in _SIZE_UNITS:
        raise ValueError(f"{text!r} is not a size such as 67108864, 64MiB or 1GB")
    if len(match[1]) > _DIGITS_MAX:
        raise ValueError(f"{text[:_DIGITS_MAX]!r}... has more than {_DIGITS_MAX} digits")
    number = (
        float(match[1]) * _SIZE_UNITS[match[2]] if "." in match[1] else int(match[1]) * _SIZE_UNITS[match[2]]
    )
    if number != int(number):
        raise ValueError(f"{text!r} is not a whole number of bytes")
    return int(number)


def parse_duration(text: str, unit: str = "s") -> float:
    """Return the seconds of `100ms`, `5s`, `2h`, or of a plain number in `unit`. Raises ValueError."""
    match = _QUANTITY.match(text)
    if not match or (match[2] or unit) not in _TIME_UNITS:
        raise ValueError(f"{text!r} is not a duration such as 100ms, 5s or 2h")
    if len(match[1]) > _DIGITS_MAX:
        raise ValueError(f"{text[:_DIGITS_MAX]!r}... has more than {_DIGITS_MAX} digits")
    return float(match[1]) * _TIME_UNITS[match[2] or unit]


def _from_text(name: str, text: str) -> Any:
    """Convert the text of a setting to its value. Raises ConfigError, which names the key."""
    base = getattr(_TYPES[name], "__origin__", _TYPES[name])
    try:
        if base is bool:
            return _boolean(text)
        if base in (int, float):
            return _checked(name, _number(name, text, whole=base is int))
    except ValueError as e:
        raise ConfigError(f"{name}: {e}") from None
    return _checked(name, text)


def _number(name: str, text: str, *, whole: bool) -> int | float:
    if name.endswith(("_bytes", "_bytes_per_s")):
        return parse_size(text)
    if name.endswith("_ms"):
        return _whole(parse_duration(text, "ms") * 1000, text) if whole else parse_duration(text, "ms") * 1000
    if name.endswith("_s"):
        return parse_duration(text, "s")
    try:
        return int(text) if whole else float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a number") from None


def _whole(number: float, text: str) -> int:
    nearest = round(number)
    if abs(number - nearest) > 1e-6:
        raise ValueError(f"{text!r} is not a whole number of milliseconds")
    return nearest


def _boolean(text: str) -> bool:
    try:
        return _WORDS[text.strip().lower()]
    except KeyError:
        raise ValueError(f"{text!r} is not true or false") from None


def _checked(name: str, value: Any) -> Any:
    try:
        return msgspec.convert(value, _TYPES[name])
    except msgspec.ValidationError as e:
        raise ConfigError(f"{name}: {_lower_first(str(e))}", found=value) from None


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]
