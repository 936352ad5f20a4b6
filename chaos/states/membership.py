"""Decides whether a crash could have left an image, without generating every legal image.

The rules are those of images.py, for each sector:

- In every directory, the names after some prefix of its pending changes.
- In every file, each sector as on the device, with any subset of the pending writes that touch it, in any
  order. A write is atomic within a sector and may end between any two sectors (torn).
- A length that some pending change sets.
- Garbled sectors, if the caller permits them. A device may garble a sector at a power loss; a file system
  that is stopped in software may not.

This accepts slightly more than images.py generates, which tears one write at a time. It never accepts less
(tests/chaos/test_states.py).
"""

from __future__ import annotations

import itertools
import posixpath
from collections.abc import Iterator, Sequence

from chaos.states.images import Image, Tree
from ringlog.testing import disk as d
from ringlog.testing.simulated_file import SECTOR_BYTES, DirectoryNode, FileNode, UnsyncedChange

ORDERS_MAX = 6
"""Number of writes of one sector up to which every order is tried. With more, each byte is checked alone."""
PREFIXES_MAX = 4_096
"""Maximum number of combinations of pending names that are tried before an image counts as illegal."""


def replayed(operations: Sequence[d.Operation], base: Image) -> Tree:
    """Return the disk after these calls. Notes among them are skipped."""
    tree = Tree.of(base)
    for operation in operations:
        if not isinstance(operation, d.DiskNote):
            tree.do(operation)
    return tree


def why_illegal(tree: Tree, observed: Image, *, garbled_max: int = 0) -> str:
    """Describe the part of an image that is illegal, or return an empty string.

    `garbled_max` is the permitted number of garbled sectors in one file.
    """
    return _why_below(tree.root, "", observed, garbled_max)


def _why_below(directory: DirectoryNode, path: str, observed: Image, garbled_max: int) -> str:
    seen = _names_below(observed, path)
    why = f"{path or '/'} holds {sorted(seen)}, which no prefix of its changes makes"
    for names in itertools.islice(_prefixes(directory), PREFIXES_MAX):
        if names.keys() != seen:
            continue
        why = _why_any(names, path, observed, garbled_max)
        if not why:
            return ""
    return why


def _why_any(names: dict[str, FileNode | DirectoryNode], path: str, observed: Image, garbled_max: int) -> str:
    for name, node in names.items():
        full = f"{path}/{name}"
        if isinstance(node, DirectoryNode):
            if full in observed.files:
                return f"{full} is a file and was made as a directory"
            why = _why_below(node, full, observed, garbled_max)
        elif full not in observed.files:
            return f"{full} is a directory and was made as a file"
        else:
            why = _why_contents(node, observed.files[full], garbled_max)
            why = why and f"{full}: {why}"
        if why:
            return why
    return ""


def _names_below(observed: Image, path: str) -> set[str]:
    every = [*observed.directories, *observed.files]
    return {posixpath.basename(each) for each in every if posixpath.dirname(each) in {path, path or "/"}}


def _prefixes(directory: DirectoryNode) -> Iterator[dict[str, FileNode | DirectoryNode]]:
    """Yield the names after each prefix of the pending changes, the longest prefix first."""
    states = [dict(directory.durable)]
    for change in directory.pending:
        names = dict(states[-1])
        for name, what in change.items():
            if what is None:
                names.pop(name, None)
            else:
                names[name] = what
        states.append(names)
    yield from reversed(states)


# -- contents ---------------------------------------------------------------------------------------------


def _why_contents(node: FileNode, data: bytes, garbled_max: int) -> str:
    pending = node.pending
    if len(data) not in _lengths(node):
        return f"{len(data)} bytes long, which no pending change makes it"
    garbled = 0
    for start in range(0, max(len(data), 1), SECTOR_BYTES):
        found = data[start : start + SECTOR_BYTES]
        if found == bytes(node.durable[start : start + len(found)]).ljust(len(found), b"\0"):
            continue
        mine = [made for made in pending if _touches(made, start, start + len(found))]
        if _sector_may_be(node, mine, start, found):
            continue
        is_written = any(made.data is not None for made in mine)
        garbled += 1
        if not is_written or garbled > garbled_max:
            return f"bytes {start}..{start + len(found)} are made by no subset of {len(mine)} pending writes"
    return ""


def _lengths(node: FileNode) -> set[int]:
    """Return every possible length: the end of a write, also if the write is cut at a sector."""
    found = {len(node.durable)}
    for made in node.pending:
        if made.data is None:
            found.add(made.offset)
            continue
        end = made.offset + len(made.data)
        found.add(end)
        found.update(range((made.offset // SECTOR_BYTES + 1) * SECTOR_BYTES, end, SECTOR_BYTES))
    return found


def _touches(made: UnsyncedChange, start: int, stop: int) -> bool:
    if made.data is None:
        # A shorter length clears the bytes after it, which matters if the file grows again.
        return not made.grows and made.offset < stop
    return made.offset < stop and made.offset + len(made.data) > start


def _sector_may_be(node: FileNode, pending: list[UnsyncedChange], start: int, found: bytes) -> bool:
    before = bytes(node.durable[start : start + len(found)]).ljust(len(found), b"\0")
    pieces = [_piece(made, start, len(found)) for made in pending]
    if len(pieces) <= ORDERS_MAX:
        return any(
            _applied(before, order) == found
            for count in range(len(pieces) + 1)
            for order in itertools.permutations(pieces, count)
        )
    return all(
        byte == before[at]
        or any(low <= at < low + len(data) and data[at - low] == byte for low, data in pieces)
        for at, byte in enumerate(found)
    )


def _piece(made: UnsyncedChange, start: int, length: int) -> tuple[int, bytes]:
    """Return (offset in the sector, bytes) of a change's part in a sector; zeros for a shorter length."""
    if made.data is None:
        low = max(made.offset - start, 0)
        return low, bytes(length - low)
    low = max(made.offset, start)
    return low - start, bytes(made.data[low - made.offset : start + length - made.offset])


def _applied(before: bytes, pieces: Sequence[tuple[int, bytes]]) -> bytes:
    data = bytearray(before)
    for low, piece in pieces:
        data[low : low + len(piece)] = piece
    return bytes(data)
