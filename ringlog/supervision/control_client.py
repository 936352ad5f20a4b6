"""Requests to a running engine from another process: `ringlog status`, `ringlog stop`."""

from __future__ import annotations

import os
from typing import TypeVar

import zmq

from ringlog.board.processes import SUPERVISOR, scheduler_name, socket_of
from ringlog.envelope.messages import (
    ConsumersReply,
    EngineStatus,
    EngineStatusReply,
    EngineStop,
    EngineStopping,
    ErrorReply,
    ListConsumers,
    Message,
)
from ringlog.envelope.wire import EnvelopeInvalid, decode, encode
from ringlog.errors import NotConnected, RequestTimeout, error_from_status
from ringlog.limits import ENVELOPE_BYTES_MAX
from ringlog.supervision.run_dir import read_engine_json

TIMEOUT_S = 5.0
_CORR = 1

R = TypeVar("R", bound=Message)


def fetch_status(run_dir: str, timeout_s: float = TIMEOUT_S) -> EngineStatusReply:
    """Return the status of the engine that is announced in `run_dir`.

    Raises NotConnected if no engine is announced or its socket does not exist. Raises RequestTimeout without
    a reply in `timeout_s` seconds, and Refused if the engine refuses the request.
    """
    return _request(run_dir, EngineStatus(), EngineStatusReply, timeout_s)


def stop_engine(run_dir: str, timeout_s: float = TIMEOUT_S) -> None:
    """Request an orderly stop of the engine that is announced in `run_dir`. Raises like `fetch_status`."""
    _request(run_dir, EngineStop(), EngineStopping, timeout_s)


def fetch_consumers(run_dir: str, number: int, most: int, timeout_s: float = TIMEOUT_S) -> ConsumersReply:
    """Return the consumers with the greatest lag at scheduler `number`, at most `most` of them.

    Raises like `fetch_status`.
    """
    return _request(run_dir, ListConsumers(most), ConsumersReply, timeout_s, scheduler_name(number))


def _request(
    run_dir: str, request: Message, wanted: type[R], timeout_s: float, process: str = SUPERVISOR
) -> R:
    endpoint = socket_of(read_engine_json(run_dir).shm_dir, process)
    if not os.path.exists(endpoint.removeprefix("ipc://")):
        raise NotConnected(
            "no engine listens on the announced socket; start the engine with `ringlog serve`",
            socket=endpoint,
        )
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, ENVELOPE_BYTES_MAX)
        socket.connect(endpoint)
        socket.send(encode(request, _CORR))
        if not socket.poll(round(timeout_s * 1000)):
            raise RequestTimeout(
                "the engine did not reply in time", process=process, outcome="unknown", timeout_s=timeout_s
            )
        reply = decode(socket.recv_multipart()[0]).message
    if isinstance(reply, ErrorReply):
        raise error_from_status(reply.status, reply.message, reply.detail)
    if not isinstance(reply, wanted):
        raise EnvelopeInvalid(
            "the engine sent a reply of another kind; install the same release on both sides",
            kind=type(reply).__name__,
        )
    return reply
