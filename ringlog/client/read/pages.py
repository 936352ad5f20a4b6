"""Results of reading: records, tombstones, cursors and pages.

A page keeps the frames from which it was read, and creates `Record` objects on demand. `page.bytes()`, the
batches of a page, and the tailer are faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeAlias, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from ringlog.errors import InvalidRequest, UsageError
from ringlog.frame.layout import Column
from ringlog.limits import NODE_BYTES_MAX
from ringlog.names import utf8
from ringlog.payload import RAW, PayloadCodec, T, V
from ringlog.tags import TagMatch, parse_match

if TYPE_CHECKING:
    from ringlog.client.read.record_batches import RecordBatch

_DIGITS_MAX = 20
_EPOCH_TIME = datetime(1970, 1, 1, tzinfo=UTC)
NO_HEADERS: Mapping[str, bytes] = MappingProxyType({})


class Record(msgspec.Struct, Generic[V], frozen=True, gc=False):
    """One record. Times are in microseconds since the Unix epoch. A field that the record lacks is None.

    `V` is the type of `value`: bytes, or what the reader's `payload` decodes.
    """

    seq: int
    ts: int
    """Commit time."""
    data: bytes | None
    """Payload; None for a null, which differs from an empty payload. The same holds for key, tag and node."""
    key: bytes | None = None
    tag: str | None = None
    node: str | None = None
    meta_json: bytes | None = None
    headers: Mapping[str, bytes] = NO_HEADERS
    event_ts: int | None = None
    expires_at: int | None = None
    not_before: int | None = None
    priority: int = 0

    def __reduce__(self) -> tuple[Any, ...]:
        values = [getattr(self, name) for name in self.__struct_fields__]
        values[self.__struct_fields__.index("headers")] = dict(self.headers)
        return type(self), tuple(values)

    @property
    def value(self) -> V:
        """Payload decoded by the `payload` codec of the reader, at each access; None for a null. Raises the
        errors of the codec."""
        return cast("V", self.data)

    @property
    def meta(self) -> dict[str, Any]:
        """Metadata, parsed at each access; empty if there is none."""
        return msgspec.json.decode(self.meta_json) if self.meta_json else {}

    def json(self) -> Any:
        """Return the payload decoded as JSON; None for a null. Raises msgspec.DecodeError if it is not
        JSON."""
        return None if self.data is None else msgspec.json.decode(self.data)

    def text(self) -> str | None:
        """Return the payload decoded as UTF-8; None for a null."""
        return None if self.data is None else self.data.decode()

    @property
    def time(self) -> datetime:
        """Commit time, in UTC."""
        return _EPOCH_TIME + timedelta(microseconds=self.ts)


class DecodedRecord(Record[V], frozen=True, gc=False):
    """A record of a reader with a codec."""

    codec: PayloadCodec[Any] = RAW

    @property
    def value(self) -> V:
        """Payload decoded by the codec; None for a null."""
        return cast("V", None if self.data is None else self.codec.decode(self.data))


def _decoded(record: Record, codec: PayloadCodec[Any]) -> Record:
    return DecodedRecord(
        record.seq, record.ts, record.data, record.key, record.tag, record.node, record.meta_json,
        record.headers,
        record.event_ts, record.expires_at, record.not_before, record.priority, codec,
    )  # fmt: skip


new_record: Callable[..., Record] = Record
"""`Record`, for `map`: it returns plain records."""


@dataclass(frozen=True, slots=True)
class Tombstone:
    """Report of lost records: the seqs `gap_from` to `gap_to`, both included, were lost without a request to
    delete them.

    `reason` is cap, ttl, mixed, source_trim, restart_loss or recreated. `recreated` means that the topic was
    created again: discard data derived from the old one, and read the new one from its beginning.
    """

    topic: str
    gap_from: int
    gap_to: int
    reason: str
    earliest_seq: int
    head_seq: int

    @property
    def missed_estimate(self) -> int:
        """Upper bound of the number of missed records."""
        return self.gap_to - self.gap_from + 1


class Cursor(NamedTuple):
    """Last seq that a reader has processed, with the epoch of the topic's life (0 = any).

    Store it to resume later: `Cursor.parse(str(cursor))`.
    """

    epoch: int
    seq: int

    def __str__(self) -> str:
        return f"{self.epoch}:{self.seq}"

    @classmethod
    def parse(cls, text: str) -> Cursor:
        """Parse the text of str(cursor). Raises UsageError."""
        if not isinstance(text, str):
            raise UsageError(f"a cursor's text must be a str, got {type(text).__name__}", form="epoch:seq")
        epoch, colon, seq = text.partition(":")
        is_number = epoch.isascii() and epoch.isdecimal() and seq.isascii() and seq.isdecimal()
        if not colon or not is_number or len(epoch) > _DIGITS_MAX or len(seq) > _DIGITS_MAX:
            raise UsageError(
                f"a cursor must have the form epoch:seq, got {text[:64]!a}", found=ascii(text[:64]),
                form="epoch:seq",
            )  # fmt: skip
        return cls(int(epoch), int(seq))


class Position(Enum):
    """Start positions without a seq."""

    EARLIEST = "earliest"
    """First existing record."""
    LATEST = "latest"
    """After the last record: only later records are read."""
    STORED = "stored"
    """Current position of a consumer group. A new group begins at the first record."""


EARLIEST, LATEST, STORED = Position.EARLIEST, Position.LATEST, Position.STORED
END = LATEST
Start: TypeAlias = "Position | Cursor | int | datetime"
"""Start position: a Position, the seq of the first record (inclusive), a stored Cursor (exclusive: the last
processed record), or the time of the first record."""
TagFilter: TypeAlias = "str | Sequence[str]"
"""A tag, a prefix that ends in `*`, or one of the long forms ["tag", "Eq", value], ["tag", "Glob", "prefix*"]
and ["tag", "Levels", pattern]. In a pattern, `/` separates levels, `+` matches any one level, and a last `#`
matches all following levels."""


class Filters(NamedTuple):
    """Records to omit: those of these nodes, and those whose tag does not match. Compared by value."""

    nodes: frozenset[bytes] = frozenset()
    tag: TagMatch | None = None

    def __bool__(self) -> bool:
        return bool(self.nodes) or self.tag is not None

    def rows(self, batch: RecordBatch) -> NDArray[np.int64] | None:
        """Return the indexes of the records that pass; None if all do."""
        keep = np.ones(len(batch), dtype=bool)
        nodes = batch.column(Column.NODE) if self.nodes else None
        if nodes is not None:
            keep &= np.fromiter([node not in self.nodes for node in nodes], bool, len(nodes))
        if self.tag is not None:
            tags = batch.column(Column.TAG)
            if tags is None:
                return np.empty(0, dtype=np.int64)
            keep &= np.fromiter(map(self.tag.test, tags), bool, len(tags))
        return None if keep.all() else np.flatnonzero(keep)


def node_filter(node: str | Sequence[str] | None) -> frozenset[bytes]:
    """Parse a node filter. Raises InvalidRequest for an id that is too long."""
    if not node:
        return frozenset()
    ids = frozenset(utf8(one, "node") for one in ([node] if isinstance(node, str) else node))
    longest = max(map(len, ids))
    if longest > NODE_BYTES_MAX:
        raise InvalidRequest(
            f"node must have at most {NODE_BYTES_MAX} bytes, got {longest}", bytes=longest, max=NODE_BYTES_MAX
        )
    return ids - {b""}


def tag_filter(wanted: TagFilter | None) -> TagMatch | None:
    """Parse a tag filter. Untagged records never match. Raises InvalidRequest."""
    if wanted is None:
        return None
    return parse_match(wanted, "tags")


class Page(Generic[V]):
    """Result of one read: at most one tombstone, which comes before the records, and the position to continue
    at.

    Continue reading while `caught_up` is false, even after a page without records.

    Example:
        page = client.read("orders")
        for record in page:
            process(record.data)
        following = client.read("orders", after=page.cursor)
    """

    __slots__ = (
        "_codec",
        "_records",
        "batches",
        "caught_up",
        "cursor",
        "earliest_seq",
        "epoch",
        "head_seq",
        "tombstone",
        "topic",
        "version",
    )  # fmt: skip

    def __init__(
        self, topic: str, pieces: Sequence[RecordBatch], cursor: Cursor, *, tombstone: Tombstone | None,
        head_seq: int, earliest_seq: int, version: int = 0, codec: PayloadCodec[Any] = RAW,
    ) -> None:  # fmt: skip
        self.topic: str = topic
        self.batches: tuple[RecordBatch, ...] = tuple(pieces)
        self.cursor: Cursor = cursor
        """Last examined position. Continue reading after it."""
        self.tombstone: Tombstone | None = tombstone
        self.head_seq: int = head_seq
        self.earliest_seq: int = earliest_seq
        self.epoch: int = cursor.epoch
        self.version: int = version
        """Version of the topic when the first records were read. It grows with every removal."""
        self.caught_up: bool = cursor.seq == head_seq
        self._codec = codec
        self._records: list[Record[V]] | None = None

    @property
    def records(self) -> list[Record[V]]:
        """Records as objects, created once."""
        if self._records is None:
            found = [record for batch in self.batches for record in batch.records()]
            if self._codec is not RAW:
                found = [_decoded(record, self._codec) for record in found]
            self._records = cast("list[Record[V]]", found)
        return self._records

    def with_payload(self, codec: PayloadCodec[T]) -> Page[T]:
        """Return the same page with another codec for the `value` of its records."""
        if codec is self._codec:
            return cast("Page[T]", self)
        return Page(
            self.topic, self.batches, self.cursor, tombstone=self.tombstone, head_seq=self.head_seq,
            earliest_seq=self.earliest_seq, version=self.version, codec=codec,
        )  # fmt: skip

    def bytes(self) -> list[bytes | None]:
        """Return only the payloads, None for a null. Several times faster than `records`."""
        return [payload for batch in self.batches for payload in batch.payloads()]

    @property
    def lag(self) -> int:
        """Number of seqs between the cursor and the head."""
        return self.head_seq - self.cursor.seq

    def __len__(self) -> int:
        return sum(map(len, self.batches))

    def __iter__(self) -> Iterator[Record[V]]:
        return iter(self.records)

    def __repr__(self) -> str:
        return (
            f"<Page {self.topic} records={len(self)} cursor={self.cursor} head_seq={self.head_seq} "
            f"tombstone={self.tombstone and self.tombstone.reason}>"
        )
