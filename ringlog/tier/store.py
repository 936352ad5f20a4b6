"""SegmentStore: the interface of a place for cold segments, and the verification of copies.

A store contains the parts of segments as objects, with the names that they have below the data directory and
the same bytes. An object is visible as a whole or not at all. Every method may block for the store's timeout,
or forever on a directory whose device hangs. Callers must therefore call it from their own threads only, and
never in a loop that must not wait.

There are three kinds of errors. ColdUnavailable: the store cannot perform the operation now, and no data is
known to be lost. CorruptData: the store returned other bytes than it was given. DiskError: the source on the
host's disk cannot be read.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from typing import Protocol

import xxhash

from ringlog.errors import CorruptData
from ringlog.limits import MIB
from ringlog.storage.disk import Disk

COPY_BYTES = 1 * MIB
"""Size of the pieces (bytes) in which objects are copied, hashed and read back."""


class ColdMissing(CorruptData):
    """The store replied that the object does not exist."""


class ObjectReader(Protocol):
    """Reads parts of segments. Thread-safe."""

    def get_range(self, name: str, start: int, stop: int) -> bytes:
        """Return the bytes [start, stop); fewer only at the end of the object.

        Raises ColdMissing if the object does not exist, and ColdUnavailable.
        """
        ...

    def size(self, name: str) -> int:
        """Return the length in bytes. Raises ColdMissing, ColdUnavailable."""
        ...


class SegmentStore(ObjectReader, Protocol):
    """A place for parts of segments. Thread-safe. All methods are idempotent.

    An engine uses its store only as an ownership.OwnedStore.
    """

    def put(self, name: str, source: str) -> str:
        """Store the file at `source` durably under `name`, and replace an existing object.

        Returns the digest (digest_of) of the bytes that were read. Raises ColdUnavailable, DiskError.
        """
        ...

    @property
    def is_durable_at_once(self) -> bool:
        """Whether an object becomes visible only when it is durable. `make_durable` then does nothing."""
        ...

    def make_durable(self, name: str) -> None:
        """Make an existing object durable. Raises ColdUnavailable.

        Needed because a process that stored it may have died after it became visible, before it was durable.
        """
        ...

    def exists(self, name: str) -> bool:
        """Return whether the object exists. Raises ColdUnavailable if the check fails."""
        ...

    def list(self, prefix: str) -> Iterator[str]:
        """Yield the names below a folder, `topics` or `packs`, without temporary files.

        Raises ColdUnavailable.
        """
        ...

    def delete(self, name: str) -> None:
        """Remove an object. A missing object is no error. Raises ColdUnavailable."""
        ...


def file_pieces(disk: Disk, path: str, step: int = COPY_BYTES) -> Generator[bytes, None, None]:
    """Yield the contents of a file in pieces of `step` bytes. Raises DiskError."""
    fd = disk.open_read(path)
    try:
        offset = 0
        while piece := disk.read_at(fd, step, offset):
            yield piece
            offset += len(piece)
    finally:
        disk.close(fd)


def object_pieces(store: ObjectReader, name: str, step: int = COPY_BYTES) -> Iterator[bytes]:
    """Yield the contents of an object in pieces of `step` bytes. Raises ColdMissing, ColdUnavailable."""
    offset = 0
    while piece := store.get_range(name, offset, offset + step):
        yield piece
        offset += len(piece)
        if len(piece) < step:
            return


class Digest:
    """Length and XXH3-128 hash of bytes that arrive in pieces. Compares copies; not cryptographic."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_128()
        self.bytes: int = 0

    def add(self, piece: bytes) -> bytes:
        """Add one piece and return it."""
        self._hash.update(piece)
        self.bytes += len(piece)
        return piece

    @property
    def text(self) -> str:
        """The digest as `<length>:<hash>`."""
        return f"{self.bytes}:{self._hash.hexdigest()}"


def digest_of(pieces: Iterable[bytes]) -> str:
    """Return the digest (Digest.text) of all pieces together."""
    digest = Digest()
    for piece in pieces:
        digest.add(piece)
    return digest.text


def verify_object(store: ObjectReader, name: str, expected: str) -> None:
    """Read an object back and compare it with the digest `expected`.

    Raises CorruptData if it is missing or has another length or other bytes; ColdUnavailable.
    """
    length = int(expected.partition(":")[0])
    try:
        size = store.size(name)
        if size != length:
            raise CorruptData("cold object has another size than what was stored", file=name, bytes=size,
                              expected=length)  # fmt: skip
        found = digest_of(object_pieces(store, name))
    except ColdMissing:
        raise CorruptData("cold object is missing right after it was stored", file=name) from None
    if found != expected:
        raise CorruptData("cold object has other bytes than what was stored", file=name, bytes=length)
