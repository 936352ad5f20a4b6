"""What a worker and its processes say to one another: a length of 4 bytes, then MessagePack.

The worker sends jobs, one at a time; the process says once that it is ready, or why it cannot be, and then
what became of each job. The end of the stream is the wish that the process ends.
"""

from __future__ import annotations

from typing import Final

import msgspec

from ringlog.errors import FrameInvalid
from ringlog.limits import RECORD_BYTES_MAX, WORKER_REASON_CHARS_MAX
from ringlog.worker.job import CurrentJob

HEAD_BYTES: Final = 4
MESSAGE_BYTES_MAX: Final = 2 * RECORD_BYTES_MAX
"""A job with all its fields, as MessagePack."""


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """What a process is told when it is started, as JSON."""

    fd: int
    parent_pid: int
    target: str
    payload: str
    memory_bytes: int = 0
    log_level: str = "info"
    log_format: str = "auto"


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The function was imported."""


class CannotStart(msgspec.Struct, frozen=True, tag=True):
    """It was not."""

    reason: str
    trace: str = ""


class RunJob(msgspec.Struct, frozen=True, tag=True):
    """Do this job."""

    job: CurrentJob


class JobDone(msgspec.Struct, frozen=True, tag=True):
    """The function returned."""

    ran_ms: float


class JobFailed(msgspec.Struct, frozen=True, tag=True):
    """The function raised something; `delay_ms` when it said when to try again. `is_last`: the process ends,
    because what was raised leaves it in no state to go on."""

    ran_ms: float
    reason: str
    trace: str = ""
    delay_ms: int | None = None
    is_last: bool = False


class JobRejected(msgspec.Struct, frozen=True, tag=True):
    """The job would fail each time: the function said so, or its payload could not be decoded."""

    ran_ms: float
    reason: str
    trace: str = ""


Outcome = JobDone | JobFailed | JobRejected
ProcessMessage = Ready | CannotStart | JobDone | JobFailed | JobRejected

_encode = msgspec.msgpack.Encoder().encode
_from_process: msgspec.msgpack.Decoder[ProcessMessage] = msgspec.msgpack.Decoder(ProcessMessage)
_work = msgspec.msgpack.Decoder(RunJob)


def encode_message(message: msgspec.Struct) -> bytes:
    """The message with its length."""
    body = _encode(message)
    return len(body).to_bytes(HEAD_BYTES, "little") + body


def length_of(head: bytes) -> int:
    """Bytes that follow; raises FrameInvalid for what no message of ours has."""
    length = int.from_bytes(head, "little")
    if length > MESSAGE_BYTES_MAX:
        raise FrameInvalid("a message of a worker is too long", length=length)
    return length


def decode_process_message(body: bytes) -> ProcessMessage:
    """What a process said; raises FrameInvalid."""
    try:
        return _from_process.decode(body)
    except msgspec.MsgspecError as e:
        raise FrameInvalid("not a message of a worker's process", error=str(e)) from None


def decode_run_job(body: bytes) -> RunJob:
    """What the worker said."""
    return _work.decode(body)


def shortened(text: str) -> str:
    """As much of a reason or trace as travels: its end, where it is too long."""
    if len(text) > WORKER_REASON_CHARS_MAX:
        text = "…" + text[-WORKER_REASON_CHARS_MAX:]
    return text.encode(errors="backslashreplace").decode()  # A lone surrogate does not travel.


def text_of(error: BaseException) -> str:
    """What an error says; never raises."""
    try:
        return str(error)
    except Exception as e:  # noqa: BLE001  a class of the program's may do anything
        return f"(its text raised {type(e).__name__})"
