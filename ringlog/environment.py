"""Every environment variable that ringlog reads, in one table: engine, clients, commands, benchmarks, Spark.

`config.ENVIRONMENT` has the variables of settings, `VARIABLES` all others. `environment_problems` reports
unknown variables with the prefix RINGLOG_, because a mistyped one would otherwise be ignored silently.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
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

_KUBERNETES_VARIABLES = re.compile(r"RINGLOG_(SERVICE_(HOST|PORT\w*)|PORT(_[0-9]+_(TCP|UDP)(_\w+)?)?)")
"""Kubernetes sets these variables in every container of a namespace with a service named ringlog."""


def is_of_kubernetes(variable: str, value: str) -> bool:
    """Return whether Kubernetes has set a variable that is also a setting: `RINGLOG_PORT=tcp://10.0.0.1:80`."""
    return _KUBERNETES_VARIABLES.fullmatch(variable) is not None and value.startswith(("tcp://", "udp://"))


def environment_problems(environ: Mapping[str, str], settings: Iterable[str]) -> list[str]:
    """Return descriptions of unknown RINGLOG_ variables, and of values that cannot be read.

    `settings` are the variables of settings, whose values load_config checks.
    """
    known = [*VARIABLES, *settings]
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
