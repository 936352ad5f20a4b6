"""Logging of engine processes and workers: standard `logging`, as JSON lines or text for a terminal.

The library itself only adds a null handler. A process calls `configure` once. A line contains `ts`, `level`,
`logger`, `event` (a short constant phrase), `actor`, `incarnation`, then facts by name. Facts are passed to
`log_event` and never formatted into the event. A client's string therefore never becomes part of a format,
and equal events can be counted.
"""

from __future__ import annotations

import logging
import logging.handlers
import sys
from datetime import UTC, datetime
from typing import Any

import msgspec

from ringlog.errors import ConfigError

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
REPEAT_WINDOW_S = 10.0
REPEATS_REMEMBERED_MAX = 256

_encoder = msgspec.json.Encoder(enc_hook=str)
_DIM, _RED, _YELLOW, _PLAIN = "\x1b[2m", "\x1b[31m", "\x1b[33m", "\x1b[0m"


def log_event(logger: logging.Logger, level: int, event: str, **facts: Any) -> None:
    """Log an event with facts. `event` must be a constant phrase."""
    if logger.isEnabledFor(level):
        logger.log(level, "%s", event, extra={"facts": facts}, stacklevel=2)


def configure(*, level: str, format: str, file: str, actor: str, incarnation: int = 0) -> None:
    """Send this process's log to `file`, or to standard error if that is empty. Replaces earlier handlers.

    `level` is for example `info` or `info,some.logger=debug`. `format` is auto, console or json. Raises
    ConfigError for an unknown level and for a file that cannot be opened.
    """
    base, per_logger = parse_levels(level)
    try:
        handler = logging.handlers.WatchedFileHandler(file) if file else logging.StreamHandler(sys.stderr)
    except OSError as e:
        raise ConfigError("log file cannot be opened", file=file, reason=e.strerror) from None
    to_console = format == "console" or (format == "auto" and not file and sys.stderr.isatty())
    identity = {"actor": actor, "incarnation": incarnation}
    handler.setFormatter(_Console(identity) if to_console else _JsonLines(identity))
    handler.addFilter(RepeatFilter())
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
        old.close()
    root.addHandler(handler)
    root.setLevel(base)
    for name, number in per_logger.items():
        logging.getLogger(name).setLevel(number)


def reopen() -> None:
    """Reopen log files that were renamed, for example by logrotate. SIGHUP calls it."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.handlers.WatchedFileHandler):
            handler.reopenIfNeeded()


def parse_levels(text: str) -> tuple[int, dict[str, int]]:
    """Return (default level, levels by logger). Raises ConfigError, which names the unknown level."""
    base, per_logger = logging.INFO, {}
    for piece in filter(None, (part.strip() for part in text.split(","))):
        name, separator, word = piece.rpartition("=")
        if word.lower() not in LEVELS:
            raise ConfigError("log.level: unknown level", found=word, known=sorted(LEVELS))
        if separator:
            per_logger[name] = LEVELS[word.lower()]
        else:
            base = LEVELS[word.lower()]
    return base, per_logger


class RepeatFilter(logging.Filter):
    """Passes equal warnings once in ten seconds, and then adds how many were suppressed meanwhile.

    Errors always pass. At most REPEATS_REMEMBERED_MAX different warnings are remembered.
    """

    def __init__(self) -> None:
        super().__init__()
        self._last: dict[tuple[str, str], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno != logging.WARNING:
            return True
        key = (record.name, record.getMessage())
        shown, held = self._last.get(key, (0.0, 0))
        if abs(record.created - shown) < REPEAT_WINDOW_S:
            self._last[key] = (shown, held + 1)
            return False
        self._last.pop(key, None)
        self._last[key] = (record.created, 0)
        if len(self._last) > REPEATS_REMEMBERED_MAX:
            del self._last[next(iter(self._last))]
        if held:
            record.facts = {**getattr(record, "facts", {}), "repeated": held}
        return True


def _facts(record: logging.LogRecord) -> dict[str, Any]:
    facts: dict[str, Any] = getattr(record, "facts", {})
    return facts


def _stamp(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")


class _JsonLines(logging.Formatter):
    def __init__(self, identity: dict[str, Any]) -> None:
        super().__init__()
        self._identity = identity

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "ts": _stamp(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
            **self._identity,
        }
        # A fact must not replace one of the fields above.
        line |= {(f"fact_{name}" if name in line else name): value for name, value in _facts(record).items()}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return _encoder.encode(line).decode()


class _Console(logging.Formatter):
    def __init__(self, identity: dict[str, Any]) -> None:
        super().__init__()
        self._actor = identity["actor"]
        self._colour = sys.stderr.isatty()

    def format(self, record: logging.LogRecord) -> str:
        facts = " ".join(f"{name}={value!r}" for name, value in _facts(record).items())
        clock = _stamp(record)[11:23]
        text = (
            f"{clock} {record.levelname.lower():<8}{self._actor:<14}{record.getMessage()!s} {facts}".rstrip()
        )
        # repr escapes control characters in facts. The event is a constant of the code.
        if self._colour:
            text = f"{self._paint(record.levelno)}{text}{_PLAIN}"
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        return text

    @staticmethod
    def _paint(level: int) -> str:
        if level >= logging.ERROR:
            return _RED
        return _YELLOW if level >= logging.WARNING else (_DIM if level < logging.INFO else "")
