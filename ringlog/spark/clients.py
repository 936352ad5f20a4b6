"""Keeps one client per engine and process, shared by all Spark tasks of that process.

A cold tier that is read without its engine has its own kind of client (cold_client.py).

Spark reuses workers for many tasks, so expensive objects are cached. They are never pickled. A client
reconnects by itself after a restart of its engine, and reopens itself after a fork.
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
from ringlog.storage.real_disk import RealDisk

CONNECT_S = 10.0
"""Timeout in seconds for a connection to a running engine."""
_clients: dict[str, Client] = {}
_lock = threading.Lock()


def engine_of(path: str) -> tuple[str, EngineInfo]:
    """Return (run directory, engine file); `path` is the data directory or the run directory.

    Raises EngineNotRunning, and UsageError if the run directory cannot be read.
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
    """Return the identity of the log of `client_of(path)`.

    It does not change when the engine restarts, but when its data directory is restored from a backup.
    """
    return cold_client(path).log_id if is_address(path) else engine_of(path)[1].log_id


def disk_of(path: str) -> Any:
    """Return the disk for reading segment indexes."""
    return cold_client(path).disk if is_address(path) else RealDisk()


def client_of(path: str) -> Client:
    """Return the client of the engine that serves this data directory; raise EngineNotRunning."""
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
    """Close all clients. The next use connects again. For programs that run longer than their engines."""
    with _lock:
        held = list(_clients.values())
        _clients.clear()
    for client in held:
        client.close()
