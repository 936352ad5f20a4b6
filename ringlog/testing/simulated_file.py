"""State of a simulated file and directory, and the effect of a power loss on it."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

SECTOR_BYTES = 512


class PowerLossDamage(Enum):
    """Effect of a power loss on the unsynced changes of a file. Each is legal on some file system."""

    LOST = "lost"
    """No unsynced change reached the device."""
    KEPT = "kept"
    """All changes reached the device: contents, lengths and names."""
    SUBSET = "subset"
    """Some changes reached the device, in any order."""
    CUT = "cut"
    """SUBSET, and the last write ends at a sector boundary."""
    HEAD_LOST = "head_lost"
    """SUBSET, and the last write's beginning, up to a sector boundary, is zeros."""
    ZEROED = "zeroed"
    """SUBSET, and one sector of the last write is zeros."""
    GARBLED = "garbled"
    """SUBSET, and one sector of the last write is random bytes."""
    LENGTH_ONLY = "length_only"
    """Lengths reached the device, contents did not: new bytes are zeros."""
    CONTENT_ONLY = "content_only"
    """Contents reached the device, lengths did not: bytes beyond the old length are lost."""


@dataclass(slots=True)
class UnsyncedChange:
    """One unsynced change. If `data` is None, the length becomes `offset`; with `grows`, at least `offset`.

    `serial` increases within a file.
    """

    serial: int
    offset: int
    data: bytes | None
    grows: bool = False


@dataclass(slots=True, eq=False)
class FileNode:
    """Content of a file, independent of its name: visible (`shown`) and on the device (`durable`)."""

    shown: bytearray = field(default_factory=bytearray)
    durable: bytearray = field(default_factory=bytearray)
    pending: list[UnsyncedChange] = field(default_factory=list)
    serial: int = 0
    dirty: bool = False
    """Changed since the last sync that reported success, within this life of the writer."""
    locked: bool = False

    def change(self, offset: int, data: bytes | None, *, grows: bool = False) -> None:
        """Make a change visible at once and keep it for a sync."""
        self.serial += 1
        made = UnsyncedChange(self.serial, offset, data, grows)
        self.pending.append(made)
        self.dirty = True
        apply(self.shown, made)

    def change_bytes(self, offset: int, data: bytes) -> list[UnsyncedChange]:
        """Overwrite bytes in place, each as a separate change; return the changes.

        Each byte reaches the device independently and is never torn. Unchanged bytes cause no change.
        """
        before = len(self.pending)
        for at, byte in enumerate(data, offset):
            if at >= len(self.shown) or self.shown[at] != byte:
                self.change(at, bytes([byte]))
        return self.pending[before:]

    def copy(self, known: dict[int, Any]) -> FileNode:
        """Return an independent copy; the same one for each name of the file. `known`: copies by id."""
        if id(self) not in known:
            known[id(self)] = FileNode(
                bytearray(self.shown), bytearray(self.durable), list(self.pending), self.serial, self.dirty,
                self.locked,
            )  # fmt: skip
        found: FileNode = known[id(self)]
        return found

    def promote(self, upto: int) -> None:
        """Apply the changes up to a serial to the device."""
        covered = [made for made in self.pending if made.serial <= upto]
        for made in covered:
            apply(self.durable, made)
        # Serials increase, so these come first. Deleted in place, because another thread may be writing.
        del self.pending[: len(covered)]


def apply(image: bytearray, made: UnsyncedChange) -> None:
    """Apply the change to one version of a file."""
    if made.data is None and not made.grows:
        del image[made.offset :]
    if made.offset > len(image):
        image.extend(bytes(made.offset - len(image)))
    if made.data is not None:
        image[made.offset : made.offset + len(made.data)] = made.data


@dataclass(slots=True, eq=False)
class DirectoryNode:
    """Names in one directory. A value of None in `pending` removes the name."""

    shown: dict[str, FileNode | DirectoryNode] = field(default_factory=dict)
    durable: dict[str, FileNode | DirectoryNode] = field(default_factory=dict)
    pending: list[dict[str, FileNode | DirectoryNode | None]] = field(default_factory=list)
    reached: int = 0
    """Number of changes that reached the device."""

    def change(self, names: dict[str, FileNode | DirectoryNode | None]) -> None:
        """Make name changes visible at once; keep them, as one change, for a sync."""
        self.pending.append(names)
        _bind(self.shown, names)

    def copy(self, known: dict[int, Any]) -> DirectoryNode:
        """Return an independent copy; see FileNode.copy."""
        if id(self) not in known:
            known[id(self)] = twin = DirectoryNode(reached=self.reached)
            twin.shown = {name: each.copy(known) for name, each in self.shown.items()}
            twin.durable = {name: each.copy(known) for name, each in self.durable.items()}
            twin.pending = [
                {name: each and each.copy(known) for name, each in names.items()} for names in self.pending
            ]
        found: DirectoryNode = known[id(self)]
        return found

    @property
    def changes(self) -> int:
        """Number of all changes so far."""
        return self.reached + len(self.pending)

    def promote(self, upto: int) -> None:
        """Apply changes to the device until `upto` changes have reached it."""
        count = max(upto - self.reached, 0)
        for names in self.pending[:count]:
            _bind(self.durable, names)
        del self.pending[:count]
        self.reached += count


def _bind(
    table: dict[str, FileNode | DirectoryNode], names: dict[str, FileNode | DirectoryNode | None]
) -> None:
    for name, what in names.items():
        if what is None:
            table.pop(name, None)
        else:
            table[name] = what


def all_children(directory: DirectoryNode) -> list[FileNode | DirectoryNode]:
    """Return all nodes that the visible or durable names of a directory, or its pending changes, refer to."""
    brought = [what for names in directory.pending for what in names.values() if what is not None]
    return [*directory.shown.values(), *directory.durable.values(), *brought]


def lose_power(node: FileNode, damage: PowerLossDamage, rng: random.Random) -> None:
    """Apply the effect of a power loss to the unsynced changes of a file."""
    reached = _reached(node, damage, rng)
    length = len(node.durable)
    if damage is PowerLossDamage.LENGTH_ONLY:
        ends = [made.offset + len(made.data or b"") for made in reached]
        node.durable.extend(bytes(max([length, *ends]) - length))
    else:
        for made in reached[:-1]:
            apply(node.durable, made)
        for made in reached[-1:]:
            apply(node.durable, _torn(made, damage, rng))
        if damage is PowerLossDamage.CONTENT_ONLY:
            del node.durable[length:]
    node.pending.clear()
    node.shown = bytearray(node.durable)


def _reached(node: FileNode, damage: PowerLossDamage, rng: random.Random) -> list[UnsyncedChange]:
    if damage is PowerLossDamage.LOST:
        return []
    if damage in {PowerLossDamage.KEPT, PowerLossDamage.LENGTH_ONLY, PowerLossDamage.CONTENT_ONLY}:
        return list(node.pending)
    return rng.sample(node.pending, rng.randint(0, len(node.pending)))


def _torn(made: UnsyncedChange, damage: PowerLossDamage, rng: random.Random) -> UnsyncedChange:
    """Return the last change as it reached the device; sectors are counted from the start of the file.

    A change of one byte is never torn.
    """
    if made.data is None or len(made.data) == 1:
        return made
    size = len(made.data)
    edges = [
        edge - made.offset for edge in range(_next_sector(made.offset), made.offset + size, SECTOR_BYTES)
    ]
    if damage is PowerLossDamage.CUT:
        return UnsyncedChange(made.serial, made.offset, made.data[: rng.choice([0, *edges])])
    if damage is PowerLossDamage.HEAD_LOST:
        head = rng.choice([*edges, size])
        return UnsyncedChange(made.serial, made.offset, bytes(head) + made.data[head:])
    if damage in {PowerLossDamage.ZEROED, PowerLossDamage.GARBLED}:
        bounds = [0, *edges, size]
        which = rng.randrange(len(bounds) - 1)
        start, stop = bounds[which], bounds[which + 1]
        noise = rng.randbytes(stop - start) if damage is PowerLossDamage.GARBLED else bytes(stop - start)
        return UnsyncedChange(made.serial, made.offset, made.data[:start] + noise + made.data[stop:])
    return made


def _next_sector(offset: int) -> int:
    return (offset // SECTOR_BYTES + 1) * SECTOR_BYTES
