"""ringlog: a durable event log and job queue on one host.

    import ringlog

    with ringlog.connect() as log:
        log.append("orders", b"...")

All public names are attributes of this package. Each is imported at its first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ringlog.compilation import import_in_thread

__version__ = "0.1.0"

if TYPE_CHECKING:
    from ringlog import aio, client, errors, spark, testing
    from ringlog.client import (
        EARLIEST,
        JSON,
        LATEST,
        RAW,
        STORED,
        TEXT,
        Appended,
        AppendedEach,
        AppendedOnce,
        CaughtUp,
        Client,
        ClientEvent,
        ClientHealth,
        ClientState,
        CloseReport,
        Cursor,
        Deletion,
        FlushReport,
        Group,
        GroupMember,
        GroupStats,
        Job,
        Lagged,
        NewRecord,
        Page,
        Payload,
        PayloadCodec,
        PendingEntry,
        PendingJob,
        Producer,
        ProducerStats,
        Queue,
        QueueStats,
        Reader,
        Record,
        RecordFields,
        RouterDescription,
        Routers,
        Settled,
        Start,
        Tailer,
        Ticket,
        Tombstone,
        TopicDeleted,
        TopicDescription,
        TopicRemoval,
        Topics,
        TopicSettings,
        TopicSummary,
        Watch,
        WatchEvent,
        backoff_ms,
        connect,
        msgspec_codec,
    )

__all__ = [
    "EARLIEST", "JSON", "LATEST", "RAW", "STORED", "TEXT", "Appended", "AppendedEach", "AppendedOnce",
    "CaughtUp", "Client", "ClientEvent", "ClientHealth", "ClientState", "CloseReport", "Cursor",
    "Deletion", "FlushReport", "Group", "GroupMember", "GroupStats", "Job", "Lagged", "NewRecord", "Page",
    "Payload", "PayloadCodec", "PendingEntry", "PendingJob", "Producer", "ProducerStats", "Queue",
    "QueueStats", "Reader", "Record", "RecordFields", "RouterDescription", "Routers", "Settled", "Start",
    "Tailer", "Ticket", "Tombstone", "TopicDeleted", "TopicDescription", "TopicRemoval", "TopicSettings",
    "TopicSummary", "Topics", "Watch", "WatchEvent", "__version__", "aio", "backoff_ms", "client", "connect",
    "errors", "msgspec_codec", "spark", "testing",
]  # fmt: skip
_PACKAGES = {"aio", "client", "errors", "spark", "testing"}


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        import_in_thread(f"ringlog.{name}")
        return import_module(f"ringlog.{name}")
    if name not in __all__:
        raise AttributeError(f"module 'ringlog' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module("ringlog.client"), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
