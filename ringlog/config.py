"""Settings: every key, where its value may come from, and who wins.

Authority: flag (`--set section.key=value`), then environment, then the TOML file, then the default;
every value remembers its source. One file is read: `--config`, else `RINGLOG_CONFIG`, else
`./ringlog.toml`, else `/etc/ringlog/ringlog.toml`. Sizes may be written "64MiB", durations "100ms"; a
bare number is in the unit the key's name ends with. A wrong value from a flag or the file is an error;
from the environment it is a warning and the default stays (KN-1). An unknown key is always an error.
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
    """Base of the tables of the file."""


Count = Annotated[int, Meta(ge=1)]
Text = Annotated[str, Meta(max_length=4096)]


class DataConfig(ConfigSection, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where the data lies."""

    dir: Annotated[str, Meta(min_length=1, max_length=4096)] = "./ringlog-data"
    min_free_bytes: Annotated[int, Meta(ge=0, le=limits.COUNT_MAX)] = 100 * limits.MIB
    """With less free space than this the engine refuses to start."""


class RunConfig(ConfigSection, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where a running engine says how to reach it, how large its rings are, and how awake it stays."""

    dir: Text = ""
    """Empty: `run` below the data directory."""
    ring_bytes: Annotated[int, Meta(ge=limits.RING_BYTES_MIN, le=limits.RING_BYTES_MAX)] = (
        limits.RING_BYTES_DEFAULT
    )
    settle_entries: Annotated[int, Meta(ge=16, le=limits.DEDUP_FRAMES_PER_PRODUCER)] = (
        limits.SETTLE_ENTRIES_DEFAULT
    )
    """Frames in flight on one ring; beyond what a shard can recognise again nothing may be resent."""
    allow_root: bool = False
    """Run as uid 0. Refused otherwise: a daemon needs no privileges (SEC-26)."""


class NativeConfig(ConfigSection, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The native protocol beyond this host."""

    endpoint: Text = "ipc"
    """`ipc`: this host only. `tcp://host:port`: also TCP, encrypted, needs `curve_key_file`."""
    curve_key_file: Text = ""


class GatewayConfig(ConfigSection, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The process that speaks for clients without rings."""

    enabled: bool = True


class AuthConfig(ConfigSection, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Who may do what over TCP."""

    keys_file: Text = ""
    allow_insecure: bool = False
    """Serve addresses beyond this host although no keys are configured (A-6)."""


class LimitsConfig(ConfigSection, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Bounds on input; may be lowered, not raised above what the engine is built for."""

    max_body_bytes: Annotated[int, Meta(ge=4096, le=limits.REQUEST_BYTES_MAX)] = limits.REQUEST_BYTES_MAX
    """Of the records in one request to the gateway, beside what their frames need."""
    max_batch_records: Annotated[int, Meta(ge=1, le=limits.BATCH_RECORDS_MAX)] = limits.BATCH_RECORDS_MAX
    max_record_bytes: Annotated[int, Meta(ge=1, le=limits.RECORD_BYTES_MAX)] = limits.RECORD_BYTES_DEFAULT
    max_limit: Annotated[int, Meta(ge=1, le=limits.READ_LIMIT_MAX)] = limits.READ_LIMIT_MAX
    """Most records in one answer of the gateway."""
    max_topics: Annotated[int, Meta(ge=1, le=10_000_000)] = limits.TOPICS_MAX_DEFAULT
    """Of all shards together; a further one is Throttled."""
    max_routers: Annotated[int, Meta(ge=0, le=1_000_000)] = limits.ROUTERS_MAX_DEFAULT


class WalConfig(ConfigSection, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The write-ahead logs."""

    shards: Annotated[int, Meta(ge=1, le=limits.SHARDS_MAX)] = msgspec.field(default_factory=_shards_by_cpu)
    flush_interval_ms: Annotated[int, Meta(ge=1, le=60_000)] = limits.FLUSH_INTERVAL_MS_DEFAULT
    corruption: Literal["halt", "truncate"] = "halt"
    """What recovery does about damage in the middle of a log (RE-6)."""
    file_bytes: Annotated[int, Meta(ge=limits.WAL_FILE_BYTES_MIN, le=1 << 32)] = limits.WAL_FILE_BYTES_DEFAULT
    volatile_bytes: Annotated[int, Meta(ge=limits.WAL_FILE_BYTES_MIN, le=1 << 36)] = (
        limits.VOLATILE_BYTES_DEFAULT
    )


class ColdConfig(ConfigSection, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The second tier. Without a place for it nothing is relocated (TI-1)."""

    dir: Text = ""
    """A directory on another device."""
    url: Text = ""
    """An object store instead: `s3://bucket/prefix`; credentials come from the environment."""
    hot_segments: Annotated[int, Meta(ge=0, le=1 << 20)] = limits.HOT_SEGMENTS_DEFAULT
    """A topic's newest segments that stay on the host's own disk (TI-2)."""
    hot_bytes: Annotated[int, Meta(ge=0, le=limits.COUNT_MAX)] = 0
    """Most bytes of a topic's segments on the host's own disk; 0 = no bound. The stricter one decides."""
    interval_s: Annotated[float, Meta(ge=limits.INTERVAL_S_MIN, le=86_400)] = 5.0
    cache_bytes: Annotated[int, Meta(ge=1 << 20, le=1 << 40)] = 64 * limits.MIB
    timeout_s: Annotated[float, Meta(ge=limits.INTERVAL_S_MIN, le=3_600)] = 30.0


class StorageConfig(ConfigSection, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How the log becomes segments, and when space is given back."""

    enabled: bool = True
    """Off: no process works in the background, and log files are kept for ever."""
    segment_records: Annotated[int, Meta(ge=1, le=1 << 31)] = limits.SEGMENT_RECORDS_DEFAULT
    segment_bytes: Annotated[int, Meta(ge=64 * limits.KIB, le=1 << 32)] = limits.SEGMENT_BYTES_DEFAULT
    segment_age_ms: Annotated[int, Meta(ge=0, le=limits.DURATION_MS_MAX)] = limits.SEGMENT_AGE_MS_DEFAULT
    """Records wait in the log no longer than this; 0 = as long as it takes to fill a file."""
    own_segment_bytes: Annotated[int, Meta(ge=0, le=1 << 32)] = limits.OWN_SEGMENT_BYTES_DEFAULT
    """Topics with less than this in a pass share a segment."""
    compression: Literal["none", "lz4", "zstd"] = "none"
    compression_min_bytes: Annotated[int, Meta(ge=0, le=limits.FRAME_BYTES_MAX)] = 1_024
    compression_saving: Annotated[float, Meta(ge=0, lt=1)] = 0.05
    """A body is kept compressed only when that saves at least this part of it."""
    reclaim_bytes_per_s: Annotated[int, Meta(ge=1 << 16, le=limits.PACE_BYTES_MAX)] = 64 * limits.MIB
    reclaim_interval_s: Annotated[float, Meta(ge=limits.INTERVAL_S_MIN, le=86_400)] = 5.0
    scrub_bytes_per_s: Annotated[int, Meta(ge=0, le=limits.PACE_BYTES_MAX)] = 4 * limits.MIB
    """Pace at which everything at rest is verified over and over (RD-23); 0 = off."""


class DeliveryConfig(ConfigSection, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Who tells readers that there is something new."""

    schedulers: Annotated[int, Meta(ge=0, le=limits.SCHEDULERS_MAX)] = 1
    """Processes that share the topics; 0 = none: readers look for themselves, and watches are refused."""


class GovernorConfig(ConfigSection, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What happens under pressure."""

    enabled: bool = True
    """Off: pressure is measured and shown, and nothing follows from it."""


class LogConfig(ConfigSection, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the processes say."""

    level: Text = "info"
    """`info`, or with exceptions: `info,ringlog.shard=debug`."""
    format: Literal["auto", "console", "json"] = "auto"
    """`auto`: console on a terminal, else JSON lines."""
    file: Text = ""
    """Empty: standard error. SIGHUP reopens it."""


class SupervisorConfig(ConfigSection, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How patient the supervisor is."""

    restart_max: Annotated[int, Meta(ge=0, le=1000)] = limits.RESTART_MAX_DEFAULT
    restart_window_s: Annotated[float, Meta(ge=limits.INTERVAL_S_MIN, le=86_400)] = (
        limits.RESTART_WINDOW_S_DEFAULT
    )
    drain_s: Annotated[float, Meta(ge=0, le=3_600)] = limits.DRAIN_S_DEFAULT
    stuck_after_s: Annotated[float, Meta(ge=limits.STUCK_AFTER_S_MIN, le=3_600)] = (
        limits.STUCK_AFTER_S_DEFAULT
    )


class ProfileConfig(ConfigSection, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Whether profilers of the same user may look into the processes."""

    allow: bool = True


class Config(ConfigSection, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The effective configuration; one field a table."""

    data: DataConfig = DataConfig()
    run: RunConfig = RunConfig()
    native: NativeConfig = NativeConfig()
    gateway: GatewayConfig = GatewayConfig()
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
    """Topics made at start when absent, with their configuration."""


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
"""Variable that may set each key."""

STRICT_ENVIRONMENT_KEYS = frozenset(
    {"auth.keys_file", "native.endpoint", "native.curve_key_file", "run.allow_root"}
)
"""Keys whose environment variable is not replaced by the default when it cannot be read: the default
would quietly listen elsewhere or with other rights than was asked for."""

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
    """The effective configuration, the source of each value, and what was odd on the way."""

    config: Config
    sources: Mapping[str, str]
    """`section.key` -> `default`, `flag`, `environment RINGLOG_…` or `file <path>`."""
    warnings: Sequence[str] = ()
    file: str = ""
    """The TOML file that was read; empty when there was none."""

    def rows(self) -> list[tuple[str, Any, str]]:
        """(key, value, source) of every setting, in the order of this page."""
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
    """Gather the configuration; `flags` maps `section.key` to text (see `parse_flags`).

    Relative paths are taken from `cwd`. Raises ConfigError naming the key and what is wrong with it.
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
    """What is configured and is not there now, in words; empty when nothing is. The engine starts without it:
    a volume may be mounted later."""
    place = config.cold.dir
    if not place or os.path.isdir(place):
        return ""
    return (
        f"there is no directory {place} (cold.dir): until it is mounted, segments in it cannot be read and "
        "none is moved to it"
    )


def parse_flags(pairs: Sequence[str]) -> dict[str, str]:
    """Split `section.key=value` arguments; raises ConfigError for one without `=`."""
    flags = {}
    for pair in pairs:
        name, separator, text = pair.partition("=")
        if not separator:
            raise ConfigError("--set wants section.key=value", found=pair)
        flags[name.strip()] = text.strip()
    return flags


def to_plain(config: Config) -> dict[str, Any]:
    """Every value as plain dicts, strings and numbers: what ActorBoot.config carries."""
    plain: dict[str, Any] = msgspec.to_builtins(config)
    return plain


def from_plain(plain: Mapping[str, Any]) -> Config:
    """Inverse of to_plain; raises ConfigError naming the key."""
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
    _require_utf8(found)
    return found


def _require_utf8(config: Config) -> None:
    """Settings and paths travel between processes as UTF-8. Other bytes of a command line, of the environment
    or of the working directory's name are surrogates here."""
    for section, struct in _SECTIONS.items():
        for key in _keys(struct):
            value = getattr(getattr(config, section), key)
            if isinstance(value, str) and not value.isascii():
                try:
                    value.encode()
                except UnicodeEncodeError:
                    raise ConfigError(
                        f"{section}.{key} must be UTF-8; under LC_ALL=C set PYTHONUTF8=1", found=ascii(value)
                    ) from None


# -- the file -----------------------------------------------------------------------------------------


def _find_file(named: str | None, environ: Mapping[str, str], cwd: str) -> str:
    """Path of the file to read; empty when none was named and none lies in the usual places."""
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
    """Bytes of `64MiB`, `1GB` or a bare number; ValueError otherwise."""
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
    """Seconds of `100ms`, `5s`, `2h`, or of a bare number in `unit`; ValueError otherwise."""
    match = _QUANTITY.match(text)
    if not match or (match[2] or unit) not in _TIME_UNITS:
        raise ValueError(f"{text!r} is not a duration such as 100ms, 5s or 2h")
    if len(match[1]) > _DIGITS_MAX:
        raise ValueError(f"{text[:_DIGITS_MAX]!r}... has more than {_DIGITS_MAX} digits")
    return float(match[1]) * _TIME_UNITS[match[2] or unit]


def _from_text(name: str, text: str) -> Any:
    """Value of a key from text; raises ConfigError naming the key."""
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
        raise ValueError(f"{text!r} is finer than this setting")
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
