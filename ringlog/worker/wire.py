"""Messages between a worker and its processes: a length of 4 bytes (little-endian), then MessagePack.

The process first sends that it is ready, or why it cannot start. The worker then sends one job at a time, and
the process replies with its outcome. The worker closes the stream to end the process.
"""

from __future__ import annotations

from typing import Final

import msgspec

from ringlog.errors import FrameInvalid
from ringlog.limits import RECORD_BYTES_MAX, WORKER_REASON_CHARS_MAX
from ringlog.worker.job import CurrentJob

HEAD_BYTES: Final = 4
MESSAGE_BYTES_MAX: Final = 2 * RECORD_BYTES_MAX
"""Largest message: one job with all its fields as MessagePack."""


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a process, passed as JSON on its command line."""

    fd: int
    parent_pid: int
    target: str
    payload: str
    memory_bytes: int = 0
    log_level: str = "info"
    log_format: str = "auto"


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The process has imported the function and accepts jobs."""


class CannotStart(msgspec.Struct, frozen=True, tag=True):
    """The function or the codec cannot be imported."""

    reason: str
    trace: str = ""


class RunJob(msgspec.Struct, frozen=True, tag=True):
    """Run this job."""

    job: CurrentJob


class JobDone(msgspec.Struct, frozen=True, tag=True):
    """The function returned. `ran_ms` is its run time."""

    ran_ms: float


class JobFailed(msgspec.Struct, frozen=True, tag=True):
    """The function raised an error.

    `delay_ms` is set if the error names a delay. `is_last`: the process ends after this message, because the
    error may have left it in an inconsistent state.
    """

    ran_ms: float
    reason: str
    trace: str = ""
    delay_ms: int | None = None
    is_last: bool = False


class JobRejected(msgspec.Struct, frozen=True, tag=True):
    """The job would fail each time: the function rejected it, or its payload cannot be decoded."""

    ran_ms: float
    reason: str
    trace: str = ""


Outcome = JobDone | JobFailed | JobRejected
ProcessMessage = Ready | CannotStart | JobDone | JobFailed | JobRejected

_encode = msgspec.msgpack.Encoder().encode
_from_process: msgspec.msgpack.Decoder[ProcessMessage] = msgspec.msgpack.Decoder(ProcessMessage)
_work = msgspec.msgpack.Decoder(RunJob)


def encode_message(message: msgspec.Struct) -> bytes:
    """Return the encoded message with its length prefix."""
    body = _encode(message)
    return len(body).to_bytes(HEAD_BYTES, "little") + body


def length_of(head: bytes) -> int:
    """Return the number of bytes that follow. Raises FrameInvalid if it exceeds MESSAGE_BYTES_MAX."""
    length = int.from_bytes(head, "little")
    if length > MESSAGE_BYTES_MAX:
        raise FrameInvalid("message between worker and process is too long", length=length)
    return length


def decode_process_message(body: bytes) -> ProcessMessage:
    """Decode a message of a process; raises FrameInvalid."""
    try:
        return _from_process.decode(body)
    except msgspec.MsgspecError as e:
        raise FrameInvalid("not a message of a worker's process", error=str(e)) from None


def decode_run_job(body: bytes) -> RunJob:
    """Decode a message of the worker; raises msgspec.MsgspecError."""
    return _work.decode(body)


def shortened(text: str) -> str:
    """Return a reason or trace with at most WORKER_REASON_CHARS_MAX characters; the end is kept."""
    if len(text) > WORKER_REASON_CHARS_MAX:
        text = "…" + text[-WORKER_REASON_CHARS_MAX:]
    return text.encode(errors="backslashreplace").decode()  # A lone surrogate cannot be encoded as UTF-8.


def text_of(error: BaseException) -> str:
    """Return the text of an error. Never raises."""
    try:
        return str(error)
    except Exception as e:  # noqa: BLE001  a class of the program's may do anything
        return f"(its text raised {type(e).__name__})"
