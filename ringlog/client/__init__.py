"""The client: connect, append, produce, read. Everything public is named here."""

from __future__ import annotations

from ringlog.client.client import Client, connect
from ringlog.client.events import CaughtUp, Lagged, TopicDeleted, WatchEvent
from ringlog.client.fields import NewRecord, Payload, RecordFields
from ringlog.client.group_facts import GroupMember, GroupStats, PendingEntry
from ringlog.client.job_facts import backoff_ms
from ringlog.client.pages import EARLIEST, LATEST, STORED, Cursor, Page, Record, Start, Tombstone
from ringlog.client.producer import Producer
from ringlog.client.results import (
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
)  # fmt: skip
from ringlog.client.router_requests import RouterDescription
from ringlog.client.routers import Routers
from ringlog.client.ticket import Ticket
from ringlog.client.topic_requests import Deletion, TopicDescription, TopicRemoval, TopicSummary
from ringlog.client.topics import Topics
from ringlog.payload import JSON, RAW, TEXT, PayloadCodec, msgspec_codec

__all__ = [
    "EARLIEST", "JSON", "LATEST", "RAW", "STORED", "TEXT",
    "Appended", "AppendedEach", "AppendedOnce", "CaughtUp", "Client", "ClientEvent", "ClientHealth",
    "ClientState", "CloseReport", "Cursor", "Deletion", "FlushReport", "GroupMember", "GroupStats", "Lagged",
    "NewRecord", "Page", "Payload",
    "PayloadCodec", "PendingEntry", "PendingJob", "Producer", "ProducerStats", "QueueStats", "Record",
    "RecordFields",
    "RouterDescription", "Routers", "Settled", "Start", "Ticket", "Tombstone",
    "TopicDeleted", "TopicDescription", "TopicRemoval", "TopicSummary", "Topics", "WatchEvent", "backoff_ms",
    "connect", "msgspec_codec",
]  # fmt: skip
