"""Runs the offline verifier on a disk in memory and compares its result with the engine's.

The verifier shares no decoder with the engine. It reads real files, so the files of an image are written
below a scratch directory. Only files that changed since the last image are written. Results are cached by
image, because many crashes recover to the same bytes.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from chaos.rigs.storage import COLD
from ringlog.drill.checks import GuaranteeBroken, verify
from ringlog.testing.simulated_disk import SimulatedDisk
from ringlog.verify.frame_decoder import VerifyError, decode_frame
from ringlog.verify.segment_decoder import DATA_HEADER_BYTES, read_data_header
from ringlog.verify.wal_decoder import WalFrameWalk, read_header
from tests.support.shard_world import DATA

APPEND = 1
KEPT_MAX = 20_000
"""Maximum number of images, and of files, whose result is cached."""

Record = tuple[int, int, int]
"""topic_id, epoch, seq."""


class Told(NamedTuple):
    """Facts about a topic that verifier and engine both report."""

    topic_id: int
    epoch: int
    head: int
    earliest: int
    records: int
    lost: tuple[tuple[int, int], ...]
    numbers: tuple[int, ...]


class Laid(NamedTuple):
    """Contents of a disk, with a hash of each file and of all files."""

    files: dict[str, bytes]
    digests: dict[str, bytes]
    key: bytes

    @classmethod
    def on(cls, disk: SimulatedDisk) -> Laid:
        """Return the present contents of a disk, including unsynced data."""
        files = disk.contents()
        digests = {path: xxhash.xxh3_128_digest(data) for path, data in files.items()}
        return cls(files, digests, xxhash.xxh3_128_digest(repr(sorted(digests.items())).encode()))


@dataclass(slots=True)
class Offline:
    """Verifies images below `scratch`, which must be an empty directory."""

    scratch: Path
    checks: int = 0
    """Number of comparisons."""
    verified: int = 0
    """Number of distinct images that the verifier read."""
    _laid: dict[str, bytes] = field(default_factory=dict)
    _kept: dict[bytes, dict[str, Told]] = field(default_factory=dict)
    _frames: dict[bytes, frozenset[tuple[Record, bytes]]] = field(default_factory=dict)

    def check(self, laid: Laid, topics: Mapping[str, tuple[Told, Mapping[int, bytes]]]) -> None:
        """Compare the verifier's result for a disk with the engine's topics. Raises GuaranteeBroken."""
        files, digests, key = laid
        if key not in self._kept:
            if len(self._kept) >= KEPT_MAX:
                self._kept.clear()
            self._kept[key] = self._verify(files, digests)
            self.verified += 1
        self.checks += 1
        said = {name: told for name, (told, _) in topics.items()}
        if self._kept[key] != said:
            raise GuaranteeBroken(f"verifier and engine differ: verifier {self._kept[key]}, engine {said}")
        stored = frozenset[tuple[Record, bytes]]().union(
            *[self._decoded(path, files[path], digest) for path, digest in digests.items()]
        )
        for told, records in topics.values():
            for seq, payload in records.items():
                if ((told.topic_id, told.epoch, seq), payload) not in stored:
                    raise GuaranteeBroken(
                        f"record {seq} of {told}: read by the engine, not found by the verifier"
                    )

    def _verify(self, files: Mapping[str, bytes], digests: Mapping[str, bytes]) -> dict[str, Told]:
        for path in self._laid.keys() - files.keys():
            (self.scratch / path[1:]).unlink()
        for path, digest in digests.items():
            if self._laid.get(path) != digest:
                target = self.scratch / path[1:]
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(files[path])
        self._laid = dict(digests)
        root, cold = self.scratch / DATA[1:], self.scratch / COLD[1:]
        cold.mkdir(exist_ok=True)
        found = verify(root, cold, is_deep=True)
        return {
            each.topic: Told(
                each.topic_id, each.epoch, each.head, each.earliest, each.records, tuple(each.lost),
                tuple(seq for first, last in each.ranges for seq in range(first, last + 1)),
            )
            for each in found.topics
        }  # fmt: skip

    def _decoded(self, path: str, data: bytes, digest: bytes) -> frozenset[tuple[Record, bytes]]:
        """Return every record of a file as the offline decoder reads it."""
        # The extension is part of the key: the same bytes under a temporary name are not a valid file.
        key = digest + path.rpartition(".")[2].encode()
        if key not in self._frames:
            if len(self._frames) >= KEPT_MAX:
                self._frames.clear()
            self._frames[key] = frozenset(_records_in(path, data))
        return self._frames[key]

    def close(self) -> None:
        """Remove the scratch directory."""
        shutil.rmtree(self.scratch, ignore_errors=True)


def _records_in(path: str, data: bytes) -> list[tuple[Record, bytes]]:
    try:
        if path.endswith(".log"):
            header = read_header(data)
            frames: Any = [seen.frame for seen in WalFrameWalk(data, header.salt, is_deep=True).frames()]
        elif path.endswith(".data"):
            frames = _frames_of_segment(data)
        else:
            return []
    except VerifyError:
        return []  # the file was never used; the verification reports damaged files
    return [
        ((frame.topic_id, frame.epoch, frame.base_seq + i), bytes(payload or b""))
        for frame in frames
        if frame.type == APPEND
        for i, payload in enumerate(frame.columns["payload"])
    ]


def _frames_of_segment(data: bytes) -> list[Any]:
    header, at, frames = read_data_header(data), DATA_HEADER_BYTES, []
    while at < len(data):
        frame = decode_frame(data, at, header.salt)
        frames.append(frame)
        at += frame.total
    return frames
