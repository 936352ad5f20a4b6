"""Disk images that a crash may leave, by the rules of the fault model.

Durable is what a completed sync covers; the rest is pending. Legal is any subset of the pending writes of
any files, the last of them cut at a sector, its head lost or one sector of it garbled; names lost from
any point on, for each directory; lengths without contents and contents without lengths follow from
lengths being changes of their own. Deletion marks are changed where they lie and have no checksum: each
byte of them is a change of its own, and holds the old mark or the new one (DL-17).

Up to SUBSETS_MAX pending writes every subset is made, above that all prefixes, all omissions of one, all
single survivors and some subsets drawn from a seed.

Whether an image that was seen elsewhere is one of these is decided by membership.py, without making all.
"""

from __future__ import annotations

import copy
import itertools
import math
import posixpath
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import xxhash

from ringlog.errors import InvariantViolation
from ringlog.segment.layout import DEL
from ringlog.testing import disk as d
from ringlog.testing.simulated_disk import SimulatedDisk
from ringlog.testing.simulated_file import SECTOR_BYTES, DirectoryNode, FileNode, UnsyncedChange, apply

SUBSETS_MAX = 6
SEEDED_SUBSETS = 64
TORN_SUBSETS_MAX = 4
"""Up to so many pending writes the last one of every subset is torn; above, of prefixes and single ones."""
NAMES_MAX = 64
"""Combinations of names lost in several directories."""
EDGES_MAX = 16
"""Sector edges at which one write is torn: of a longer one the first and last eight."""


Pending = tuple[FileNode, UnsyncedChange]


@dataclass(frozen=True, slots=True)
class Image:
    """Directories and files as the device holds them."""

    directories: tuple[str, ...]
    files: dict[str, bytes]

    def key(self) -> bytes:
        """A hash of everything."""
        found = xxhash.xxh3_128(repr(self.directories).encode())
        for path, data in sorted(self.files.items()):
            found.update(f"{path} {len(data)} ".encode())
            found.update(data)
        return found.digest()

    def mount(self) -> SimulatedDisk:
        """A disk that holds this image and nothing else."""
        disk = SimulatedDisk(*self.directories)
        for path, data in self.files.items():
            disk.add_file(path, data)
        return disk

    def mount_below(self, cached: Image) -> SimulatedDisk:
        """A disk that holds this image while its kernel shows another: a sync failed (RD-2).

        What the device lacks never reaches it, whatever is synced later.
        """
        disk = self.mount()
        for path in sorted(set(cached.directories) - set(self.directories)):
            disk.make_dir(path)
        for path in set(self.files) - set(cached.files):
            disk.unlink(path)
        for path, data in cached.files.items():
            if self.files.get(path) == data:
                continue
            if path in self.files:
                disk.unlink(path)
            fd = disk.create(path)
            disk.write_at(fd, [self.files.get(path, b"")], 0)
            disk.sync_file(fd)
            if path in self.files:
                disk.sync_dir(posixpath.dirname(path))
            disk.write_at(fd, [data], 0)
            disk.truncate(fd, len(data))
            disk.fail_sync(fd)
            disk.close(fd)
        return disk


@dataclass(slots=True)
class Tree:
    """The disk as the operations so far left it: what is durable, and what is pending in which order."""

    root: DirectoryNode = field(default_factory=DirectoryNode)
    pending: list[Pending] = field(default_factory=list)

    def do(self, operation: d.Operation) -> None:
        """Apply one recorded operation."""
        match operation:
            case d.Create(path):
                self._parent(path).change({posixpath.basename(path): FileNode()})
            case d.Write(path, offset, data) if path.endswith(DEL):
                node = self._file(path)
                self.pending += [(node, made) for made in node.change_bytes(offset, data)]
            case d.Write(path, offset, data):
                self._change(path, offset, data)
            case d.SetLength(path, length):
                self._change(path, length, None)
            case d.Allocate(path, offset, length):
                if offset + length > len(self._file(path).shown):
                    self._change(path, offset + length, None, grows=True)
            case d.SyncData(path) | d.SyncFile(path):
                node = self._file(path)
                node.promote(node.serial)
                self.pending = [each for each in self.pending if each[0] is not node]
            case d.SyncDir(path):
                directory = self._directory(path)
                directory.promote(directory.changes)
            case d.Rename(source, target):
                node = self._file(source)
                if posixpath.dirname(source) == posixpath.dirname(target):
                    changes: dict[str, FileNode | DirectoryNode | None] = {
                        posixpath.basename(source): None,
                        posixpath.basename(target): node,
                    }
                    self._parent(target).change(changes)
                else:
                    # Two directories, and either may reach the device without the other.
                    self._parent(target).change({posixpath.basename(target): node})
                    self._parent(source).change({posixpath.basename(source): None})
            case d.Unlink(path) | d.RemoveDir(path):
                self._parent(path).change({posixpath.basename(path): None})
            case d.MakeDir(path):
                self._parent(path).change({posixpath.basename(path): DirectoryNode()})
            case _:
                raise InvariantViolation("no rule for a disk call", call=type(operation).__name__)

    @classmethod
    def of(cls, image: Image) -> Tree:
        """The tree of a disk that holds an image, all of it durable."""
        tree = cls()
        for path in image.directories:
            tree.make_durable_dir(path)
        for path, data in image.files.items():
            node = FileNode(shown=bytearray(data), durable=bytearray(data))
            directory = tree._parent(path)
            directory.shown[posixpath.basename(path)] = node
            directory.durable[posixpath.basename(path)] = node
        return tree

    def make_durable_dir(self, path: str) -> None:
        """A directory that exists from the beginning."""
        at = self.root
        for name in filter(None, path.split("/")):
            below = at.shown.setdefault(name, DirectoryNode())
            assert isinstance(below, DirectoryNode)
            at.durable[name] = below
            at = below

    def _change(self, path: str, offset: int, data: bytes | None, *, grows: bool = False) -> None:
        node = self._file(path)
        node.change(offset, data, grows=grows)
        self.pending.append((node, node.pending[-1]))

    def _directory(self, path: str) -> DirectoryNode:
        at = self.root
        for name in filter(None, path.split("/")):
            below = at.shown[name]
            assert isinstance(below, DirectoryNode), path
            at = below
        return at

    def _parent(self, path: str) -> DirectoryNode:
        return self._directory(posixpath.dirname(path))

    def _file(self, path: str) -> FileNode:
        node = self._parent(path).shown[posixpath.basename(path)]
        assert isinstance(node, FileNode), path
        return node

    # -- images ---------------------------------------------------------------------------------------

    def as_killed(self) -> Image:
        """What a process kill leaves: everything that was given to the kernel."""
        return self._image(self.pending, None)

    def as_synced(self) -> Image:
        """What power loss leaves at least."""
        return self._image([], {})

    def after_power_loss(self, seed: int = 0) -> Iterator[Image]:
        """Every image that losing power now may leave."""
        everything = list(self.pending)
        for kept in _subsets(everything, seed):
            yield self._image(kept, None)
            yield self._image(kept, {})
        for names in self._names_reached():
            yield self._image(everything, names)
            yield self._image([], names)
        for kept in _to_tear(everything):
            for torn in _torn(kept):
                yield self._image(torn, None)

    def _names_reached(self) -> Iterator[dict[int, int]]:
        """How many changes of each directory's names reached the device: every combination, or if those are
        too many, every directory for itself with all or nothing of the others."""
        behind = [each for each in self._directories() if each.changes > each.reached]
        points = [range(each.reached, each.changes + 1) for each in behind]
        if math.prod(map(len, points)) <= NAMES_MAX:
            for combination in itertools.product(*points):
                yield {id(each): point for each, point in zip(behind, combination, strict=True)}
            return
        for others in ("reached", "changes"):
            rest = {id(each): int(getattr(each, others)) for each in behind}
            for each, reached in zip(behind, points, strict=True):
                for point in reached:
                    yield rest | {id(each): point}

    def _directories(self) -> list[DirectoryNode]:
        found, queue = [], [self.root]
        while queue:
            directory = queue.pop()
            found.append(directory)
            queue += [each for each in directory.shown.values() if isinstance(each, DirectoryNode)]
        return found

    def _image(self, kept: Sequence[Pending], names: dict[int, int] | None) -> Image:
        """With these pending changes; `names`: how many changes of a directory reached the device.

        None = all of them; of a directory that `names` lacks, none.
        """
        directories: list[str] = []
        files: dict[str, bytes] = {}
        queue: list[tuple[str, DirectoryNode]] = [("", self.root)]
        while queue:
            path, directory = queue.pop()
            directories += [path] if path else []
            for name, node in _names(directory, names).items():
                if isinstance(node, DirectoryNode):
                    queue.append((f"{path}/{name}", node))
                else:
                    files[f"{path}/{name}"] = _content(node, kept)
        return Image(tuple(sorted(directories)), files)


def _names(directory: DirectoryNode, names: dict[int, int] | None) -> dict[str, FileNode | DirectoryNode]:
    if names is None:
        upto = directory.changes
    else:
        upto = names.get(id(directory), directory.reached)
    found = dict(directory.durable)
    for change in directory.pending[: upto - directory.reached]:
        for name, what in change.items():
            if what is None:
                found.pop(name, None)
            else:
                found[name] = what
    return found


def _content(node: FileNode, kept: Sequence[Pending]) -> bytes:
    mine = [change for owner, change in kept if owner is node]
    if not mine:
        return bytes(node.durable)
    content = copy.copy(node.durable)
    for change in mine:
        apply(content, change)
    return bytes(content)


def _subsets(pending: list[Pending], seed: int) -> Iterator[list[Pending]]:
    count = len(pending)
    if count <= SUBSETS_MAX:
        for bits in itertools.product((False, True), repeat=count):
            kept = list(itertools.compress(pending, bits))
            yield kept
            if _overlap(kept):
                yield kept[::-1]
        return
    yield from (pending[:i] for i in range(count + 1))
    for i in range(count):
        yield pending[:i] + pending[i + 1 :]
        yield [pending[i]]
    rng = random.Random(seed)
    for _ in range(SEEDED_SUBSETS):
        yield [each for each in pending if rng.random() < 0.5]


def _overlap(kept: list[Pending]) -> bool:
    """Whether the order in which these reach the device makes a difference."""
    return any(
        one is other and _stop(first) > second.offset and _stop(second) > first.offset
        for (one, first), (other, second) in itertools.combinations(kept, 2)
    )


def _stop(change: UnsyncedChange) -> float:
    """One past the last byte that a change decides; a length decides all behind it, unless it only grows."""
    if change.data is not None:
        return change.offset + len(change.data)
    return change.offset if change.grows else math.inf


def _to_tear(pending: list[Pending]) -> Iterator[list[Pending]]:
    """Of which changes the last one is torn."""
    if len(pending) <= TORN_SUBSETS_MAX:
        for count in range(1, len(pending) + 1):
            yield from map(list, itertools.combinations(pending, count))
        return
    for i in range(len(pending)):
        yield pending[: i + 1]
        yield [pending[i]]


def _torn(kept: list[Pending]) -> Iterator[list[Pending]]:
    """The kept changes with the last write cut at each sector, its head lost, one sector garbled; with its
    length and no contents, and with its contents and no length. A byte changed where it lies never tears."""
    node, last = kept[-1]
    data = last.data
    if not data or (len(data) == 1 and last.offset < len(node.durable)):
        return
    first = SECTOR_BYTES - last.offset % SECTOR_BYTES
    edges = [0, *range(first, len(data), SECTOR_BYTES), len(data)]

    def with_data(new: bytes) -> list[Pending]:
        return [*kept[:-1], (node, UnsyncedChange(last.serial, last.offset, new))]

    inner, sectors = edges[1:-1], list(itertools.pairwise(edges))
    if len(inner) > EDGES_MAX:
        half = EDGES_MAX // 2
        inner, sectors = inner[:half] + inner[-half:], sectors[:half] + sectors[-half:]
    for edge in inner:
        yield with_data(data[:edge])
        yield with_data(bytes(edge) + data[edge:])
    for start, stop in sectors:
        noise = bytes((byte * 31 + 7) & 0xFF for byte in data[start:stop])
        yield with_data(data[:start] + noise + data[stop:])
    yield with_data(bytes(len(data)))
    old_length = len(node.durable)
    if last.offset < old_length < last.offset + len(data):
        yield with_data(data[: old_length - last.offset])
