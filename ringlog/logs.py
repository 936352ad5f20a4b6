"""How our processes log: standard `logging`, as JSON lines or for a terminal.

The library itself only adds a null handler; a process of ours calls `configure` once. A line carries
`ts`, `level`, `logger`, `event` (a short stable phrase), `actor`, `incarnation`, then facts by name.
Facts are given with `say`, never formatted into the event, so that no client's string becomes part of
a format (SEC-25) and the same event can be counted.
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
    """Log an event with facts; `event` is a constant phrase."""
    if logger.isEnabledFor(level):
        logger.log(level, "%s", event, extra={"facts": facts}, stacklevel=2)


def configure(*, level: str, format: str, file: str, actor: str, incarnation: int = 0) -> None:
    """Send this process's log to `file` (standard error when empty); replaces what was configured.

    `level` is `info` or `info,some.logger=debug`; raises ConfigError for a word it does not know and
    for a file that cannot be opened.
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
    """Open log files anew, after somebody moved them away (SIGHUP)."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.handlers.WatchedFileHandler):
            handler.reopenIfNeeded()


def parse_levels(text: str) -> tuple[int, dict[str, int]]:
    """Default level and levels by logger; raises ConfigError naming the word."""
    base, per_logger = logging.INFO, {}
    for piece in filter(None, (part.strip() for part in text.split(","))):
        name, separator, word = piece.rpartition("=")
        if word.lower() not in LEVELS:
            raise ConfigError("log.level: no such level", found=word, known=sorted(LEVELS))
        if separator:
            per_logger[name] = LEVELS[word.lower()]
        else:
            base = LEVELS[word.lower()]
    return base, per_logger


class RepeatFilter(logging.Filter):
    """Lets a warning through once in ten seconds and says how many were held back meanwhile.

    Errors always pass. Bounded: at most REPEATS_REMEMBERED_MAX different warnings are remembered.
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
        # A fact may not pose as one of the fields above.
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
        # Control characters in a fact are shown by repr; the event is ours.
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
