"""Routed frames: copies of records by routers, stored once for all destinations. Pure.

docs/reference/format.md defines the format. The body is a prefix of PREFIX_WORDS words, one row of ROW_WORDS
words for each copy, and the columns of the records as in an append. A row has the header fields that differ
between copies: topic, seqs, stamp, class. The prefix has the fields that are equal. A copy therefore costs
one row. One frame, with one checksum and one seal, contains the copies and the cursors of their routers. It
is written completely or not at all (F1).

`resolve_copies` replaces such frames by equivalent appends without copying bytes. Every reader of the log
does that first, so that its other code only handles appends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from ringlog.errors import FrameInvalid, UsageError
from ringlog.frame import layout
from ringlog.frame.batch import U64, FrameBatch, RoutedCopies, is_of_type, malformed, seals
from ringlog.frame.layout import FrameType
from ringlog.limits import FRAME_BYTES_MAX, ROUTER_HOPS_MAX
from ringlog.types import Durability

PREFIX_WORDS = 5
ROW_WORDS = 7
P_ROWS, P_HEAD, P_TAIL, P_BODY_XXH3, P_COUNT = range(PREFIX_WORDS)
R_TOPIC, R_BASE_SEQ, R_COMMIT_TS, R_EPOCH, R_ROUTER, R_CURSOR, R_DURABILITY = range(ROW_WORDS)

_CLASS_CLEAR = 0xFFFFFFFFFFFFFFFF ^ (layout.DURABILITY_MASK << layout.FLAGS_SHIFT)
_hash = xxhash.xxh3_64_intdigest


class RoutedContent(NamedTuple):
    """Common header words of the copies in one routed frame, and the columns."""

    head: int
    tail: int
    """Without the durability class."""
    body_xxh3: int
    records: int
    columns: memoryview


class CopyRow(NamedTuple):
    """One copy: the frame's records in one destination topic."""

    topic_id: int
    base_seq: int
    commit_ts: int
    epoch: int
    router: int
    cursor: int
    durability: int


def routed_content_of(buffer: Any, batch: FrameBatch, row: int, *, hops: int) -> RoutedContent:
    """Return the content of a verified append, for copies whose records passed `hops` routers."""
    if not 0 <= hops <= ROUTER_HOPS_MAX:
        raise UsageError(f"hops must be in 0..{ROUTER_HOPS_MAX}, got {hops}", hops=hops, max=ROUTER_HOPS_MAX)
    words = [int(word) for word in batch.words[row]]
    start = int(batch.offsets[row])
    total = (words[layout.W_HEAD] & layout.LEN_MASK) + layout.LEN_FIELD_BYTES
    tail = words[layout.W_TAIL] & _CLASS_CLEAR & ~(layout.HOPS_MASK << layout.HOPS_SHIFT)
    return RoutedContent(
        words[layout.W_HEAD], tail | hops << layout.HOPS_SHIFT, words[layout.W_BODY_XXH3],
        words[layout.W_COUNT_EPOCH] & layout.LEN_MASK,
        memoryview(buffer).cast("B")[start + layout.HEADER_BYTES : start + total],
    )  # fmt: skip


def routed_bytes(rows: int, columns_bytes: int) -> int:
    """Return the size in bytes of a frame with this number of copies and of column bytes."""
    return layout.HEADER_BYTES + 8 * (PREFIX_WORDS + ROW_WORDS * rows) + columns_bytes


def routed_frame(content: RoutedContent, rows: Sequence[CopyRow]) -> bytearray:
    """Build the frame without a seal. Raise UsageError if it would be too large or has no copy."""
    total = routed_bytes(len(rows), len(content.columns))
    if not rows or total > FRAME_BYTES_MAX:
        raise UsageError(
            f"routed frame must have >= 1 copy and <= {FRAME_BYTES_MAX} bytes, got {len(rows)} and {total}",
            rows=len(rows),
            bytes=total,
            max=FRAME_BYTES_MAX,
        )
    frame = bytearray(total)
    words = np.frombuffer(frame, dtype="<u8")
    prefix = words[layout.HEADER_WORDS : layout.HEADER_WORDS + PREFIX_WORDS]
    prefix[:] = (len(rows), content.head, content.tail, content.body_xxh3, content.records)
    table_stop = layout.HEADER_WORDS + PREFIX_WORDS + ROW_WORDS * len(rows)
    words[layout.HEADER_WORDS + PREFIX_WORDS : table_stop] = np.array(rows, dtype=np.uint64).ravel()
    frame[8 * table_stop :] = content.columns
    words[layout.W_HEAD] = (
        (total - layout.LEN_FIELD_BYTES)
        | FrameType.ROUTED << layout.TYPE_SHIFT
        | layout.VERSION << layout.VERSION_SHIFT
    )
    words[layout.W_TAIL] = (total - layout.HEADER_BYTES) | Durability.FSYNC << layout.FLAGS_SHIFT
    words[layout.W_BODY_XXH3] = _hash(memoryview(frame)[layout.HEADER_BYTES :])
    return frame


def has_routed(batch: FrameBatch) -> bool:
    """Return whether the batch has a routed frame, so that `resolve_copies` would change it."""
    return bool(is_of_type(batch.words, FrameType.ROUTED).any())


def resolve_copies(
    buffer: Any, batch: FrameBatch, salt: int, *, topic_id: int | None = None, is_verified: bool = False
) -> FrameBatch:
    """Return the batch with its routed frames replaced by the appends of their copies.

    With `topic_id`, only copies of this topic are included. The new rows have seals under `salt`, as if they
    were stored in that file. `is_verified` states that the checksums of the batch are verified; otherwise
    they are verified here for frames with copies of the topic. Raises FrameInvalid with the offset of an
    invalid routed frame.
    """
    is_routed = is_of_type(batch.words, FrameType.ROUTED)
    if not is_routed.any():
        return batch
    routed = np.flatnonzero(is_routed)
    view = memoryview(buffer).cast("B")
    words: list[NDArray[np.uint64]] = []
    offsets: list[NDArray[np.int64]] = []
    copies: list[RoutedCopies] = []
    before = 0
    for row in routed.tolist():
        if row > before:
            _keep(batch, slice(before, row), words, offsets, copies)
        before = row + 1
        found = _opened(view, batch, row, salt, topic_id, is_verified=is_verified)
        if found is not None:
            words.append(found[0])
            offsets.append(found[1])
            copies.append(found[2])
    _keep(batch, slice(before, len(batch)), words, offsets, copies)
    return FrameBatch(
        np.concatenate(offsets), np.concatenate(words), batch.stop, batch.end, batch.reason,
        copies=RoutedCopies(
            np.concatenate([each.container_offsets for each in copies]),
            np.concatenate([each.routers for each in copies]),
            np.concatenate([each.cursors for each in copies]),
        ),
    )  # fmt: skip


def _keep(
    batch: FrameBatch,
    rows: slice,
    words: list[U64],
    offsets: list[NDArray[np.int64]],
    copies: list[RoutedCopies],
) -> None:
    """Add frames that are not routed frames, unchanged."""
    places = batch.offsets[rows]
    nothing = np.zeros(len(places), dtype=np.uint64)
    words.append(batch.words[rows])
    offsets.append(places)
    copies.append(RoutedCopies(places, nothing, nothing))


def _opened(
    view: memoryview, batch: FrameBatch, row: int, salt: int, topic_id: int | None, *, is_verified: bool
) -> tuple[U64, NDArray[np.int64], RoutedCopies] | None:
    """Return headers, offsets and facts of the copies in one routed frame; None if none is wanted."""
    start, total = int(batch.offsets[row]), int(batch.total_bytes[row])
    frame = view[start : start + total]
    try:
        rows = _table(frame[layout.HEADER_BYTES :])[1]
        if topic_id is not None:
            # Damaged rows of other topics are ignored. If this topic's row is damaged, seqs are missing.
            rows = rows[rows[:, R_TOPIC] == np.uint64(topic_id)]
            if not len(rows):
                return None
        if not is_verified:
            _require_sums(frame, batch.words[row : row + 1], salt)
        made, columns_at = append_headers(frame[layout.HEADER_BYTES :], rows)
    except FrameInvalid as e:
        raise FrameInvalid(e.reason, offset=start) from None
    made[:, layout.W_SEAL_XXH3] = seals(made, salt)
    places = np.full(len(rows), start, dtype=np.int64)
    copies = RoutedCopies(places, rows[:, R_ROUTER].copy(), rows[:, R_CURSOR].copy())
    return made, places + columns_at, copies


def topics_of(buffer: Any, batch: FrameBatch, row: int) -> U64:
    """Return the (n,) topic ids of the copies in a routed frame, unverified. Raise FrameInvalid."""
    start, total = int(batch.offsets[row]), int(batch.total_bytes[row])
    return _table(memoryview(buffer).cast("B")[start + layout.HEADER_BYTES : start + total])[1][:, R_TOPIC]


def is_valid_routed_frame(buffer: Any, batch: FrameBatch, row: int, *, is_verified: bool = True) -> bool:
    """Return whether the copies in this routed frame are valid appends.

    `is_verified` states that the caller has verified the checksums. If it is False, the body's is verified
    here.
    """
    start, total = int(batch.offsets[row]), int(batch.total_bytes[row])
    body = memoryview(buffer).cast("B")[start + layout.HEADER_BYTES : start + total]
    if not is_verified and _hash(body) != int(batch.words[row, layout.W_BODY_XXH3]):
        return False
    try:
        append_headers(body)
    except FrameInvalid:
        return False
    return True


def append_headers(body: memoryview, rows: U64 | None = None) -> tuple[U64, int]:
    """Return the (n, 10) headers of the appends in a routed frame's body, without seals, and an offset.

    The offset is the place of the columns in the body, common to all appends. `rows` selects copies; None =
    all. Raises FrameInvalid.
    """
    prefix, table = _table(body)
    rows = table if rows is None else rows
    columns_at = 8 * (PREFIX_WORDS + ROW_WORDS * len(table))
    head, tail, body_xxh3, count = prefix[P_HEAD:].tolist()
    stored = (head & layout.LEN_MASK) - layout.FRAME_LEN_MIN
    if (
        head >> layout.TYPE_SHIFT & 0xFF != FrameType.APPEND
        or stored != len(body) - columns_at
        or count >> 32
    ):
        raise FrameInvalid("routed frame: prefix contradicts the columns")
    if (rows[:, R_DURABILITY] > layout.DURABILITY_MASK).any() or (rows[:, R_EPOCH] >> np.uint64(32)).any():
        raise FrameInvalid("routed frame: a copy is not a valid append")
    made = np.zeros((len(rows), layout.HEADER_WORDS), dtype=np.uint64)
    made[:, layout.W_HEAD] = head
    made[:, layout.W_TOPIC] = rows[:, R_TOPIC]
    made[:, layout.W_BASE_SEQ] = rows[:, R_BASE_SEQ]
    made[:, layout.W_COMMIT_TS] = rows[:, R_COMMIT_TS]
    made[:, layout.W_COUNT_EPOCH] = count | rows[:, R_EPOCH] << np.uint64(layout.EPOCH_SHIFT)
    made[:, layout.W_TAIL] = tail | rows[:, R_DURABILITY] << np.uint64(layout.FLAGS_SHIFT)
    made[:, layout.W_BODY_XXH3] = body_xxh3
    if malformed(made).any() or tail >> layout.FLAGS_SHIFT & layout.DURABILITY_MASK:
        raise FrameInvalid("routed frame: a copy is not a valid append")
    return made, columns_at


def _table(body: memoryview) -> tuple[U64, U64]:
    """Return the prefix and the (n, ROW_WORDS) rows. Raise FrameInvalid."""
    words = np.frombuffer(body, dtype="<u8")
    count = int(words[P_ROWS]) if len(words) >= PREFIX_WORDS else 0
    stop = PREFIX_WORDS + ROW_WORDS * count
    if not 0 < count <= len(words) or stop > len(words):
        raise FrameInvalid("routed frame: copy table is empty or truncated")
    return words[:PREFIX_WORDS], words[PREFIX_WORDS:stop].reshape(count, ROW_WORDS)


def _require_sums(frame: memoryview, words: U64, salt: int) -> None:
    if int(seals(words, salt)[0]) != int(words[0, layout.W_SEAL_XXH3]):
        raise FrameInvalid("header does not match its seal")
    if _hash(frame[layout.HEADER_BYTES :]) != int(words[0, layout.W_BODY_XXH3]):
        raise FrameInvalid("body does not match its checksum")
