"""One client for each engine and process, shared by everything a Spark worker does there.

Workers are used for many tasks, so what is costly to open is kept; nothing of it is ever pickled (SK-15). A
client goes on by itself when its engine was restarted, and opens itself anew after a fork.
"""

from __future__ import annotations

import os
import threading

import ringlog
from ringlog.client.client import Client
from ringlog.errors import NotConnected
from ringlog.link.address import EngineInfo, read_engine
from ringlog.spark.errors import EngineNotRunning

CONNECT_S = 10.0
"""How long an engine that says it runs may take to answer."""
_clients: dict[str, Client] = {}
_lock = threading.Lock()


def engine_of(path: str) -> tuple[str, EngineInfo]:
    """(run directory, what the engine says of itself); `path` is the data directory or the run directory.

    Raises EngineNotRunning, UsageError for a run directory that cannot be read.
    """
    info = read_engine(path)
    if info is None:
        raise EngineNotRunning(
            "no engine runs on this data directory; start it with `ringlog serve --data-dir PATH`, or give "
            "the run directory as path if it was configured to lie elsewhere",
            path=path,
        )
    inner = os.path.join(path, "run")
    return (inner if read_engine(inner) is not None else path), info


def client_of(path: str) -> Client:
    """The client of the engine that serves this data directory; raises EngineNotRunning."""
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
