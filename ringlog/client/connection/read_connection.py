"""What reading needs of a client's connection, and nothing else.

`Client` and `aio.Client` hold a Connection as `client.connection`; Reader, Tailer and `read` are written
against it. Everything that has to wait is a Pending: logic is written as `Steps` (ringlog.link.futures),
yielding Pendings, and is run by the client it belongs to:

    def read_page(connection: Connection, topic: str, ...) -> Steps[Page]:
        located = yield connection.locate(topic, after, epoch)
        ...
        is_news = yield connection.published_since(shard, seen, timeout_s)

    page = client.run(read_page(client.connection, ...))           # synchronous client
    page = await client.run(read_page(client.connection, ...))     # asyncio client

Local file reads may be made directly between two yields; they must not sleep.
"""

from __future__ import annotations

from typing import Protocol

from ringlog.board.topics import TopicFacts
from ringlog.client.read.pages import Cursor
from ringlog.client.watches.topic_keep_alive import KeepAliveHandle
from ringlog.envelope.messages import ColdRead, Located, Read, ReadReply, SeekTime, SeekTimeReply, TopicInfo
from ringlog.link.futures import Pending
from ringlog.link.protocol import ShardWatermarks, Transport
from ringlog.storage.log_map import LogMap


class Connection(Protocol):
    """One client's connection, seen by readers. All methods return at once and never block."""

    @property
    def transport(self) -> Transport:
        """`ring`: files are read here; `ipc` and `tcp`: `read_remote` asks the gateway."""
        ...

    @property
    def is_transport_known(self) -> bool:
        """False while no engine was met and `transport` may turn out to be another one."""
        ...

    @property
    def data_dir(self) -> str:
        """The engine's data directory; raises NotConnected before the first `locate` on this transport."""
        ...

    @property
    def shm_dir(self) -> str:
        """The engine's shared-memory directory; a new one after every start of the engine."""
        ...

    @property
    def cold_dir(self) -> str:
        """Where cold segments lie, when that is a directory of this host; else empty: see `cold_read`."""
        ...

    @property
    def log_map(self) -> LogMap:
        """What this client's readers know of where topics lie in the log."""
        ...

    @property
    def generation(self) -> int:
        """Grows when the engine was restarted: locate again and open files anew."""
        ...

    def resolve(self, topic: str) -> Pending[TopicInfo]:
        """Who is this topic? Cached; fails with TopicNotFound."""
        ...

    def locate(self, topic: str, after: int, epoch: int = 0) -> Pending[Located]:
        """Ask the topic's shard where records after `after` lie (ring transport)."""
        ...

    def latest(self, topic: str) -> Pending[Cursor]:
        """The cursor behind the topic's last record: asked of its shard, so no record is read for it."""
        ...

    def keep_topic_alive(self, topic: str, epoch: int = 0) -> KeepAliveHandle:
        """Somebody follows this life of a topic, until he ends the Use: nobody is to take it for unused.

        Never fails; topics that are not removed when they are unused cost no message and no timer.
        """
        ...

    def facts(self, info: TopicInfo | Located) -> TopicFacts | None:
        """Read the topic's slot on the board now; None when it holds another life or cannot be read."""
        ...

    def topic_sequence(self, info: TopicInfo | Located) -> int:
        """Another number after each change of what `facts` gives; -1 while that changes or cannot be read."""
        ...

    def sequence_word(self, info: TopicInfo | Located) -> tuple[memoryview, int] | None:
        """Where `topic_sequence` lies in shared memory: (words, index); None when it cannot be read there.

        Reading it raises ValueError once the connection, or the engine's life, is over.
        """
        ...

    def marks(self, shard: int) -> ShardWatermarks:
        """Read the shard's published marks on the board now."""
        ...

    def published_since(self, shard: int, seen: ShardWatermarks, timeout_s: float) -> Pending[bool]:
        """Done with True once `marks(shard)` differs from `seen`, with False after the timeout."""
        ...

    def cold_read(self, request: ColdRead) -> Pending[memoryview]:
        """Have bytes of a cold segment read; fails with NotReady, reason cold_unavailable (TI-10)."""
        ...

    def catch_up(self, topic: str, topic_id: int) -> Pending[None]:
        """Have the routers that lead to a topic forward what their sources hold (RT-20). Never fails: who
        cannot have that reads what there is, after a second at most."""
        ...

    def seek_remote(self, request: SeekTime) -> Pending[SeekTimeReply]:
        """Ask the gateway where records of a time begin (ipc and tcp)."""
        ...

    def read_remote(self, request: Read) -> Pending[tuple[ReadReply, memoryview]]:
        """Send a Read to the gateway; the reply and the buffer of whole frames (ipc and tcp).

        Lasts up to the request's `wait_ms` longer than an ordinary request.
        """
        ...
