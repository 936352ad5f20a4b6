"""LockedConnection: a thread-safe view of a session for readers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ringlog.board.topics import TopicFacts
from ringlog.client.connection.session import Session
from ringlog.client.connection.shell import ThreadedShell
from ringlog.client.read.pages import Cursor
from ringlog.client.watches.topic_keep_alive import KeepAliveHandle
from ringlog.envelope.messages import ColdRead, Located, Read, ReadReply, SeekTime, SeekTimeReply, TopicInfo
from ringlog.link.futures import Pending
from ringlog.link.local_links import LocalLinks
from ringlog.link.peer_request import PeerReply
from ringlog.link.protocol import ShardWatermarks, Transport
from ringlog.storage.log_map import LogMap

T = TypeVar("T")


class LockedConnection:
    """Implements read_connection.Connection. Each call uses the session with the client's lock held."""

    def __init__(self, shell: ThreadedShell) -> None:
        self._shell = shell

    @property
    def transport(self) -> Transport:
        """Transport to the engine."""
        return self._shell.session.transport

    @property
    def is_transport_known(self) -> bool:
        """False until the first connection to an engine: `transport` may still change."""
        return self._shell.session.is_transport_known

    @property
    def data_dir(self) -> str:
        """Data directory of the engine."""
        return self._shell.session.data_dir

    @property
    def shm_dir(self) -> str:
        """Shared-memory directory of the engine."""
        return self._shell.session.shm_dir

    @property
    def cold_dir(self) -> str:
        """Directory of cold segments on this host, or empty."""
        return self._shell.session.cold_dir

    @property
    def log_map(self) -> LogMap:
        """Cache of the positions of topics in the log."""
        return self._shell.session.log_map

    @property
    def generation(self) -> int:
        """Number that grows at every restart of the engine."""
        return self._shell.session.generation

    def resolve(self, topic: str) -> Pending[TopicInfo]:
        """Return the identity and settings of a topic."""
        return self._begin(lambda session: session.resolve(topic))

    def dead_letter_targets(self, topic: str) -> Pending[tuple[str, ...]]:
        """Return the dead-letter topics of a topic."""
        return self._begin(lambda session: session.dead_letter_targets(topic))

    def locate(self, topic: str, after: int, epoch: int = 0) -> Pending[Located]:
        """Query the location of the records after `after`."""
        return self._begin(lambda session: session.locate(topic, after, epoch))

    def latest(self, topic: str) -> Pending[Cursor]:
        """Return the cursor of the topic's last record."""
        return self._begin(lambda session: session.latest(topic))

    def keep_topic_alive(self, topic: str, epoch: int = 0) -> KeepAliveHandle:
        """Mark a topic as in use until the returned handle ends."""
        with self._shell.checked_lock, self._shell.guarded_session as session:
            return session.keep_topic_alive(topic, epoch)

    def facts(self, info: TopicInfo | Located) -> TopicFacts | None:
        """Read the topic's slot on the board."""
        with self._shell.lock:
            return self._shell.session.facts(info)

    def topic_sequence(self, info: TopicInfo | Located) -> int:
        """Return the change number of the topic's slot."""
        links = self._shell.session.links
        # Called for each delivery, so mapped memory is read without the lock.
        found = links.board.peek_sequence(info.shard, info.slot) if isinstance(links, LocalLinks) else -1
        if found >= 0:
            return found
        with self._shell.lock:
            return self._shell.session.topic_sequence(info)

    def sequence_word(self, info: TopicInfo | Located) -> tuple[memoryview, int] | None:
        """Return the location of `topic_sequence` in shared memory."""
        with self._shell.lock:
            return self._shell.session.sequence_word(info)

    def marks(self, shard: int) -> ShardWatermarks:
        """Read the shard's published marks."""
        with self._shell.lock:
            return self._shell.session.marks(shard)

    def published_since(self, shard: int, seen: ShardWatermarks, timeout_s: float) -> Pending[bool]:
        """Wait for a publication of the shard."""
        return self._begin(lambda session: session.published_since(shard, seen, timeout_s))

    def cold_read(self, request: ColdRead) -> Pending[memoryview]:
        """Have bytes of a cold segment read."""
        return self._begin(lambda session: session.cold_read(request))

    def engine_limits(self) -> Pending[Mapping[str, int]]:
        """Query the engine's limits by name."""
        return self._begin(lambda session: session.engine_limits())

    def catch_up(self, topic: str, topic_id: int) -> Pending[None]:
        """Have routers forward all records to a topic."""
        return self._begin(lambda session: session.catch_up(topic, topic_id))

    def seek_remote(self, request: SeekTime) -> Pending[SeekTimeReply]:
        """Query the gateway for the position of the records of a time."""
        return self._begin(lambda session: session.seek_remote(request))

    def read_remote(self, request: Read) -> Pending[tuple[ReadReply, memoryview]]:
        """Send a Read to the gateway."""
        return self._begin(lambda session: session.read_remote(request))

    def request_jobs(self, message: Any, *, extra_ms: int = 0) -> Pending[PeerReply]:
        """Send a request about jobs of a topic."""
        return self._shell.request_jobs(message, extra_ms)

    def _begin(self, ask: Callable[[Session], Pending[T]]) -> Pending[T]:
        self._shell.require_open()
        with self._shell.lock:
            try:
                return ask(self._shell.session)
            except BaseException as e:
                self._shell.mark_interrupted(e)
                raise
