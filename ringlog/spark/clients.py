"""One client for each engine and process, shared by everything a Spark worker does there.

A cold tier that is read alone has a client of its own kind, which needs no engine (cold_alone).

Workers are used for many tasks, so what is costly to open is kept; nothing of it is ever pickled (SK-15). A
client goes on by itself when its engine was restarted, and opens itself anew after a fork.
"""

from __future__ import annotations

import os
import threading
from typing import Any, cast

import ringlog
from ringlog.client.client import Client
from ringlog.envelope.engine_file import EngineInfo
from ringlog.errors import NotConnected
from ringlog.link.address import read_engine_file
from ringlog.spark.cold_address import is_address
from ringlog.spark.cold_client import cold_client
from ringlog.spark.errors import EngineNotRunning
from ringlog.storage.disk import RealDisk

CONNECT_S = 10.0
"""How long an engine that says it runs may take to answer."""
_clients: dict[str, Client] = {}
_lock = threading.Lock()


def engine_of(path: str) -> tuple[str, EngineInfo]:
    """(run directory, what the engine says of itself); `path` is the data directory or the run directory.

    Raises EngineNotRunning, UsageError for a run directory that cannot be read.
    """
    info = read_engine_file(path)
    if info is None:
        raise EngineNotRunning(
            "no engine runs on this data directory; start it with `ringlog serve --data-dir PATH`, or give "
            "the run directory as path if it was configured to lie elsewhere",
            path=path,
        )
    inner = os.path.join(path, "run")
    return (inner if read_engine_file(inner) is not None else path), info


def log_id_of(path: str) -> str:
    """Identity of the log that `client_of` leads to; stays the same over restarts of its engine."""
    return cold_client(path).log_id if is_address(path) else engine_of(path)[1].engine_id


def disk_of(path: str) -> Any:
    """Where the indexes of its segments are read."""
    return cold_client(path).disk if is_address(path) else RealDisk()


def client_of(path: str) -> Client:
    """The client of the engine that serves this data directory; raises EngineNotRunning."""
    if is_address(path):
        return cast("Client", cold_client(path))
    run_dir = os.path.realpath(engine_of(path)[0])
    with _lock:
        client = _clients.get(run_dir)
        if client is None:
            client = ringlog.connect(f"ringlog://{run_dir}", transport="ring")
            _clients[run_dir] = client
    try:
        client.wait_ready(CONNECT_S)
    except NotConnected as e:
        raise EngineNotRunning(
            "the engine of this data directory does not answer; see `ringlog status`, or start it with "
            "`ringlog serve --data-dir PATH`",
            path=path,
            reason=e.message,
        ) from None
    return client


def close_clients() -> None:
    """Close them all; the next use connects anew. For programs that outlive their engines."""
    with _lock:
        held = list(_clients.values())
        _clients.clear()
    for client in held:
        client.close()
