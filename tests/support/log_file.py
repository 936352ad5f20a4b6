"""A WAL file that is written frame by frame, so that tests of readers need no shard.

It uses none of the engine's encoders, only the constants of frame/layout.py. A reader that accepts it
therefore agrees with the documented layout.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import xxhash

from ringlog.envelope.messages import Extent
from ringlog.frame import layout
from ringlog.frame.layout import Column
from ringlog.limits import MIB, WAL_HEADER_BYTES
from ringlog.storage.disk import Disk
from ringlog.storage.layout import WalHeader, pack_file, wal_name

_FRAME = struct.Struct("<IBBHQQqIIQQIBBHQ")
TS_US = 1_700_000_000_000_000


def bytes_column(values: Sequence[bytes | None]) -> bytes:
    """Encode one bytes column: count + 1 offsets, padded, then the values, padded."""
    filled = [value or b"" for value in values]
    ends = [0]
    for value in filled:
        ends.append(ends[-1] + len(value))
    offsets = struct.pack(f"<{len(ends)}i", *ends)
    data = b"".join(filled)
    return offsets.ljust(layout.padded(len(offsets)), b"\0") + data.ljust(layout.padded(len(data)), b"\0")


def _column(column: Column, values: Sequence[Any]) -> bytes:
    if column in (*layout.TIME_COLUMNS, Column.COMMIT_TS):
        return struct.pack(f"<{len(values)}q", *values)
    return bytes_column(values)


def sealed_frame(
    columns: Mapping[Column, Sequence[Any]],
    *,
    topic_id: int,
    base_seq: int,
    salt: int = 0,
    epoch: int = 1,
    commit_ts: int = TS_US,
    kind: int = layout.FrameType.APPEND,
    control: bytes = b"",
) -> bytes:
    """Return one complete frame, sealed under `salt`: `columns` of bytes and times.

    Without columns, `control` is the body of a control frame."""
    count = len(next(iter(columns.values()))) if columns else 0
    bitmap = sum(1 << column for column in columns)
    body = b"".join([_column(column, columns[column]) for column in sorted(columns)])
    for column in [column for column in layout.NULLABLE if None in columns.get(column, ())]:
        bitmap |= 1 << layout.VALID_SHIFT + column
        bits = sum(1 << row for row, value in enumerate(columns[column]) if value is not None)
        body += bits.to_bytes(layout.padded((count + 7) // 8), "little")
    raw_len = len(body) or len(control)
    body = body or control.ljust(layout.padded(len(control)), b"\0")
    head = _FRAME.pack(
        layout.HEADER_BYTES + len(body) - layout.LEN_FIELD_BYTES, kind, layout.VERSION, bitmap, topic_id,
        base_seq, commit_ts, count, epoch, 0, 0, raw_len, 0, 0, 0, xxhash.xxh3_64_intdigest(body),
    )  # fmt: skip
    return head + xxhash.xxh3_64_intdigest(head, salt).to_bytes(8, "little") + body


class LogFile:
    """One WAL file under `root`, preallocated like a real one. `stop` is the end of its valid bytes."""

    def __init__(
        self,
        disk: Disk,
        root: str,
        *,
        incarnation: int = 1,
        n: int = 0,
        salt: int = 7,
        file_bytes: int = 4 * MIB,
        prefix: str = "",
    ) -> None:
        self.disk = disk
        self.path: str = wal_name(incarnation, n)
        self.file_id: int = pack_file(incarnation, n)
        self.salt = salt
        self.start = WAL_HEADER_BYTES
        self.stop: int = WAL_HEADER_BYTES
        self._prefix = prefix
        self.fd: int = disk.create(os.path.join(root, self.path))
        header = WalHeader(
            0, 1, n, incarnation, salt, b"b" * 16, b"e" * 16, TS_US, file_bytes, 0, 0, 0, 0
        )  # fmt: skip
        disk.allocate(self.fd, 0, file_bytes)
        disk.write_at(self.fd, [header.encode()], 0)

    def append(
        self, topic_id: int, base_seq: int, payloads: Sequence[bytes], *, epoch: int = 1,
        commit_ts: int = TS_US, columns: Mapping[Column, Sequence[Any]] | None = None,
    ) -> int:  # fmt: skip
        """Write one frame at the end; return its offset in the file."""
        frame = sealed_frame(
            {Column.PAYLOAD: payloads, **(columns or {})},
            topic_id=topic_id, base_seq=base_seq, salt=self.salt, epoch=epoch, commit_ts=commit_ts,
        )  # fmt: skip
        return self.write(frame)

    def write(self, frame: bytes) -> int:
        """Write bytes at the end; return their offset."""
        offset = self.stop
        self.disk.write_at(self.fd, [frame], offset)
        self.stop = offset + len(frame)
        return offset

    def damage(self, offset: int, flip: int = 1) -> None:
        """Flip bits of one byte."""
        old = self.disk.read_at(self.fd, 1, offset)
        self.disk.write_at(self.fd, [bytes([old[0] ^ flip])], offset)

    def extent(self, stop: int = 0, start: int = 0) -> Extent:
        """Return this file as an extent, with an open end unless `stop` is given."""
        return Extent(self._prefix + self.path, self.file_id, self.salt, start or self.start, stop)

    def close(self) -> None:
        """Sync and close the file."""
        self.disk.sync_data(self.fd)
        self.disk.close(self.fd)
