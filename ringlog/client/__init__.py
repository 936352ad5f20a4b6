"""Synchronous client: connect, append, produce and read. All public names are here; each is imported at first
use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

from ringlog.compilation import import_in_thread

if TYPE_CHECKING:
    from ringlog.client.client import Client
    from ringlog.client.group import Group
    from ringlog.client.job import Job
    from ringlog.client.leases.group_facts import GroupMember, GroupStats, PendingEntry
    from ringlog.client.leases.job_facts import backoff_ms
    from ringlog.client.producer import Producer
    from ringlog.client.queue import Queue
    from ringlog.client.read.pages import EARLIEST, LATEST, STORED, Cursor, Page, Record, Start, Tombstone
    from ringlog.client.reader import Reader
    from ringlog.client.requests.results import (
        Appended,
        AppendedEach,
        AppendedOnce,
        ClientEvent,
        ClientHealth,
        ClientState,
        CloseReport,
        FlushReport,
        PendingJob,
        ProducerStats,
        QueueStats,
        Settled,
    )
    from ringlog.client.requests.router_requests import RouterDescription
    from ringlog.client.requests.topic_requests import (
        Deletion,
        TopicDescription,
        TopicRemoval,
        TopicSummary,
    )
    from ringlog.client.requests.topic_settings import TopicSettings
    from ringlog.client.routers import Routers
    from ringlog.client.tailer import Tailer
    from ringlog.client.ticket import Ticket
    from ringlog.client.topics import Topics
    from ringlog.client.watch import Watch
    from ringlog.client.watches.events import CaughtUp, Lagged, TopicDeleted, WatchEvent
    from ringlog.client.write.fields import NewRecord, Payload, RecordFields
    from ringlog.payload import JSON, RAW, TEXT, PayloadCodec, msgspec_codec

_NAMES = {
    "client.client": "Client",
    "client.group": "Group",
    "client.job": "Job",
    "client.leases.group_facts": "GroupMember GroupStats PendingEntry",
    "client.leases.job_facts": "backoff_ms",
    "client.producer": "Producer",
    "client.queue": "Queue",
    "client.read.pages": "EARLIEST LATEST STORED Cursor Page Record Start Tombstone",
    "client.reader": "Reader",
    "client.requests.results": "Appended AppendedEach AppendedOnce ClientEvent ClientHealth ClientState "
    "CloseReport FlushReport PendingJob ProducerStats QueueStats Settled",
    "client.requests.router_requests": "RouterDescription",
    "client.requests.topic_requests": "Deletion TopicDescription TopicRemoval TopicSummary",
    "client.requests.topic_settings": "TopicSettings",
    "client.routers": "Routers",
    "client.tailer": "Tailer",
    "client.ticket": "Ticket",
    "client.topics": "Topics",
    "client.watch": "Watch",
    "client.watches.events": "CaughtUp Lagged TopicDeleted WatchEvent",
    "client.write.fields": "NewRecord Payload RecordFields",
    "payload": "JSON RAW TEXT PayloadCodec msgspec_codec",
}
"""Public names by the module that defines them: the runtime form of the imports above."""
_HOMES = {name: f"ringlog.{module}" for module, names in _NAMES.items() for name in names.split()}

__all__ = [
    "EARLIEST", "JSON", "LATEST", "RAW", "STORED", "TEXT",
    "Appended", "AppendedEach", "AppendedOnce", "CaughtUp", "Client", "ClientEvent", "ClientHealth",
    "ClientState", "CloseReport", "Cursor", "Deletion", "FlushReport", "Group", "GroupMember", "GroupStats",
    "Job", "Lagged", "NewRecord", "Page", "Payload", "PayloadCodec", "PendingEntry", "PendingJob", "Producer",
    "ProducerStats", "Queue", "QueueStats", "Reader", "Record", "RecordFields", "RouterDescription",
    "Routers", "Settled", "Start", "Tailer", "Ticket", "Tombstone", "TopicDeleted", "TopicDescription",
    "TopicRemoval", "TopicSettings", "TopicSummary", "Topics", "Watch", "WatchEvent", "backoff_ms", "connect",
    "msgspec_codec",
]  # fmt: skip


def connect(
    url: str | None = None,
    *,
    client_id: str | None = None,
    key: str | None = None,
    timeout_ms: int | None = None,
    wait: float | None = None,
    reconnect: bool = True,
    transport: Literal["auto", "ring", "ipc", "tcp"] = "auto",
) -> Client:
    """Connect to an engine.

    Args:
        url: `ringlog:///run/dir` on this host, or `ringlog://host:port?server_key=…`. Default: RINGLOG_URL,
            else ./ringlog-data/run.
        client_id: Name of this client in the engine's logs and leases. Default: a random name.
        key: Secret key of a TCP connection. Default: the content of the file RINGLOG_KEY_FILE, or
            RINGLOG_KEY.
        timeout_ms: Timeout of every request and ticket, in milliseconds. Default: RINGLOG_TIMEOUT_MS, or
            10,000.
        wait: Seconds to wait until the engine answers. Default: connect at the first call.
        reconnect: False closes the client when its engine goes away. Waiting calls then raise NotConnected.
        transport: Connection to the engine. `auto` uses shared-memory rings on the engine's host.

    Returns:
        The client: thread-safe, and a context manager.

    Raises:
        UsageError: An option is invalid.
        NotConnected: The engine did not answer within `wait` seconds.

    Example:
        with ringlog.connect() as log:
            log.append("orders", b"...")
    """
    import_in_thread("ringlog.client.client")
    from ringlog.client.client import open_client

    return open_client(
        url, client_id=client_id, key=key, timeout_ms=timeout_ms, wait=wait, reconnect=reconnect,
        transport=transport,
    )  # fmt: skip


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'ringlog.client' has no attribute {name!r}")
    import_in_thread(home)
    value = globals()[name] = getattr(import_module(home), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
