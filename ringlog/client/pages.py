"""What reading gives: records, tombstones, cursors and the pages that carry them.

A page keeps the frames it was read from and makes `Record` objects when they are asked for. Whoever
wants speed takes the columns instead: `page.bytes()` and `page.views`, or the tailer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import Enum
from itertools import repeat
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from ringlog.errors import InvalidRequest, UsageError
from ringlog.frame.layout import Column
from ringlog.frame.view import FrameView
from ringlog.limits import NODE_BYTES_MAX, SEQ_MAX

_EPOCH_TIME = datetime(1970, 1, 1, tzinfo=UTC)
_NO_HEADERS: Mapping[str, bytes] = MappingProxyType({})


class Record(msgspec.Struct, frozen=True, gc=False):
    """One record. Times are microseconds since the Unix epoch; a field the record lacks is None."""

    seq: int
    ts: int
    """When it was committed."""
    data: bytes
    key: bytes | None = None
    tag: str | None = None
    node: str | None = None
    meta_json: bytes | None = None
    headers: Mapping[str, bytes] = _NO_HEADERS
    event_ts: int | None = None
    expires_at: int | None = None
    not_before: int | None = None
    priority: int = 0

    @property
    def meta(self) -> dict[str, Any]:
        """The metadata, parsed each time it is asked for; empty when there is none."""
        return msgspec.json.decode(self.meta_json) if self.meta_json else {}

    def json(self) -> Any:
        """The payload as JSON; raises msgspec.DecodeError when it is not."""
        return msgspec.json.decode(self.data)

    def text(self) -> str:
        """The payload as UTF-8."""
        return self.data.decode()

    @property
    def time(self) -> datetime:
        """When it was committed, in UTC."""
        return _EPOCH_TIME + timedelta(microseconds=self.ts)


@dataclass(frozen=True, slots=True)
class Tombstone:
    """Positions `gap_from`..`gap_to`, both included, were lost without anybody asking for it.

    `reason` is cap, ttl, mixed, source_trim, restart_loss; or recreated, which means: the topic is a new
    one, forget what was derived from the old and read on from its beginning.
    """

    topic: str
    gap_from: int
    gap_to: int
    reason: str
    earliest_seq: int
    head_seq: int

    @property
    def missed_estimate(self) -> int:
        """Upper bound of the records missed."""
        return self.gap_to - self.gap_from + 1


class Cursor(NamedTuple):
    """The last position a reader has dealt with, and the life of the topic it belongs to (0 = any).

    Keep it to go on later: `Cursor.parse(str(cursor))`.
    """

    epoch: int
    seq: int

    def __str__(self) -> str:
        return f"{self.epoch}:{self.seq}"

    @classmethod
    def parse(cls, text: str) -> Cursor:
        """Inverse of str(); raises UsageError."""
        epoch, colon, seq = text.partition(":")
        if not colon or not epoch.isdecimal() or not seq.isdecimal():
            raise UsageError("not a cursor", found=text[:64], form="epoch:seq")
        return cls(int(epoch), int(seq))


class Position(Enum):
    """Places to start at that need no number."""

    EARLIEST = "earliest"
    """The first record that is still there."""
    LATEST = "latest"
    """Behind the last record: only what comes from now on."""


EARLIEST, LATEST = Position.EARLIEST, Position.LATEST
END = LATEST
Start: TypeAlias = "Position | Cursor | int | datetime"
"""Where to start: a Position, a stored Cursor, the seq to start after, or the time from which on."""
TagFilter: TypeAlias = "str | Sequence[str]"
"""A tag, a prefix ending in `*`, or the long forms ["tag", "Eq", value] and ["tag", "Glob", "prefix*"]."""


def check_after(seq: object) -> int:
    """Return a position to start after; raises UsageError for what cannot be one."""
    if not isinstance(seq, int) or isinstance(seq, bool) or not 0 <= seq <= SEQ_MAX:
        raise UsageError("a position is a whole number from 0", found=seq, max=SEQ_MAX)
    return seq


class Filters(NamedTuple):
    """What to leave out: records of these nodes, and records whose tag does not match."""

    nodes: frozenset[bytes] = frozenset()
    tag: Callable[[bytes], bool] | None = None

    def __bool__(self) -> bool:
        return bool(self.nodes) or self.tag is not None

    def rows(self, view: FrameView) -> NDArray[np.int64] | None:
        """Indexes of the records of `view` that pass, or None when all do."""
        keep = np.ones(len(view), dtype=bool)
        nodes = view.bytes_column(Column.NODE) if self.nodes else None
        if nodes is not None:
            keep &= np.fromiter([node not in self.nodes for node in nodes.to_list()], bool, len(view))
        if self.tag is not None:
            tags = view.bytes_column(Column.TAG)
            if tags is None:
                return np.empty(0, dtype=np.int64)
            keep &= np.fromiter(map(self.tag, tags.to_list()), bool, len(view))
        return None if keep.all() else np.flatnonzero(keep)


def node_filter(node: str | Sequence[str] | None) -> frozenset[bytes]:
    """Read a node filter (NF-2, NF-8); raises InvalidRequest for an id that is too long."""
    if not node:
        return frozenset()
    ids = frozenset(one.encode() for one in ([node] if isinstance(node, str) else node))
    longest = max(map(len, ids))
    if longest > NODE_BYTES_MAX:
        raise InvalidRequest("a node id is too long", bytes=longest, max=NODE_BYTES_MAX)
    return ids - {b""}


def tag_filter(wanted: TagFilter | None) -> Callable[[bytes], bool] | None:
    """Read a tag filter (DL-2..DL-4, DR-24); untagged records never match. Raises InvalidRequest."""
    if wanted is None:
        return None
    if isinstance(wanted, str):
        wanted = ("tag", "Glob" if wanted.endswith("*") else "Eq", wanted)
    match list(wanted):
        case ["tag", "Eq", str(value)]:
            exact = value.encode()
            return lambda tag: tag == exact and tag != b""
        case ["tag", "Glob", str(pattern)] if pattern.endswith("*"):
            prefix = pattern[:-1].encode()
            return lambda tag: tag.startswith(prefix) and tag != b""
    raise InvalidRequest("not a tag filter", found=repr(wanted)[:128], forms="a tag, or a prefix ending in *")


class Piece(NamedTuple):
    """Records of one frame on a page: all of `view`, or those at `rows`."""

    view: FrameView
    rows: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.view) if self.rows is None else len(self.rows)

    def cut(self, count: int) -> Piece:
        """The first `count` records."""
        if self.rows is None:
            return Piece(self.view.slice(0, count))
        return Piece(self.view, self.rows[:count])

    def sizes(self) -> NDArray[np.int64]:
        """(n,) accounted bytes of each record: payload and metadata (R-10)."""
        total = np.diff(self.view.payloads.offsets).astype(np.int64)
        meta = self.view.bytes_column(Column.META)
        if meta is not None:
            total += np.diff(meta.offsets)
        return total if self.rows is None else total[self.rows]

    def seq_at(self, index: int) -> int:
        """Number of record `index` of the piece."""
        return self.view.first_seq + (index if self.rows is None else int(self.rows[index]))

    def payloads(self) -> list[bytes]:
        """The payloads, copied out."""
        values = self.view.to_list()
        return values if self.rows is None else [values[row] for row in self.rows.tolist()]

    def records(self) -> list[Record]:
        """The records as objects."""
        view = self.view
        if view.columns == 1 << Column.PAYLOAD:
            seqs: Any = range(view.first_seq, view.last_seq + 1)
            made = list(map(Record, seqs, repeat(view.commit_ts), view.to_list()))
        else:
            made = _whole_records(view)
        return made if self.rows is None else [made[row] for row in self.rows.tolist()]


def _whole_records(view: FrameView) -> list[Record]:
    columns = view.records()
    headers = repeat(_NO_HEADERS) if columns.headers is None else map(dict, columns.headers)
    optional = (columns.event_ts, columns.expires_at, columns.not_before)
    return list(
        map(
            Record,
            columns.seqs,
            repeat(view.commit_ts),
            columns.payloads,
            columns.keys or repeat(None),
            columns.tags or repeat(None),
            columns.nodes or repeat(None),
            columns.metas or repeat(None),
            headers,
            *(values or repeat(None) for values in optional),
            columns.priorities or repeat(0),
        )
    )


class Page:
    """One read: at most one tombstone, which comes before the records, and where to go on.

    Keep reading while `caught_up` is false, even after a page without records (DR-14).
    """

    __slots__ = (
        "_records", "caught_up", "cursor", "earliest_seq", "epoch", "head_seq", "pieces", "tombstone",
        "topic",
    )  # fmt: skip

    def __init__(
        self, topic: str, pieces: Sequence[Piece], cursor: Cursor, *, tombstone: Tombstone | None,
        head_seq: int, earliest_seq: int,
    ) -> None:  # fmt: skip
        self.topic = topic
        self.pieces = tuple(pieces)
        self.cursor = cursor
        """Everything up to here was looked at; read on from it."""
        self.tombstone = tombstone
        self.head_seq = head_seq
        self.earliest_seq = earliest_seq
        self.epoch = cursor.epoch
        self.caught_up = cursor.seq == head_seq
        self._records: list[Record] | None = None

    @property
    def records(self) -> list[Record]:
        """The records as objects, made once."""
        if self._records is None:
            self._records = [record for piece in self.pieces for record in piece.records()]
        return self._records

    def bytes(self) -> list[bytes]:
        """The payloads alone: several times faster than `records`."""
        return [payload for piece in self.pieces for payload in piece.payloads()]

    @property
    def lag(self) -> int:
        """Positions between the cursor and the head."""
        return self.head_seq - self.cursor.seq

    def __len__(self) -> int:
        return sum(map(len, self.pieces))

    def __iter__(self) -> Iterator[Record]:
        return iter(self.records)

    def __repr__(self) -> str:
        return (
            f"<Page {self.topic} records={len(self)} cursor={self.cursor} head_seq={self.head_seq} "
            f"tombstone={self.tombstone and self.tombstone.reason}>"
        )
