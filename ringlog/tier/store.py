"""SegmentStore: what the engine asks of a place for cold segments, and how a copy is proven.

A store holds objects under the names that parts of segments have below the data directory, with the same
bytes (TI-12). An object appears whole or not at all. Every method may block for as long as the store's
timeout, or for ever on a directory whose device hangs: callers keep them off every path that must not wait
(TI-9), and bound them with threads of their own.

What can go wrong has three names: ColdUnavailable (the store did not do it, now; nothing is known to be
lost), CorruptData (it answered with other bytes than it was given) and DiskError (the source on our own
disk could not be read).
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from typing import Protocol

import xxhash

from ringlog.errors import CorruptData
from ringlog.limits import MIB
from ringlog.storage.disk import Disk

COPY_BYTES = 1 * MIB
"""Copied, hashed and read back in pieces of this size."""


class ColdMissing(CorruptData):
    """The store answered, and has no such object."""


class SegmentStore(Protocol):
    """A place for parts of segments. Safe to use from several threads. All calls may be repeated."""

    def put(self, name: str, source: str) -> str:
        """Store the file at `source`, whole and durable, in place of what had the name.

        Returns digest_of the bytes that were read from it. Raises ColdUnavailable, DiskError.
        """
        ...

    def make_durable(self, name: str) -> None:
        """Make sure that an object which is there outlives a power loss: whoever put it may have died after
        it appeared and before it was durable. Raises ColdUnavailable.
        """
        ...

    def get_range(self, name: str, start: int, stop: int) -> bytes:
        """Bytes [start, stop), fewer only at the end of the object.

        Raises ColdMissing when there is no such object, ColdUnavailable.
        """
        ...

    def size(self, name: str) -> int:
        """Length in bytes; raises ColdMissing, ColdUnavailable."""
        ...

    def exists(self, name: str) -> bool:
        """Say whether the object is there; a failure to look is ColdUnavailable, not an absence."""
        ...

    def list(self, prefix: str) -> Iterator[str]:
        """Names below a folder, `topics` or `packs`; no temporaries. Raises ColdUnavailable."""
        ...

    def delete(self, name: str) -> None:
        """Remove an object; absence is success. Raises ColdUnavailable."""
        ...


def file_pieces(disk: Disk, path: str, step: int = COPY_BYTES) -> Generator[bytes, None, None]:
    """The contents of a file, piece by piece. Raises DiskError."""
    fd = disk.open_read(path)
    try:
        offset = 0
        while piece := disk.read_at(fd, step, offset):
            yield piece
            offset += len(piece)
    finally:
        disk.close(fd)


def object_pieces(store: SegmentStore, name: str, step: int = COPY_BYTES) -> Iterator[bytes]:
    """The contents of an object, piece by piece. Raises ColdMissing, ColdUnavailable."""
    offset = 0
    while piece := store.get_range(name, offset, offset + step):
        yield piece
        offset += len(piece)
        if len(piece) < step:
            return


class Digest:
    """Length and XXH3-128 of bytes that come in pieces. Tells copies apart; it is no secret."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_128()
        self.bytes = 0

    def add(self, piece: bytes) -> bytes:
        """Take one piece in and hand it on."""
        self._hash.update(piece)
        self.bytes += len(piece)
        return piece

    @property
    def text(self) -> str:
        """`<length>:<hash>`."""
        return f"{self.bytes}:{self._hash.hexdigest()}"


def digest_of(pieces: Iterable[bytes]) -> str:
    """Digest.text of all pieces."""
    digest = Digest()
    for piece in pieces:
        digest.add(piece)
    return digest.text


def verify_object(store: SegmentStore, name: str, expected: str) -> None:
    """Read an object back and compare it with what was put (RD-22).

    Raises CorruptData when it is absent, has another length or other bytes; ColdUnavailable.
    """
    length = int(expected.partition(":")[0])
    try:
        size = store.size(name)
        if size != length:
            raise CorruptData("cold object has another size than what was stored", file=name, bytes=size,
                              expected=length)  # fmt: skip
        found = digest_of(object_pieces(store, name))
    except ColdMissing:
        raise CorruptData("cold object is gone right after it was stored", file=name) from None
    if found != expected:
        raise CorruptData("cold object does not hold what was stored", file=name, bytes=length)
