"""Requests of clients by socket or call ring, and who handles each kind of them. Pure.

Changes are staged into the commit batch like frames. Their replies wait until the batch is committed. All
other requests are answered from memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ringlog import __version__
from ringlog.actors.wal_shard.commit.admission import Admission
from ringlog.actors.wal_shard.commit.commit_batch import CommitBatch
from ringlog.actors.wal_shard.commit.refusal_details import is_in_doubt
from ringlog.actors.wal_shard.leases.shard_leases import ShardLeases
from ringlog.actors.wal_shard.recovery.log_file_table import LogFileTable
from ringlog.actors.wal_shard.requests.append_requests import AppendRequests
from ringlog.actors.wal_shard.requests.read_only_mode import READ_ONLY_REQUESTS, ReadOnlyMode
from ringlog.actors.wal_shard.requests.record_locations import RecordLocations
from ringlog.actors.wal_shard.requests.topic_requests import TopicRequests
from ringlog.actors.wal_shard.retention.checkpoint import HandlerReply, ShardCheckpoint
from ringlog.actors.wal_shard.retention.idle_topic_expiry import IdleTopicExpiry
from ringlog.actors.wal_shard.retention.removal import Removals
from ringlog.actors.wal_shard.retention.volatile_files import VolatileFileTable
from ringlog.actors.wal_shard.routing import ShardRouters
from ringlog.actors.wal_shard.shard_state import ShardIdentity
from ringlog.contract import ControlReceived, Reply
from ringlog.envelope import messages as m
from ringlog.envelope.refusal import error_reply
from ringlog.envelope.wire import PROTOCOL
from ringlog.errors import InvalidRequest, Refused
from ringlog.leases.holders import ProcessId
from ringlog.limits import REQUEST_BYTES_MAX
from ringlog.topic.directory import TopicDirectory
from ringlog.topic.state import ShardTopic

MUTATING_REQUESTS = (
    m.TopicPut, m.TopicDelete, m.Append, m.RecordsDelete, m.ListLiveRecords, m.CheckpointRows, m.RouterPut,
    m.RouterDrop, m.Route,
)  # fmt: skip
"""Requests that may write to the log. Lease requests are not listed here."""

Handler = Callable[[Any, ControlReceived, CommitBatch, int], HandlerReply | None]


class Requests:
    """Answers requests from the topic directory, and stages changes into the commit batch."""

    def __init__(
        self, identity: ShardIdentity, directory: TopicDirectory, admission: Admission,
        log_files: LogFileTable, checkpoint: ShardCheckpoint, ephemerals: VolatileFileTable,
        publish_topic_count: Callable[[int], int],
    ) -> None:  # fmt: skip
        """Set up the handlers.

        `publish_topic_count` publishes the number of topics of this shard, and returns that of all other
        shards.
        """
        self._me = identity
        self._directory = directory
        self._admission = admission
        self.lease_clock_us = 0
        """The clock of leases and waits, in microseconds.
        It advances with the monotonic clock, so steps of the wall clock do not affect it."""
        self.read_only: ReadOnlyMode | None = None
        self.is_overloaded = False
        """True if the governor refuses new records and the queue of requests is full."""
        self.locations: RecordLocations = RecordLocations(
            identity.shard, directory, log_files, checkpoint.segments
        )
        self.removals: Removals = Removals(
            identity.incarnation, directory, self.locations.all_extents, ephemerals.files_of
        )
        self.routing: ShardRouters = ShardRouters(directory, admission, self._invalidate_readers)
        self.leases: ShardLeases = ShardLeases(identity.incarnation, directory, self.removals)
        self.idle_topic_expiry: IdleTopicExpiry = IdleTopicExpiry(directory, self.leases)
        self.topics: TopicRequests = TopicRequests(
            identity, directory, self.removals, self.routing, self.leases, self.idle_topic_expiry,
            publish_topic_count,
        )  # fmt: skip
        self.appends: AppendRequests = AppendRequests(directory, admission, self.topics)
        self._handlers: dict[type[m.Message], Handler] = {
            m.Hello: self._hello,
            m.RecordsDelete: self.removals.delete,
            m.Locate: self.locations.locate,
            **self.topics.handlers,
            **self.appends.handlers,
            **checkpoint.handlers,
            **self.routing.handlers,
            **self.leases.handlers,
        }

        self._timed = self.leases.handlers.keys()
        """Lease requests. Their handlers get `lease_clock_us` as the current time."""

    @property
    def kinds(self) -> tuple[type[m.Message], ...]:
        """Request types that a shard accepts."""
        return tuple(self._handlers)

    def begin_read_only(self, read_only: ReadOnlyMode) -> None:
        """Serve only reads from now on."""
        self.read_only = self.appends.read_only = read_only
        self.locations.is_behind = True

    def process_ids(self) -> set[ProcessId]:
        """Return the known processes that hold leases."""
        return {*self.leases.registry.process_ids()}

    def may_log(self, message: m.Message) -> bool:
        """Return True if this request may write to the log.

        A ProducerState request does so if it claims a name.
        """
        if isinstance(message, m.ProducerState):
            return message.owner != 0
        return isinstance(message, MUTATING_REQUESTS) or self.leases.registry.may_log(message)

    def handle(
        self, event: ControlReceived, batch: CommitBatch, now_us: int, *, can_log: bool = True
    ) -> Reply | None:
        """Handle one request. Return the reply, or None if it follows later.

        With `can_log` False, changes are refused, except for retries of appends that are in the log already.
        """
        handler = self._handlers.get(type(event.message))
        try:
            if handler is None:
                raise InvalidRequest(
                    "a shard does not handle this kind of request", kind=type(event.message).__name__
                )
            answer: HandlerReply | None
            if self._directory.halted:
                self._require_served(event)
            is_answered = isinstance(event.message, (*READ_ONLY_REQUESTS, m.Append)) and not (
                isinstance(event.message, m.ProducerState) and event.message.owner
            )
            if self.read_only is not None and not is_answered:
                raise self.read_only.refusal()
            if not can_log and self.may_log(event.message):
                answer = self.appends.answer_repeat(event, batch, now_us)
            elif self.is_overloaded and isinstance(event.message, m.Append):
                answer = self.appends.append_pressed(event.message, event, batch, now_us)
            else:
                is_timed = type(event.message) in self._timed
                answer = handler(event.message, event, batch, self.lease_clock_us if is_timed else now_us)
        except Refused as e:
            self.removals.cancel_delete()
            self.leases.deletes.cancel_pending()
            answer = error_reply(e)
        else:
            if self.idle_topic_expiry:
                self.idle_topic_expiry.record_use(event.message, now_us)
        if answer is None:
            return None
        message, attachment = answer if isinstance(answer, tuple) else (answer, None)
        return Reply(event.client, event.corr, message, attachment)

    def _require_served(self, event: ControlReceived) -> None:
        """Raise TopicHalted for a request to a halted topic. TopicState and TopicResolve are allowed."""
        message: Any = event.message
        if isinstance(message, m.TopicState | m.TopicResolve):
            return
        halt = None
        if isinstance(message, m.RouterPut):
            halt = self._directory.halted.get(message.facts.dest_id)
        elif isinstance(name := getattr(message, "topic", None), str):
            halt = self._directory.halt_of(name)
        if halt is None:
            return
        is_unknown = isinstance(message, m.Append) and any(
            is_in_doubt(halt.topic, words) for words in self.appends.frames_of(message, event).words
        )
        raise halt.error("unknown" if is_unknown else "not_applied")

    def _invalidate_readers(self, topic: ShardTopic, batch: CommitBatch) -> None:
        """Increment the topic's version, so that its readers query the shard again."""
        self.removals.bump_version(topic)
        batch.dirty_topics[topic.topic_id] = topic
        batch.has_removals = True

    def _hello(self, message: m.Hello, event: ControlReceived, batch: CommitBatch, now_us: int) -> m.Message:
        if message.protocol != PROTOCOL:
            raise InvalidRequest("unknown protocol version", version=message.protocol, known=PROTOCOL)
        me = self._me
        limits = {
            "record_bytes": self._admission.limits.record_bytes,
            "batch_records": self._admission.limits.batch_records,
            "request_bytes": REQUEST_BYTES_MAX,
            "topics": me.topics_max,
        }
        return m.Welcome(PROTOCOL, __version__, me.engine_id, me.shards, me.shard, me.incarnation, limits)
