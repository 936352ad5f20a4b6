"""The tags part: the sorted tags of every topic, and the records of each tag. Pure.

A posting is a record's ordinal in the segment, counted from the first frame. It takes four bytes, whatever
the seqs are. A prefix of tags is a contiguous range of the sorted tags, and its postings are contiguous too.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from ringlog.errors import CorruptData
from ringlog.segment.layout import POSTINGS_PER_PAGE, TAGS_HEADER_BYTES, TagsHeader
from ringlog.tags import TagMatch

U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]
PAGE_BYTES = 4 * POSTINGS_PER_PAGE


class _Codes(dict[bytes, int]):
    """Maps tags to codes in the order of their first occurrence."""

    def __missing__(self, tag: bytes) -> int:
        self[tag] = code = len(self)
        return code


class TagsBuilder:
    """Collects tags topic by topic."""

    def __init__(self) -> None:
        self._codes = _Codes()
        self._found: list[tuple[NDArray[np.int64], U32]] = []
        self._starts = [0]
        self._texts: list[bytes] = []
        self._counts: list[NDArray[np.int64]] = []
        self._postings: list[U32] = []

    def add_frame(self, tags: list[bytes], ordinal: int) -> None:
        """Add the tags (b"" for none) of the records from `ordinal` of the segment on."""
        codes = np.fromiter(map(self._codes.__getitem__, tags), dtype=np.int64, count=len(tags))
        rows = np.arange(ordinal, ordinal + len(tags), dtype=np.uint32)
        self._found.append((codes, rows))

    def end_topic(self) -> None:
        """Sort the tags of the current topic."""
        if self._found:
            codes = np.concatenate([codes for codes, _ in self._found])
            rows = np.concatenate([rows for _, rows in self._found])
            nothing = self._codes.pop(b"", -1)
            codes, rows = codes[codes != nothing], rows[codes != nothing]
            texts = sorted(self._codes)
            ranks = np.zeros(len(texts) + 1, dtype=np.int64)
            ranks[[self._codes[text] for text in texts]] = np.arange(len(texts))
            ranked = ranks[codes]
            self._postings.append(rows[np.argsort(ranked, kind="stable")])
            self._counts.append(np.bincount(ranked, minlength=len(texts)))
            self._texts += texts
            self._found, self._codes = [], _Codes()
        self._starts.append(len(self._texts))

    def encode(self, *, number: int, salt: int, records: int) -> list[bytes]:
        """Return the whole part in pieces; an empty list if no record has a tag."""
        if not self._texts:
            return []
        text = b"".join(self._texts)
        postings = np.concatenate(self._postings).astype("<u4").tobytes()
        pages = [postings[at : at + PAGE_BYTES] for at in range(0, len(postings), PAGE_BYTES)]
        contents = b"".join(
            [
                np.array(self._starts, dtype="<u8").tobytes(),
                _ends(np.array(list(map(len, self._texts)), dtype=np.int64)),
                _ends(np.concatenate(self._counts)),
                np.array([xxhash.xxh3_64_intdigest(page) for page in pages], dtype="<u8").tobytes(),
                text.ljust((len(text) + 7) & ~7, b"\0"),
            ]
        )
        header = TagsHeader(
            len(self._starts) - 1, number, salt, len(self._texts), len(postings) // 4, len(text), records,
            xxhash.xxh3_64_intdigest(contents),
        )  # fmt: skip
        return [header.encode(), contents, postings]


def _ends(lengths: NDArray[np.int64]) -> bytes:
    bounds = np.zeros(len(lengths) + 1, dtype="<u8")
    np.cumsum(lengths, out=bounds[1:])
    return bounds.tobytes()


class TagsIndex:
    """The verified dictionary of a tags part. Postings are read and verified page by page."""

    def __init__(self, header: TagsHeader, contents: bytes, path: str) -> None:
        """Raise CorruptData if the contents do not verify or are inconsistent."""
        self.header = header
        self._path = path
        if xxhash.xxh3_64_intdigest(contents) != header.contents_xxh3:
            raise CorruptData("tag dictionary: checksum mismatch", file=path, offset=TAGS_HEADER_BYTES)
        words = np.frombuffer(contents[: len(contents) & ~7], dtype="<u8")
        at = header.topics + 1
        self._starts = words[:at]
        self._bounds = words[at : at + header.tags + 1].tolist()
        at += header.tags + 1
        self._ends = words[at : at + header.tags + 1]
        at += header.tags + 1
        self._pages = words[at : at + header.pages]
        self._text = contents[8 * (at + header.pages) :][: header.text_bytes]
        sound = (
            _rises(self._starts, header.tags)
            and _rises(np.array(self._bounds, dtype=np.uint64), header.text_bytes)
            and _rises(self._ends, header.postings)
        )
        if not sound:
            raise CorruptData("tag dictionary is inconsistent", file=path, offset=TAGS_HEADER_BYTES)

    def postings_of(self, row: int, match: TagMatch) -> list[tuple[int, int]]:
        """Return the postings of the matching tags as non-empty ranges [start, stop), ascending."""
        first, last = int(self._starts[row]), int(self._starts[row + 1])
        tag = match.tag
        low = bisect_left(range(last), tag, first, last, key=self._tag)
        if match.is_prefix:
            width = len(tag)
            high = bisect_left(range(last), True, low, last, key=lambda i: self._tag(i)[:width] > tag)
        else:
            high = low + (low < last and self._tag(low) == tag)
        found = [(low, high)]
        if match.levels:
            is_wanted = match.test
            chosen = np.fromiter((is_wanted(self._tag(i)) for i in range(low, high)), np.int8, high - low)
            steps = np.flatnonzero(np.diff(chosen, prepend=np.int8(0), append=np.int8(0)))
            found = [(low + start, low + stop) for start, stop in steps.reshape(-1, 2).tolist()]
        ranges = [(int(self._ends[start]), int(self._ends[stop])) for start, stop in found]
        return [(start, stop) for start, stop in ranges if start < stop]

    def tags_of(self, row: int) -> list[bytes]:
        """Return all tags of a topic, sorted."""
        return [self._tag(i) for i in range(int(self._starts[row]), int(self._starts[row + 1]))]

    def pages_of(self, start: int, stop: int) -> tuple[int, int, int]:
        """Return (offset in the file, bytes, first posting) of the pages with postings [start, stop)."""
        first = start // POSTINGS_PER_PAGE
        last = -(-stop // POSTINGS_PER_PAGE)
        offset = TAGS_HEADER_BYTES + self.header.contents_bytes + first * PAGE_BYTES
        count = min(last * POSTINGS_PER_PAGE, self.header.postings) - first * POSTINGS_PER_PAGE
        return offset, 4 * count, first * POSTINGS_PER_PAGE

    def check_pages(self, data: bytes, first_posting: int) -> U32:
        """Verify whole pages and return their postings. Raise CorruptData."""
        page = first_posting // POSTINGS_PER_PAGE
        for at in range(0, len(data), PAGE_BYTES):
            if xxhash.xxh3_64_intdigest(data[at : at + PAGE_BYTES]) != int(self._pages[page]):
                raise CorruptData("tag postings: checksum mismatch", file=self._path, page=page)
            page += 1
        found = np.frombuffer(data, dtype="<u4")
        if len(found) and int(found.max()) >= self.header.records:
            raise CorruptData(
                f"tag postings must be below {self.header.records}, got {int(found.max())}",
                file=self._path,
                page=page,
            )
        return found

    def _tag(self, index: int) -> bytes:
        return self._text[self._bounds[index] : self._bounds[index + 1]]


def _rises(bounds: U64, last: int) -> bool:
    """Return whether the values start at 0, never decrease, and end at `last`."""
    values: Any = bounds
    return (
        bool(len(values)) and not values[0] and values[-1] == last and bool((values[1:] >= values[:-1]).all())
    )
