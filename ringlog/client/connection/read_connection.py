"""Interface that readers need of a client's connection.

`Client` and `aio.Client` have a Connection as `client.connection`. Reader, Tailer and `read` use only this
interface. Every call that must wait returns a Pending. Operations are written as `Steps`
(ringlog.link.futures) that yield Pendings, and the client runs them:

    def read_page(connection: Connection, topic: str, ...) -> Steps[Page]:
        located = yield connection.locate(topic, after, epoch)
        ...
        is_news = yield connection.published_since(shard, seen, timeout_s)

    page = client.run(read_page(client.connection, ...))           # synchronous client
    page = await client.run(read_page(client.connection, ...))     # asyncio client

Between two yields an operation may read local files directly. It must not sleep.
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
    """Connection of one client, as readers use it. All methods return at once and never block."""

    @property
    def transport(self) -> Transport:
        """Transport to the engine. `ring`: readers open files; `ipc` and `tcp`: `read_remote` sends reads to
        the gateway."""
        ...

    @property
    def is_transport_known(self) -> bool:
        """False until the first connection to an engine: `transport` may still change."""
        ...

    @property
    def data_dir(self) -> str:
        """Data directory of the engine. Raises NotConnected before the first `locate` on this transport."""
        ...

    @property
    def shm_dir(self) -> str:
        """Shared-memory directory of the engine. It changes with every start of the engine."""
        ...

    @property
    def cold_dir(self) -> str:
        """Directory of cold segments, if it is on this host; otherwise empty: see `cold_read`."""
        ...

    @property
    def log_map(self) -> LogMap:
        """Cache of the positions of topics in the log, shared by the client's readers."""
        ...

    @property
    def generation(self) -> int:
        """Number that grows at every restart of the engine. Readers then locate again and reopen their
        files."""
        ...

    def resolve(self, topic: str) -> Pending[TopicInfo]:
        """Return the identity and settings of a topic, from the cache if possible. Fails with
        TopicNotFound."""
        ...

    def locate(self, topic: str, after: int, epoch: int = 0) -> Pending[Located]:
        """Query the topic's shard for the location of the records after `after` (ring transport)."""
        ...

    def latest(self, topic: str) -> Pending[Cursor]:
        """Return the cursor of the topic's last record. The shard answers; no record is read."""
        ...

    def keep_topic_alive(self, topic: str, epoch: int = 0) -> KeepAliveHandle:
        """Mark this life of a topic as in use until the returned handle ends.

        Never fails. Topics without `expire_unused_ms` cost no message and no timer.
        """
        ...

    def facts(self, info: TopicInfo | Located) -> TopicFacts | None:
        """Read the topic's slot on the board. None if the slot contains another life or cannot be read."""
        ...

    def topic_sequence(self, info: TopicInfo | Located) -> int:
        """Return the change number of the topic's slot. -1 while the slot changes or cannot be read."""
        ...

    def sequence_word(self, info: TopicInfo | Located) -> tuple[memoryview, int] | None:
        """Return the location of `topic_sequence` in shared memory: (words, index). None if it cannot be read
        there.

        Reading the word raises ValueError after the connection, or this run of the engine, has ended.
        """
        ...

    def marks(self, shard: int) -> ShardWatermarks:
        """Read the shard's published marks on the board."""
        ...

    def published_since(self, shard: int, seen: ShardWatermarks, timeout_s: float) -> Pending[bool]:
        """Wait until `marks(shard)` differs from `seen` (result True), or for `timeout_s` seconds (result
        False)."""
        ...

    def cold_read(self, request: ColdRead) -> Pending[memoryview]:
        """Have bytes of a cold segment read. Fails with NotReady, reason `cold_unavailable`."""
        ...

    def catch_up(self, topic: str, topic_id: int) -> Pending[None]:
        """Have routers forward to a topic all records that their sources contain.

        Never fails. If it is not possible within about one second, the reader reads the existing records.
        """
        ...

    def seek_remote(self, request: SeekTime) -> Pending[SeekTimeReply]:
        """Query the gateway for the position of the records of a time (ipc and tcp)."""
        ...

    def read_remote(self, request: Read) -> Pending[tuple[ReadReply, memoryview]]:
        """Send a Read to the gateway. Returns the reply and a buffer of whole frames (ipc and tcp).

        May take up to twice the request's `wait_ms` longer than other requests.
        """
        ...
