"""Disk images that a crash may leave, by the rules of the fault model.

Data that a completed sync covers is durable; all other changes are pending. These states are legal:

- Any subset of the pending writes of any files. The last write may be cut at a sector, lose its beginning, or
  have one garbled sector.
- In each directory, any prefix of the pending name changes.
- A length without contents, or contents without the length, because a length is a separate change.
- Deletion marks are changed in place and have no checksum. Each byte of them is a separate change and has
  either the old or the new mark.

Up to SUBSETS_MAX pending writes, every subset is generated. Above that: all prefixes, all omissions of one
write, all single writes, and some subsets drawn from a seed.

membership.py decides whether an image from another source is legal, without generating all images.
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
"""Up to this many pending writes, the last write of every subset is torn. Above it, only of prefixes and of
single writes."""
NAMES_MAX = 64
"""Maximum number of combinations of lost names in several directories."""
EDGES_MAX = 16
"""Maximum number of sector boundaries at which one write is cut: the first and last eight of a long write."""


Pending = tuple[FileNode, UnsyncedChange]


@dataclass(frozen=True, slots=True)
class Image:
    """Directories and files on the device."""

    directories: tuple[str, ...]
    files: dict[str, bytes]

    def key(self) -> bytes:
        """Return a hash of all names and contents."""
        found = xxhash.xxh3_128(repr(self.directories).encode())
        for path, data in sorted(self.files.items()):
            found.update(f"{path} {len(data)} ".encode())
            found.update(data)
        return found.digest()

    def mount(self) -> SimulatedDisk:
        """Return a disk with this image."""
        disk = SimulatedDisk(*self.directories)
        for path, data in self.files.items():
            disk.add_file(path, data)
        return disk

    def mount_below(self, cached: Image) -> SimulatedDisk:
        """Return a disk with this image whose page cache has the contents of `cached`, because a sync failed.

        The cached changes never reach the device, even if a later sync succeeds.
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
    """The disk after the operations so far: durable state, and pending changes in order."""

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
                    # Two directories are changed. Either change may reach the device without the other.
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
        """Return the tree of a disk with this image, all of it durable."""
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
        """Create a directory that is durable from the start."""
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
        """Return the image after a process kill: all data that was written to the kernel."""
        return self._image(self.pending, None)

    def as_synced(self) -> Image:
        """Return the image with durable data only, the minimum after a power loss."""
        return self._image([], {})

    def after_power_loss(self, seed: int = 0) -> Iterator[Image]:
        """Yield every image that a power loss at this point may leave."""
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
        """Yield how many name changes of each directory reached the device.

        Yields every combination. If there are more than NAMES_MAX, each directory varies alone, with all or
        none of the changes of the others.
        """
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
        """Return the image with these pending changes.

        `names` is the number of name changes by directory that reached the device. None means all changes of
        all directories. A directory that is not in `names` has none.
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
    """Return whether the order in which these changes reach the device makes a difference."""
    return any(
        one is other and _stop(first) > second.offset and _stop(second) > first.offset
        for (one, first), (other, second) in itertools.combinations(kept, 2)
    )


def _stop(change: UnsyncedChange) -> float:
    """Return the offset after the last byte that a change affects.

    It is infinite for a length change that may also shorten the file.
    """
    if change.data is not None:
        return change.offset + len(change.data)
    return change.offset if change.grows else math.inf


def _to_tear(pending: list[Pending]) -> Iterator[list[Pending]]:
    """Yield the subsets of changes whose last change is torn."""
    if len(pending) <= TORN_SUBSETS_MAX:
        for count in range(1, len(pending) + 1):
            yield from map(list, itertools.combinations(pending, count))
        return
    for i in range(len(pending)):
        yield pending[: i + 1]
        yield [pending[i]]


def _torn(kept: list[Pending]) -> Iterator[list[Pending]]:
    """Yield variants of the changes whose last write is torn.

    It is cut at each sector, without its beginning, with one sector garbled, with its length but no contents,
    or with contents but no length. A byte that is changed in place never tears.
    """
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
