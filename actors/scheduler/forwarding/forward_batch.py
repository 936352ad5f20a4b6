"""Builds the frames of a pass: the copies that routers make of a range of their source.

Records are taken from the source's frames column by column, once for each transform, and form one frame.
Single records are processed only to match tags, if a router has a filter, and to stamp copies with their
origin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ringlog.actors.scheduler.forwarding.forwarding_core import CopyTransform, ForwardBatch, ReadForwardBatch
from ringlog.client.read.fetch_result import FetchResult
from ringlog.frame.batch import codecs_of
from ringlog.frame.layout import PAYLOAD_KIND_MASK, Column
from ringlog.frame.metadata import fields_of, json_value_of
from ringlog.limits import META_KEYS_MAX, ROUTER_HOPS_MAX
from ringlog.segment.frame_encoder import BlockSlice as Rows
from ringlog.segment.frame_encoder import CompressionPolicy, seal_frame, value_list
from ringlog.segment.records import Block, BytesColumnValues, HeaderRows, blocks_of
from ringlog.storage.frame_run import FrameRun
from ringlog.tags import parse_stored_match
from ringlog.topic.routers import RouterFlag
from ringlog.topic.tombstone import TTL
from ringlog.types import Codec

I64 = NDArray[np.int64]
STAMP = "_ringlog_router"
ORIGINAL = "_ringlog_original_meta"
_FLAGS_BITS = 8
_encode = msgspec.json.encode


def build_forward_batch(request: ReadForwardBatch, fetched: FetchResult) -> ForwardBatch:
    """Build the copies of the source after `asked.start`, as far as this fetch result reaches.

    The batch ends before the first record that exceeds the limits, or that differs in payload kind or hops:
    all copies of a frame share these.
    """
    if fetched.gap is not None:
        stop = min(fetched.gap.gap_to, request.until)
        # Expired records are skipped silently. All other lost records are reported.
        return ForwardBatch(stop, 0 if fetched.gap.reason == TTL else max(stop - request.start, 0))
    until = min(fetched.examined, request.until)
    blocks, stop = _select_blocks(fetched, request, until)
    if not blocks:
        return ForwardBatch(stop)
    hops = int(blocks[0].flags[0]) >> _FLAGS_BITS
    if hops >= ROUTER_HOPS_MAX:
        return ForwardBatch(stop)  # Limit of hops: these records are not copied. They may be in a cycle.
    compression = CompressionPolicy(_codec_of(fetched.runs))
    frames: list[bytes] = []
    copy_bytes: list[int] = []
    frame_of: dict[CopyTransform, int] = {}
    for transform in request.transforms:
        made = [found for block in blocks if (found := _transformed(block, transform, request)) is not None]
        if made:
            frame_of[transform] = len(frames)
            frames.append(_frame(made, compression))
            copy_bytes.append(_bytes_of(made))
    records = sum(map(len, blocks))
    return ForwardBatch(
        stop, 0, hops + 1, tuple(frames), frame_of, records, _bytes_of(blocks), tuple(copy_bytes)
    )


def _select_blocks(fetched: FetchResult, request: ReadForwardBatch, until: int) -> tuple[list[Block], int]:
    """Return the records of one pass, and the seq up to which it forwards the source."""
    blocks: list[Block] = []
    records = size = 0
    after = fetched.after
    for run in fetched.runs:
        if run.last_seq <= after or after >= until:
            continue
        run = run.frames_after(after)
        for block in blocks_of(run.buffer, run.batch):
            visible = np.flatnonzero((block.seqs > after) & (block.seqs <= until))
            if len(fetched.hidden):
                visible = visible[~np.isin(block.seqs[visible], fetched.hidden, assume_unique=True)]
            if not len(visible):
                continue
            weights = np.cumsum(_sizes(block)[visible])
            room = min(
                request.records - records, int(np.searchsorted(weights, request.bytes - size, "right"))
            )
            room = max(room, 0 if blocks else 1)
            kinds = _shared_flags(block)[visible]
            first = kinds[0] if not blocks else _shared_flags(blocks[0])[0]
            differs = np.flatnonzero(kinds != first)
            room = min(room, int(differs[0]) if len(differs) else len(visible))
            if room:
                blocks.append(_rows(block, visible[:room]))
                records, size = records + room, size + int(weights[room - 1])
            if room < len(visible):
                return blocks, int(block.seqs[visible[room]]) - 1
        after = max(after, run.last_seq)
    return blocks, until


def _sizes(block: Block) -> I64:
    """Return the accounted bytes of each record, payload and metadata, shape (n,)."""
    sizes: I64 = block.spans[Column.PAYLOAD].lengths
    return sizes + block.spans[Column.META].lengths if Column.META in block.spans else sizes


def _bytes_of(blocks: Sequence[Block]) -> int:
    return sum(int(_sizes(block).sum()) for block in blocks)


def _shared_flags(block: Block) -> NDArray[np.uint16]:
    """Return the flags that all records of a frame share, payload kind and hops, shape (n,)."""
    found: NDArray[np.uint16] = block.flags & np.uint16(0xFF00 | PAYLOAD_KIND_MASK)
    return found


def _rows(block: Block, rows: I64) -> Block:
    """Return some records of a block. Their commit times are 0: copies get the time of their own commit."""
    headers = block.headers
    if headers is not None:
        headers = HeaderRows(headers.firsts[rows], headers.counts[rows], headers.keys, headers.values)
    return Block(
        block.buffer, block.seqs[rows], np.zeros(len(rows), dtype=np.int64), block.flags[rows],
        {column: values.at(rows) for column, values in block.spans.items()},
        {column: values[rows] for column, values in block.fixed.items()}, headers,
        {column: valid[rows] for column, valid in block.valid.items()},
    )  # fmt: skip


def _frame(blocks: Sequence[Block], compression: CompressionPolicy) -> bytes:
    """Build one frame of the records that a transform leaves."""
    for block in blocks:
        block.flags &= np.uint16(PAYLOAD_KIND_MASK)
    rows = [Rows(block, 0, len(block)) for block in blocks]
    return b"".join(seal_frame(rows, topic_id=0, epoch=0, salt=0, compression=compression).pieces)


def _transformed(block: Block, transform: CopyTransform, request: ReadForwardBatch) -> Block | None:
    """Return the records that a transform leaves, as it copies them; None if there are none."""
    if transform.filter:
        if Column.TAG not in block.spans:
            return None
        is_wanted = parse_stored_match(transform.filter).test
        tags = value_list(block.buffer, block.spans[Column.TAG])
        chosen = [row for row, tag in enumerate(tags) if is_wanted(tag)]
        if not chosen:
            return None
        block = _rows(block, np.array(chosen, dtype=np.int64))
    dropped = set()
    if not transform.preserve_flags & RouterFlag.PRESERVE_NODE:
        dropped.add(Column.NODE)
    if not transform.preserve_flags & RouterFlag.PRESERVE_TAG:
        dropped.add(Column.TAG)
    spans = {column: values for column, values in block.spans.items() if column not in dropped}
    block = replace(block, spans=spans, flags=block.flags.copy())
    return _stamped(block, transform.stamp, request) if transform.stamp else block


def _stamped(block: Block, router: str, request: ReadForwardBatch) -> Block:
    """Return the records with a stamp of their origin in the metadata."""
    old = (
        value_list(block.buffer, block.spans[Column.META])
        if Column.META in block.spans
        else [b""] * len(block)
    )
    metas = [
        stamped_meta(meta, router, request.source, request.key.source_id, request.epoch, seq)
        for meta, seq in zip(old, block.seqs.tolist(), strict=True)
    ]
    lengths = np.fromiter(map(len, metas), dtype=np.int64, count=len(metas))
    starts = np.cumsum(lengths) - lengths + len(block.buffer)
    buffer = memoryview(bytes(block.buffer) + b"".join(metas))
    return replace(
        block, buffer=buffer, spans={**block.spans, Column.META: BytesColumnValues(starts, lengths)}
    )


def stamped_meta(meta: bytes, router: str, source: str, source_id: int, epoch: int, seq: int) -> bytes:
    """Return a record's metadata with the stamp of this router. It replaces the stamp of an earlier hop.

    The result is a JSON object, whatever a client wrote.
    """
    found = fields_of(meta) if meta else {}
    fields: dict[str, Any] = {ORIGINAL: json_value_of(meta)} if found is None else {**found}
    fields.pop(STAMP, None)
    if len(fields) >= META_KEYS_MAX and ORIGINAL not in fields:
        fields = {ORIGINAL: msgspec.Raw(meta)}
    fields[STAMP] = {
        "idempotency_key": f"router:{router}:{source_id}:{epoch}:{seq}", "router": router,
        "source_topic": source, "source_topic_id": source_id, "source_epoch": epoch, "source_seq": seq,
    }  # fmt: skip
    return _encode(fields)


def _codec_of(runs: Sequence[FrameRun]) -> Codec:
    """Return the codec of the source. Copies use the same one."""
    return Codec(int(codecs_of(runs[0].batch.words)[0])) if runs else Codec.NONE
