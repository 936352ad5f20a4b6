"""Every environment variable that ringlog reads, in one table: engine, clients, commands, benchmarks, Spark.

`SETTING_VARIABLES` has the variables of settings, `VARIABLES` all others. `environment_problems` reports
unknown variables with the prefix RINGLOG_, because a mistyped one would otherwise be ignored silently.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

PREFIX = "RINGLOG_"


class Variable(NamedTuple):
    """A variable that is not a setting of the engine."""

    description: str
    expected: str = ""
    """Description of the accepted values; empty if any text is accepted."""
    accepts: Callable[[str], bool] = lambda text: True


def _one_of(*words: str) -> Variable:
    return Variable("", " or ".join(words), lambda text: text in words)


def _switch(what: str, *words: str) -> Variable:
    return _one_of(*words)._replace(description=what)


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and int(text) > 0


def _is_scale(text: str) -> bool:
    return re.fullmatch(r"[0-9]+(\.[0-9]+)?", text) is not None and float(text) > 0


CONFIG = "RINGLOG_CONFIG"
URL = "RINGLOG_URL"
KEY = "RINGLOG_KEY"
KEY_FILE = "RINGLOG_KEY_FILE"
TIMEOUT_MS = "RINGLOG_TIMEOUT_MS"
API_KEYS = "RINGLOG_API_KEYS"
TEST_PACKAGE = "RINGLOG_TEST_PACKAGE"
STOP_POINTS = "RINGLOG_TEST_STOP_POINTS"
SPARK_JVM = "RINGLOG_SPARK_JVM"
SPARK_JRE = "RINGLOG_JRE"
BENCH_SCALE = "RINGLOG_BENCH_SCALE"

VARIABLES: dict[str, Variable] = {
    CONFIG: Variable("the configuration file"),
    URL: Variable("clients, command line: the engine"),
    KEY: Variable("clients: secret key of a TCP connection"),
    KEY_FILE: Variable("clients: file of that key"),
    # No `accepts`: a warning would quote the value. The gateway refuses a wrong one without quoting it.
    API_KEYS: Variable("engine: bearer keys for HTTP, KEY or KEY:scopes:prefixes, separated by commas"),
    TIMEOUT_MS: Variable("clients: bound of every request", "milliseconds, at least 1", _is_count),
    SPARK_JVM: _switch("0: Spark reads without the engine's classes for the JVM", "0", "1"),
    SPARK_JRE: Variable("the Java runtime that Spark was started on"),
    BENCH_SCALE: Variable("bench: how much of each measurement", "a number above 0", _is_scale),
    STOP_POINTS: Variable("tests: where processes end"),
    TEST_PACKAGE: Variable("tests, chaos: directory of the package that engines and client processes run"),
    "RINGLOG_CHAOS_RUN": Variable("chaos: marks processes of a run"),
    "RINGLOG_CHAOS_KEEP": Variable("chaos: where what was found wrong is kept"),
}
"""Name -> description and accepted values."""

SETTING_VARIABLES: dict[str, str] = {
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
    "http.processes": "RINGLOG_HTTP_PROCESSES",
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
    "limits.max_total_bytes": "RINGLOG_MAX_TOTAL_BYTES",
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
"""Setting of the engine -> variable."""

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

_KUBERNETES_VARIABLES = re.compile(r"RINGLOG_(SERVICE_(HOST|PORT\w*)|PORT(_[0-9]+_(TCP|UDP)(_\w+)?)?)")
"""Kubernetes sets these variables in every container of a namespace with a service named ringlog."""


def is_of_kubernetes(variable: str, value: str) -> bool:
    """Return whether Kubernetes has set a variable that is also a setting: `RINGLOG_PORT=tcp://10.0.0.1:80`."""
    return _KUBERNETES_VARIABLES.fullmatch(variable) is not None and value.startswith(("tcp://", "udp://"))


def environment_problems(environ: Mapping[str, str]) -> list[str]:
    """Return descriptions of unknown RINGLOG_ variables, and of values that cannot be read.

    The values of settings are checked by load_config.
    """
    known = [*VARIABLES, *SETTING_VARIABLES.values()]
    found = []
    for name in sorted(environ):
        if not name.startswith(PREFIX) or _KUBERNETES_VARIABLES.fullmatch(name):
            continue
        if name not in known:
            ends = [each.removeprefix(PREFIX) for each in known]
            near = difflib.get_close_matches(name.removeprefix(PREFIX), ends, n=1, cutoff=0.6)
            hint = f"; did you mean {PREFIX}{near[0]}?" if near else ""
            found.append(f"{name} is ignored: unknown variable{hint}")
            continue
        variable = VARIABLES.get(name)
        if variable is not None and environ[name] and not variable.accepts(environ[name]):
            found.append(f"{name} must be {variable.expected}, got {environ[name]!r}")
    return found
