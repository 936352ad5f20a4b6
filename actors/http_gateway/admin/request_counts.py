"""Requests that the HTTP gateways have answered, by route and status, in shared memory.

Each gateway counts in a file of its own, which its successor continues. So every gateway can add the numbers
of all of them, and a sum never falls, whichever process dies.

The file consists of HTTP_COUNTS_MAX rows of 64 bytes, in the order in which the pairs were first seen:

 0   8   count   requests; 0 = no row from here on
 8  56   label   route, tab, status; then zeros

The count is written after the label. Only the gateway writes. Readers map the file.
"""

from __future__ import annotations

import mmap
import os
from collections import Counter
from collections.abc import Iterable, Iterator

from ringlog import shm
from ringlog.board.layout import BoardError
from ringlog.limits import HTTP_COUNTS_MAX

_ROW_BYTES, _ROW_WORDS = 64, 8
LABEL_BYTES_MAX = _ROW_BYTES - 8
_FILE_BYTES = HTTP_COUNTS_MAX * _ROW_BYTES
Counted = tuple[str, int]
"""Name of a route, and status."""


class RequestCounts:
    """Counts the requests of one gateway process.

    Example:
        counts = RequestCounts("/dev/shm/ringlog-…/http_gateway-00.counts")
        counts.add("GET /v0/topics", 200)
    """

    def __init__(self, path: str) -> None:
        """Continue the numbers of the predecessor, or make the file. Raises BoardError."""
        if not os.path.exists(path):
            shm.make_file(path, _FILE_BYTES, b"", BoardError)
        self._bytes = _mapped(path, writable=True)
        self._words = memoryview(self._bytes).cast("Q")
        self._at: dict[Counted, int] = {pair: at for pair, at, _ in _rows(self._bytes)}
        """Place of the count of each pair, in words."""

    def add(self, route: str, status: int) -> None:
        """Count a request."""
        at = self._at.get((route, status))
        if at is None:
            self._begin(route, status)
        else:
            self._words[at] += 1

    def _begin(self, route: str, status: int) -> None:
        at = len(self._at) * _ROW_WORDS
        label = f"{route}\t{status}".encode()
        if len(self._at) >= HTTP_COUNTS_MAX or len(label) > LABEL_BYTES_MAX:
            return
        begin = at * 8 + 8
        self._bytes[begin : begin + LABEL_BYTES_MAX] = label.ljust(LABEL_BYTES_MAX, b"\0")
        self._words[at] = 1
        self._at[route, status] = at


def sum_counts(paths: Iterable[str]) -> Counter[Counted]:
    """Return the sums over these files. A file that does not exist is left out. Raises BoardError."""
    found: Counter[Counted] = Counter()
    for path in paths:
        if os.path.exists(path):
            with _mapped(path, writable=False) as mapped:
                for pair, _, count in _rows(mapped):
                    found[pair] += count
    return found


def _mapped(path: str, *, writable: bool) -> mmap.mmap:
    fd, size = shm.open_file(path, BoardError, writable=writable)
    try:
        if size != _FILE_BYTES:
            raise BoardError("file of counts has the wrong size", path=path, bytes=size, expected=_FILE_BYTES)
        return mmap.mmap(fd, size, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ)
    finally:
        os.close(fd)


def _rows(mapped: mmap.mmap) -> Iterator[tuple[Counted, int, int]]:
    """Yield pair, place in words, and count of each row."""
    with memoryview(mapped) as plain, plain.cast("Q") as words:
        for at in range(0, len(words), _ROW_WORDS):
            count = words[at]
            if not count:
                return
            begin = at * 8 + 8
            route, _, status = mapped[begin : begin + LABEL_BYTES_MAX].rstrip(b"\0").decode().rpartition("\t")
            yield (route, int(status)), at, count
