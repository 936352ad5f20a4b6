"""LockedConnection: a session as readers see it, safe to use from many threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from ringlog.board.topics import TopicFacts
from ringlog.client.connection.session import Session
from ringlog.client.connection.shell import ThreadedShell
from ringlog.client.read.pages import Cursor
from ringlog.client.watches.topic_keep_alive import KeepAliveHandle
from ringlog.envelope.messages import ColdRead, Located, Read, ReadReply, SeekTime, SeekTimeReply, TopicInfo
from ringlog.link.futures import Pending
from ringlog.link.local_links import LocalLinks
from ringlog.link.peer import PeerReply
from ringlog.link.protocol import ShardWatermarks, Transport
from ringlog.storage.log_map import LogMap

T = TypeVar("T")


class LockedConnection:
    """Implements client.connection.Connection by asking the session with the client's lock held."""

    def __init__(self, shell: ThreadedShell) -> None:
        self._shell = shell

    @property
    def transport(self) -> Transport:
        """How the client talks to the engine."""
        return self._shell.session.transport

    @property
    def is_transport_known(self) -> bool:
        """False while no engine was met and `transport` may turn out to be another one."""
        return self._shell.session.is_transport_known

    @property
    def data_dir(self) -> str:
        """The engine's data directory."""
        return self._shell.session.data_dir

    @property
    def shm_dir(self) -> str:
        """The engine's shared-memory directory."""
        return self._shell.session.shm_dir

    @property
    def cold_dir(self) -> str:
        """Where cold segments lie, or nothing."""
        return self._shell.session.cold_dir

    @property
    def log_map(self) -> LogMap:
        """What this client's readers know of the log."""
        return self._shell.session.log_map

    @property
    def generation(self) -> int:
        """Grows when the engine was restarted."""
        return self._shell.session.generation

    def resolve(self, topic: str) -> Pending[TopicInfo]:
        """Who is this topic?"""
        return self._begin(lambda session: session.resolve(topic))

    def dead_letter_targets(self, topic: str) -> Pending[tuple[str, ...]]:
        """Where do the dead letters of a topic go?"""
        return self._begin(lambda session: session.dead_letter_targets(topic))

    def locate(self, topic: str, after: int, epoch: int = 0) -> Pending[Located]:
        """Where do records after `after` lie?"""
        return self._begin(lambda session: session.locate(topic, after, epoch))

    def latest(self, topic: str) -> Pending[Cursor]:
        """The cursor behind the topic's last record."""
        return self._begin(lambda session: session.latest(topic))

    def keep_topic_alive(self, topic: str, epoch: int = 0) -> KeepAliveHandle:
        """Somebody follows a topic; whoever serves the session says so."""
        with self._shell.checked_lock, self._shell.guarded_session as session:
            return session.keep_topic_alive(topic, epoch)

    def facts(self, info: TopicInfo | Located) -> TopicFacts | None:
        """Read the topic's slot on the board now."""
        with self._shell.lock:
            return self._shell.session.facts(info)

    def topic_sequence(self, info: TopicInfo | Located) -> int:
        """Another number after each change of the topic's slot."""
        links = self._shell.session.links
        # Asked for each delivery: what is mapped is looked at without the lock.
        found = links.peek_sequence(info.shard, info.slot) if isinstance(links, LocalLinks) else -1
        if found >= 0:
            return found
        with self._shell.lock:
            return self._shell.session.topic_sequence(info)

    def sequence_word(self, info: TopicInfo | Located) -> tuple[memoryview, int] | None:
        """Where `topic_sequence` lies."""
        with self._shell.lock:
            return self._shell.session.sequence_word(info)

    def marks(self, shard: int) -> ShardWatermarks:
        """Read the shard's published marks now."""
        with self._shell.lock:
            return self._shell.session.marks(shard)

    def published_since(self, shard: int, seen: ShardWatermarks, timeout_s: float) -> Pending[bool]:
        """Wait for a publication."""
        return self._begin(lambda session: session.published_since(shard, seen, timeout_s))

    def cold_read(self, request: ColdRead) -> Pending[memoryview]:
        """Have bytes of a cold segment read."""
        return self._begin(lambda session: session.cold_read(request))

    def catch_up(self, topic: str, topic_id: int) -> Pending[None]:
        """Have routers catch up."""
        return self._begin(lambda session: session.catch_up(topic, topic_id))

    def seek_remote(self, request: SeekTime) -> Pending[SeekTimeReply]:
        """Ask the gateway where records of a time begin."""
        return self._begin(lambda session: session.seek_remote(request))

    def read_remote(self, request: Read) -> Pending[tuple[ReadReply, memoryview]]:
        """Send a Read to the gateway."""
        return self._begin(lambda session: session.read_remote(request))

    def about_jobs(self, message: Any, *, extra_ms: int = 0) -> Pending[PeerReply]:
        """Send a request about jobs of a topic."""
        return self._shell.about_jobs(message, extra_ms)

    def _begin(self, ask: Callable[[Session], Pending[T]]) -> Pending[T]:
        self._shell.require_open()
        with self._shell.lock:
            try:
                return ask(self._shell.session)
            except BaseException as e:
                self._shell.mark_interrupted(e)
                raise
