"""How a command ends: the exit code scripts may rely on, and the one line people read.

0  done
1  refused or failed; the line names the code
2  wrong usage: nothing was sent
3  cannot connect
4  no such topic, consumer group or router
5  timed out or cut off: whether it happened is not known
6  damage found
130  interrupted
"""

from __future__ import annotations

from enum import IntEnum

from ringlog.errors import (
    ConfigError,
    ConnectionTrouble,
    CorruptData,
    FrameInvalid,
    GroupNotFound,
    RequestTimeout,
    RinglogError,
    RouterNotFound,
    TopicNotFound,
    UsageError,
)


class Exit(IntEnum):
    """Exit codes of `ringlog`."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    NO_CONNECTION = 3
    NOT_FOUND = 4
    UNKNOWN = 5
    DAMAGE = 6
    INTERRUPTED = 130


def exit_for(error: BaseException) -> Exit:
    """Exit code that tells a script what kind of failure this was."""
    if isinstance(error, KeyboardInterrupt):
        return Exit.INTERRUPTED
    if isinstance(error, UsageError | ConfigError):
        return Exit.USAGE
    if isinstance(error, RequestTimeout):
        return Exit.UNKNOWN
    if isinstance(error, ConnectionTrouble):
        return Exit.NO_CONNECTION
    if isinstance(error, TopicNotFound | GroupNotFound | RouterNotFound):
        return Exit.NOT_FOUND
    if isinstance(error, CorruptData | FrameInvalid):
        return Exit.DAMAGE
    if isinstance(error, RinglogError) and error.outcome == "unknown":
        return Exit.UNKNOWN
    return Exit.FAILED


def line_for(error: BaseException) -> str:
    """The line for stderr: `error: <code>: <text>`, without line breaks."""
    if isinstance(error, RinglogError):
        code, text = error.code, str(error)
        if error.outcome == "unknown":
            text += "; whether it was applied is not known"
    elif isinstance(error, OSError):
        code, text = "os", error.strerror or str(error)
        if error.filename is not None:
            text = f"{error.filename}: {text}"
    else:
        code, text = "internal", f"{type(error).__name__}: {error}"
    return f"error: {code}: {' '.join(text.split())}"
