"""Exit codes, which scripts may rely on, and the error line, which users read.

0  success
1  refused or failed; the line contains the error code
2  usage error: nothing was sent
3  cannot connect
4  no such topic, consumer group or router
5  timed out or disconnected: it is not known whether the request was applied
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
    InvalidRequest,
    RequestTimeout,
    RinglogError,
    RouterNotFound,
    TopicNotFound,
    UsageError,
)


class CliExit(IntEnum):
    """Exit codes of `ringlog`."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    NO_CONNECTION = 3
    NOT_FOUND = 4
    UNKNOWN = 5
    DAMAGE = 6
    INTERRUPTED = 130


def cli_exit_code(error: BaseException) -> CliExit:
    """Return the exit code for an error."""
    if isinstance(error, KeyboardInterrupt):
        return CliExit.INTERRUPTED
    if isinstance(error, UsageError | ConfigError):
        return CliExit.USAGE
    if isinstance(error, RequestTimeout):
        return CliExit.UNKNOWN
    if isinstance(error, ConnectionTrouble):
        return CliExit.NO_CONNECTION
    if isinstance(error, TopicNotFound | GroupNotFound | RouterNotFound):
        return CliExit.NOT_FOUND
    if isinstance(error, CorruptData | FrameInvalid):
        return CliExit.DAMAGE
    if isinstance(error, RinglogError) and error.outcome == "unknown":
        return CliExit.UNKNOWN
    return CliExit.FAILED


def partly_applied(error: RinglogError | OSError, acknowledged: int) -> RinglogError | OSError:
    """Return the error of a command that reads its input in parts, with what was acknowledged before it.

    Wrong input is wrong usage, and "nothing was sent", only if it was found before the first acknowledgement.
    Otherwise a repetition of the whole command would append duplicates, so the error says where it stopped.
    """
    if not acknowledged:
        return error
    if isinstance(error, OSError):
        reason = error.strerror or str(error)
        return InvalidRequest(
            "the input cannot be read", file=error.filename, reason=reason, acknowledged=acknowledged
        )
    if isinstance(error, UsageError):
        return InvalidRequest(error.message, **error.detail, acknowledged=acknowledged)
    error.detail["acknowledged"] = acknowledged
    return error


def error_line(error: BaseException) -> str:
    """Return the error line for stderr: `error: <code>: <text>`, without line breaks."""
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
    line = f"error: {code}: {' '.join(text.split())}"
    # An argument of the shell that is not UTF-8 has surrogates.
    return line.encode(errors="backslashreplace").decode()
